"""What several probes use: recorders, digests, and formats decoded without the runtime's code."""
