"""Random checkpoints in DeepSeek's on-disk format: which layers, which values, which files."""
