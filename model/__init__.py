"""The DeepSeek-V4 architecture, and in `llama` a second, small one: what is computed, for one sequence."""
