"""The DeepSeek-V4 architecture: what is computed, for one sequence."""
