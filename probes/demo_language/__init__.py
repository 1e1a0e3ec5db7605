"""The language of the demo checkpoint: its words, its documents, and prompts with known answers in it."""
