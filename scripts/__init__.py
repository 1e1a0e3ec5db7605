"""Command line entry points, run as `python -m scripts.NAME`."""

import os

# Read once, when torch is first imported, which is after this: else, when one rank of a run dies, those that were
# connected to it fill the console with warnings that are C++ stack traces.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
