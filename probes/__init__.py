"""Probes: each measures one thing that V4 runtimes get wrong in silence, and writes down what it found."""
