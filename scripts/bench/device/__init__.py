"""What `scripts.bench gpu` measures: cases at real dimensions, their counts of bytes and FLOPs, clock and page."""
