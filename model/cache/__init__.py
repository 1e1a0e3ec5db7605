"""Per-layer state: the caches, the forms in which they are stored, and how they are saved and merged."""
