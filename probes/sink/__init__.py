"""Attention sinks: the op over a grid, and the sinks that acted in a run."""
