"""The errors of the outside world: each message names the file, tensor, field or flag at fault.

Scripts turn them into one line and exit status 2. A programmer's mistake is an `assert`, never one of these.
"""

from typing import Any

QUOTED_LENGTH = 120


class ConfigError(ValueError):
    """A config.json that is damaged, incomplete, contradictory, or describes something not supported."""


class CheckpointError(ValueError):
    """A checkpoint whose files, tensors or values are not what its config demands."""


class CapacityError(ValueError):
    """A request that does not fit into what was allocated or into the memory at hand."""


class StateError(ValueError):
    """A saved state that does not belong to this model, checkpoint or set of options."""


def quoted(text: str) -> str:
    """A name from a file, fit for one line of a message: control characters escaped, long names cut.

    Parameters
    ----------
    text : str
        Any string; it may hold newlines, lone surrogates or megabytes.
    """
    if len(text) <= QUOTED_LENGTH:
        return ascii(text)
    return f"{text[:QUOTED_LENGTH]!a}... ({len(text)} characters)"


def shown(value: Any) -> str:
    """A value from a file, fit for one line of a message: as Python writes it in ASCII, cut when long."""
    text = ascii(value)
    return text if len(text) <= QUOTED_LENGTH else f"{text[:QUOTED_LENGTH]}..."
