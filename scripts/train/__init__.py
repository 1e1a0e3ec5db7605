"""Training of the demo, of drafting heads for it, of a small Llama, and of CoDA adapters over any of its family."""
