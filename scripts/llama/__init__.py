"""The small Llama-family model of the demo language: its network, where it starts, its training, its files."""
