"""What `runtime` raises when a prompt, and not the code, is at fault."""


class PromptError(ValueError):
    """A prompt, its messages, its tokenizer.json or a completion is malformed: one line that names the culprit."""
