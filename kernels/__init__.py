"""Tensors in, tensors out: a folder for each op, with the equation (reference), PyTorch in tiles (cpu) and Triton."""
