"""Per-layer state: one file per kind of cache."""
