"""Tensors in, tensors out: the equations (reference) and the same in tiles (blocked)."""
