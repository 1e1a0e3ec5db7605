"""From a directory and a prompt to tokens: options, loading, tokenizer, encoding, sampling, generation."""
