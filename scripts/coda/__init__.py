"""Training CoDA adapters over a Llama-family checkpoint: banks with gradients, the two phases, the adapters' file."""
