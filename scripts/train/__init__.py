"""Training: the demo checkpoint, drafting heads for it, a small Llama, CoDA adapters over any Llama-family checkpoint."""
