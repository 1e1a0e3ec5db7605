"""Command line entry points, run as `python -m scripts.NAME`."""
