"""`Fault`: one way in which a V4 runtime was, or could be, wrong in silence, as a value that can be injected.

`probes.faults` is the table of them. Its rows are decorators, one for each `Place` where faults act: what is said of a
fault stands above its code.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fathom.kernels.formats import lloyd_max
from fathom.kernels.ops import Ops
from fathom.kernels.shard import reference as shard
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.draft import DraftHead
from fathom.model.errors import Tripwire
from fathom.model.transformer import Transformer
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.shard import ShardCache
from fathom.runtime.conversation import Conversation
from fathom.runtime.generate import generate
from fathom.runtime.sampling import Likelihood, Sampling, likelihood, sample
from fathom.runtime.statefile import load_state, save_state
from fathom.runtime.text.encoding import encode_messages, raw_text
from fathom.runtime.text.segments import Segment
from fathom.runtime.text.tokenizer import Tokenizer

# --- what a fault is

# What a run raises that a fault breaks, and not only makes wrong: a shape that does not fit, for one.
BREAKS_DOWN = (Tripwire, RuntimeError, IndexError, TypeError, AttributeError, AssertionError)


class Parts(NamedTuple):
    """What stands outside of a model: made by the probe that measures it, which takes it from here.

    The caches of grouped-query layers and what their codes rest on; and, of `runtime`, how messages and raw text become
    a prompt, text tokens, logits a token and its likelihood, one reply after the other a conversation, and a state a
    file and a state again.
    """

    coda: type[CodaCache]
    shard: type[ShardCache]
    codebook: Callable[[int, torch.device], Tensor]  # `kernels.formats.lloyd_max.codebook`
    relative_scores: Callable[..., Tensor]  # `kernels.shard.reference.relative_scores`
    encode_messages: Callable[..., list[Segment]]  # `runtime.text.encoding.encode_messages`
    raw_text: Callable[..., list[Segment]]  # `runtime.text.encoding.raw_text`
    tokenizer: type[Tokenizer]
    sample: Callable[[Tensor, Sampling, torch.Generator], int]  # `runtime.sampling.sample`
    likelihood: Callable[[Tensor, int, int], Likelihood]  # `runtime.sampling.likelihood`
    generate: Callable[..., Iterator[int]]  # `runtime.generate.generate`
    conversation: type[Conversation]
    save_state: Callable[..., None]  # `runtime.statefile.save_state`
    load_state: Callable[..., int | None]  # `runtime.statefile.load_state`


PARTS = Parts(
    CodaCache,
    ShardCache,
    lloyd_max.codebook,
    shard.relative_scores,
    encode_messages,
    raw_text,
    Tokenizer,
    sample,
    likelihood,
    generate,
    Conversation,
    save_state,
    load_state,
)


def healthy_ops(ops: Ops) -> Ops:
    """Change nothing."""
    return ops


def healthy_model(model: Transformer) -> None:
    """Change nothing."""
    del model


def healthy_head(head: DraftHead) -> None:
    """Change nothing."""
    del head


def healthy_parts(parts: Parts) -> Parts:
    """Change nothing."""
    return parts


Condition = Callable[[ModelConfig], str | None]  # why a config cannot express a fault; None where it can


def always(config: ModelConfig) -> str | None:
    """Every config can express the fault."""
    del config
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """What is replaced in the op set before loading or beside a model, or changed in what was just loaded."""

    name: str
    what: str  # one sentence, read in audits/faults.md
    seen: str  # where: a public thread, "the story" of the indexer that was off for months, or the mistake's kind
    ops: Callable[[Ops], Ops] = healthy_ops
    inject: Callable[[Transformer], None] = healthy_model
    head: Callable[[DraftHead], None] = healthy_head
    parts: Callable[[Parts], Parts] = healthy_parts
    between_ranks: bool = False  # on one rank alone it does nothing
    in_variants: bool = False  # where every layer remembers in full it does nothing
    in_runtime: bool = False  # in what is read and drawn, in no tensor
    in_drafts: bool = False  # where no token is drafted, or taken back, it does nothing
    whole_calls: bool = False  # what it does to a token depends on the other tokens of the call
    inapplicable: Condition = always


# --- what a config needs to have, to express a fault


def layers(*kinds: LayerKind) -> Condition:
    """Layers of one of these kinds."""
    names = " or ".join(kind.name for kind in kinds)
    return lambda config: None if set(kinds) & set(config.layer_kinds) else f"the model has no {names} layer"


def of_v4(config: ModelConfig) -> str | None:
    """A V4: faults of V4.1 are put into layers of the oracle alone (`probes.judge.faults_v41`)."""
    return None if config.v41 is None else "it is put into a DeepSeek-V4, this is a V4.1"


def all_of(*conditions: Condition) -> Condition:
    """Each of these; the first that is not met is told."""
    return lambda config: next((why for condition in conditions if (why := condition(config)) is not None), None)


# --- where a fault acts

Change = TypeVar("Change")


@dataclass(frozen=True, slots=True)
class Place(Generic[Change]):
    """Where faults act, as the decorator of their rows in a table: what is written under a row is put there.

    Parameters
    ----------
    table
        Faults by name, in the order of their rows.
    put
        A fault with one more change in place.
    between_ranks, in_variants, in_runtime, in_drafts
        See `Fault`.

    """

    table: dict[str, Fault]
    put: Callable[[Fault, Change], Fault]
    between_ranks: bool = False
    in_variants: bool = False
    in_runtime: bool = False
    in_drafts: bool = False

    def __call__(
        self, name: str, what: str, *, seen: str, needs: Condition = always, whole_calls: bool = False
    ) -> Callable[[Change], Change]:
        """Begin the row of a fault."""
        assert name not in self.table, f"two faults are called {name}"
        self.table[name] = Fault(
            name,
            what,
            seen,
            between_ranks=self.between_ranks,
            in_variants=self.in_variants,
            in_runtime=self.in_runtime,
            in_drafts=self.in_drafts,
            whole_calls=whole_calls,
            inapplicable=all_of(of_v4, needs),
        )
        return self.too(name)

    def too(self, name: str) -> Callable[[Change], Change]:
        """Let the fault of a row that was begun before act here too."""

        def add(change: Change) -> Change:
            self.table[name] = self.put(self.table[name], change)
            return change

        return add


def put_in_ops(fault: Fault, change: Callable[[Ops], Ops]) -> Fault:
    """Return a fault that changes the op set so, too."""
    return replace(fault, ops=lambda ops: change(fault.ops(ops)))


def put_in_model(fault: Fault, change: Callable[[Transformer], None]) -> Fault:
    """Return a fault that changes a loaded model so, too."""

    def inject(model: Transformer) -> None:
        fault.inject(model)
        change(model)

    return replace(fault, inject=inject)


def put_in_head(fault: Fault, change: Callable[[DraftHead], None]) -> Fault:
    """Return a fault that changes a loaded draft head so, too."""

    def inject(head: DraftHead) -> None:
        fault.head(head)
        change(head)

    return replace(fault, head=inject)


def put_in_parts(fault: Fault, change: Callable[[Parts], Parts]) -> Fault:
    """Return a fault that changes what stands beside a model so, too."""
    return replace(fault, parts=lambda parts: change(fault.parts(parts)))


def become(part: object, faulty: type) -> None:
    """Make an object one of a faulty subclass; all that it holds stays."""
    part.__class__ = faulty
