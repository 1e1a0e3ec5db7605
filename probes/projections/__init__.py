"""What lies between a layer's input and its attention, and after it: projections, norms, rotations, pooling."""
