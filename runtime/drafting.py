"""Drafts: tokens that a drafter guesses to come next, and one call of the model then runs behind the last chosen one.

Tokens are chosen from the rows of that call as they would be from calls of one token, with the same sampler and
generator, until one is not what was drafted: what is behind it was rejected, and the state goes back (`State.rewind`).
The text is that of a run without drafts, to the token, because rows of one call have the bits of calls of one row: of
the op sets `ALIKE`, for up to `ROWS` rows (`tests.kernels.test_few_rows`; Triton's in its interpreter). Where that is
not shown no draft is made.
"""

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.architectures import Config, Model
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.mtp import HEADS_BY_NAME
from fathom.model.choices import AUTO, LOOKUP, OFF
from fathom.model.config import ModelConfig
from fathom.model.draft import DraftHead, Drafts
from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site
from fathom.model.variants.choice import GroupedShard, Shard
from fathom.runtime.arithmetic import cache_formats
from fathom.runtime.decoding import HEARS_NOTHING
from fathom.runtime.options import RunOptions

if TYPE_CHECKING:
    from array import array

ALIKE: Final = ("cpu", "triton")  # op sets
ROWS: Final = 8  # of a call that verifies, at most: the last chosen token and what is drafted behind it
LONGEST: Final = 4  # tokens that `lookup` compares
SHORTEST: Final = 2  # of which so many agree at least: single tokens recur everywhere


class Drafter(Protocol):
    """Guesses what follows.

    On several ranks each has its own, and all must guess alike: from the tokens, and from what is the same on all. One
    that reads rows of the model as well listens to their sites. How many rows of the last call have stayed, the number
    of tokens says: all but the last one were run.
    """

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        """Return up to `most` tokens that may follow `tokens`, an array of int64 that may not be kept."""
        ...


class Drafting(NamedTuple):
    """By what a run drafts."""

    name: str
    drafter: Drafter
    most: int  # tokens at a time
    listeners: Mapping[Site, Listener] = MappingProxyType({})  # through which the drafter reads the model
    begin: Callable[[], None] = lambda: None  # tells the drafter that a run begins, of other tokens than the last

    def listening(self, model: Model) -> AbstractContextManager[None]:
        """Let the drafter read the model inside the ``with``, where a run begins."""
        self.begin()
        return listening(model, self.listeners) if self.listeners else nullcontext()


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


class HeadDrafter:
    """A draft head over the sequence of one run."""

    def __init__(self, head: DraftHead, most: int, confidence: float) -> None:
        self.head, self.confidence = head, confidence
        self.listener, self.state = head.listener(most), head.new_state(most)
        self.drafts: Drafts | None = None  # what was drafted last
        self.before: int | None = None  # tokens of a restored state, which are in front of those that are given

    def begin(self) -> None:
        """Begin a run: how many tokens are in front of those that will be given is not known."""
        self.before = None

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        """Draft, as `Drafter`."""
        if self.before is None:  # nothing was taken back yet
            self.before = self.listener.stop - (len(tokens) - 1)
        following = tokens[-self.head.config.sliding_window :].tolist()
        drafts = self.head.draft(self.listener, following, self.before + len(tokens) - 1, most, self.state)
        self.drafts = drafts
        none = self.head.config.of_images  # which no text has, and no run takes
        said = list(itertools.takewhile(lambda token: token not in none, drafts.tokens))
        return said if drafts.confidence is None else said[: likely(drafts.confidence, self.confidence)]


def likely(confidence: Tensor, least: float) -> int:
    """How many drafts have such a chance, at least, that they and all before them are accepted; from logits [k]."""
    chances = confidence.sigmoid().cumprod(0)
    return int((chances >= least).sum())


def drafts_by(options: RunOptions, head: DraftHead | None = None) -> str | None:
    """By what a run drafts, with the head that was loaded for it; None where it does not."""
    if options.draft == OFF:
        return None
    return LOOKUP if head is None else head.kind.option


def drafting(options: RunOptions, head: DraftHead | None = None) -> Drafting | None:
    """What drafts over one sequence, with the head that was loaded for the run; None where nothing does."""
    if (name := drafts_by(options, head)) is None:
        return None
    if head is None:
        return Drafting(name, lookup, options.draft_tokens)
    most = min(options.draft_tokens, head.most)
    drafter = HeadDrafter(head, most, options.draft_confidence)
    return Drafting(name, drafter, most, {sites.STREAMS: drafter.listener}, drafter.begin)


def bound(draft: str) -> bool:
    """Whether a run that drafts so wants the checkpoint's draft head."""
    return draft in {AUTO, *HEADS_BY_NAME}


def check_head(counted: Census, draft: str, where: str) -> None:
    """Refuse a checkpoint without the draft head that is asked for by name: ConfigError."""
    if draft in HEADS_BY_NAME and counted.head is not HEADS_BY_NAME[draft]:
        found = counted.mtp_head
        instead = LOOKUP if found is None else found.option
        raise ConfigError(f"--draft {draft}: {where} has {found or 'no draft head'}, see --draft {instead}")


def check_draft(config: Config, options: RunOptions, ops: Ops, *, graph: bool | None = None) -> None:
    """Refuse drafts where text would not be that of a run without them, before any weight is read: ConfigError.

    `graph`: whether one was asked for, see `runtime.decoding.decoding`.
    """
    if options.draft == OFF:
        return
    if options.draft in HEADS_BY_NAME and not isinstance(config, ModelConfig):
        raise ConfigError(f"--draft {options.draft}: a {config.model_type} model has no draft head here")
    if graph and bound(options.draft):
        raise ConfigError(f"--draft {options.draft}: {HEARS_NOTHING}, see --graph")
    if options.draft_tokens >= ROWS:
        raise ConfigError(f"--draft-tokens {options.draft_tokens}: want at most {ROWS - 1}")
    if options.draft_tokens >= options.prefill_chunk:
        raise ConfigError(
            f"--draft-tokens {options.draft_tokens}: one call runs them and the token before them, --prefill-chunk is"
            f" {options.prefill_chunk}"
        )
    alike = "rows of one call are not shown to have the bits of calls of one token"
    if ops.name not in ALIKE:
        raise ConfigError(f"--draft: ops {ops.name}: {alike}; those of --ops {' and '.join(ALIKE)} have")
    unlike = (Shard,) if ops.name == "cpu" else (Shard, GroupedShard)
    for layer, variant in enumerate(cache_formats(options, config).variants):
        if isinstance(variant, unlike):
            raise ConfigError(f"--draft: layer {layer}: {variant}: {alike}")
