"""Drafts: tokens that a drafter guesses to come next, and one call of the model then runs behind the last chosen one.

Tokens are chosen from the rows of that call as they would be from calls of one token, with the same sampler and
generator, until one is not what was drafted: what is behind it was rejected, and the state goes back (`State.rewind`).
The text is that of a run without drafts, to the token, because rows of one call have the bits of calls of one row: on
the op set `cpu`, for up to `ROWS` rows (`tests.kernels.test_few_rows`). Where that is not shown no draft is made.
"""

from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from kernels.ops import Ops
from model.architectures import Config
from model.errors import ConfigError
from model.variants.choice import Shard
from runtime.arithmetic import cache_formats
from runtime.options import RunOptions

if TYPE_CHECKING:
    from array import array

ROWS: Final = 8  # of a call that verifies, at most: the last chosen token and what is drafted behind it
LONGEST: Final = 4  # tokens that `lookup` compares
SHORTEST: Final = 2  # of which so many agree at least: single tokens recur everywhere


class Drafter(Protocol):
    """Guesses what follows.

    On several ranks each has its own, and all must guess alike: from the tokens, and from what is the same on all. One
    that reads rows of the model as well (an MTP head, DSpark) listens to their sites. How many rows of the last call
    have stayed, the number of tokens says: all but the last one were run.
    """

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        """Return up to `most` tokens that may follow `tokens`, an array of int64 that may not be kept."""
        ...


class Drafting(NamedTuple):
    """By what a run drafts."""

    name: str
    drafter: Drafter
    most: int  # tokens at a time


def lookup(tokens: "array[int]", most: int) -> list[int]:
    """What followed when the last tokens came before: of the places where most of them agree, the latest.

    A sequence that has begun to repeat itself is drafted as going on so.
    """
    known = np.frombuffer(tokens, dtype=np.int64)
    count = len(known)
    places, agree = np.flatnonzero(known[:-1] == known[-1:]), 1
    while agree < min(LONGEST, count):
        longer = places[places >= agree]
        longer = longer[known[longer - agree] == known[count - 1 - agree]]
        if not len(longer):
            break
        places, agree = longer, agree + 1
    if agree < SHORTEST or not len(places):
        return []
    after, drafted = int(places[-1]) + 1, list[int]()
    for at in range(after, after + most):
        drafted.append(int(known[at]) if at < count else drafted[at - count])
    return drafted


def drafting(options: RunOptions) -> Drafting | None:
    """By what a run drafts; None where it does not."""
    return Drafting("lookup", lookup, options.draft_tokens) if options.draft_tokens else None


def check_draft(config: Config, options: RunOptions, ops: Ops) -> None:
    """Refuse drafts where text would not be that of a run without them, before any weight is read: ConfigError."""
    if not options.draft_tokens:
        return
    if options.draft_tokens >= ROWS:
        raise ConfigError(f"--draft-tokens {options.draft_tokens}: want at most {ROWS - 1}")
    if options.draft_tokens >= options.prefill_chunk:
        raise ConfigError(
            f"--draft-tokens {options.draft_tokens}: one call runs them and the token before them, --prefill-chunk is"
            f" {options.prefill_chunk}"
        )
    alike = "rows of one call are not shown to have the bits of calls of one token"
    if ops.name != "cpu":
        raise ConfigError(f"--draft: ops {ops.name}: {alike}; those of --ops cpu have")
    for layer, variant in enumerate(cache_formats(options, config).variants):
        if isinstance(variant, Shard):
            raise ConfigError(f"--draft: layer {layer}: {variant}: {alike}")
