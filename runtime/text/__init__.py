"""Text in and out of a model: tokenizer, messages, the encoding of a prompt, and what an answer says."""
