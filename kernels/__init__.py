"""Tensors in, tensors out: a folder for each op, with the equation (reference), a CPU's loops and tiles, and Triton."""
