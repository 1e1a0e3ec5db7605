"""What rounding to FP8 and FP4 does, and what it costs."""
