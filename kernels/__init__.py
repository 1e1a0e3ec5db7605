"""Tensors in, tensors out: the equations (reference), the same in tiles (blocked) and in Triton (fused)."""
