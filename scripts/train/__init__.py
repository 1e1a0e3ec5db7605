"""Training of the demo, of draft heads for it, of a small Llama, and of CoDA adapters over any of its family."""
