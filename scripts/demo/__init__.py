"""The demo checkpoint: its synthetic language, the network it is trained as, and its export to DeepSeek's format."""
