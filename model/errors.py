"""The errors that a run can end with: each message names the file, tensor, field, flag or place at fault.

Scripts turn those of the outside world into one line and exit status 2, a tripwire and a disagreement of ranks into one
line and exit status 1. A programmer's mistake is an `assert`, never one of these.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

QUOTED_LENGTH = 120
WORD_LENGTH = 400
LINE_LENGTH = 2000
CLOSE = 0.8  # of difflib's ratio: a letter wrong in a name, or two


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


def did_you_mean(name: str, expected: Iterable[str]) -> str:
    """What follows a name that is not known: one that is expected, and missing, if that is nearly the same."""
    close = get_close_matches(name, list(expected), n=1, cutoff=CLOSE) if len(name) <= QUOTED_LENGTH else []
    return f" (did you mean {close[0]}?)" if close else ""


def one_line(message: str) -> str:
    """A message as one line that a terminal can show: what is not printable is escaped, what is long is cut.

    Messages quote what they take from files; this is for the rest of them, paths and other people's messages. Long
    words, as paths are, and long lines are cut in their middle: behind a thing's name stands what is wrong with it.
    """
    joined = "; ".join(message.splitlines())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)
    words = (_cut(word, WORD_LENGTH) for word in shown.split(" "))
    return _cut(" ".join(words), LINE_LENGTH)


def _cut(text: str, most: int) -> str:
    """A text without its middle where it has more characters than that."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}... ({len(text)} characters) ...{text[-(most // 2) :]}"


class RankDisagreement(RuntimeError):
    """A tensor that must be the same on every rank and is not: the first of its values that differs.

    Parameters
    ----------
    site, layer
        Which tensor, see `model.observe.sites`; layer None outside of all layers.
    rank
        The first rank that differs from rank 0.
    coordinate
        Of the first value that differs; None where the shapes do.
    here, there
        That value (or shape) on rank 0 and on `rank`.

    """

    def __init__(
        self, site: str, layer: int | None, rank: int, coordinate: tuple[int, ...] | None, here: Any, there: Any
    ) -> None:
        where = "" if layer is None else f" of layer {layer}"
        place = "shape" if coordinate is None else f"at {list(coordinate)}"
        super().__init__(f"{site}{where}, {place}: {here} on rank 0, {there} on rank {rank}")
        self.site, self.layer, self.rank, self.coordinate, self.here, self.there = (
            *(site, layer, rank, coordinate),
            *(here, there),
        )

    def __reduce__(self) -> tuple[Any, ...]:  # as it is made, from a process to another
        return type(self), (self.site, self.layer, self.rank, self.coordinate, self.here, self.there)


class Tripwire(RuntimeError):
    """A value that no correct run produces.

    Parameters
    ----------
    site
        Where in the model, for example "logits"; see `model.observe.sites`.
    layer, position
        Of the first place at fault; None where there is no such thing.
    measured, expected
        What was found there and what should have been.

    """

    def __init__(self, site: str, layer: int | None, position: int | None, measured: str, expected: str) -> None:
        where = "" if layer is None else f" of layer {layer}"
        when = "" if position is None else f" at position {position}"
        super().__init__(f"{site}{where}{when}: {measured}, expected {expected}")
        self.site, self.layer, self.position = site, layer, position
        self.measured, self.expected = measured, expected

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.site, self.layer, self.position, self.measured, self.expected)
