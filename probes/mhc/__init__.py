"""The residual streams: Sinkhorn, the weights of reading and writing, and the direction of mixing."""
