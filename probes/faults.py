"""Faults to inject: each is a way in which a V4 runtime was, or could be, wrong in silence."""

from collections.abc import Callable
from dataclasses import dataclass

from kernels.ops import Ops
from model.config import ModelConfig
from model.transformer import Transformer


def _healthy_ops(ops: Ops) -> Ops:
    return ops


def _healthy_model(model: Transformer) -> None:
    del model


def _always(config: ModelConfig) -> str | None:
    del config
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: what it replaces in the op set, or changes in a model that was just built."""

    name: str
    what: str  # one sentence
    seen: str  # where it was seen, or "story" for the indexer that was off
    ops: Callable[[Ops], Ops] = _healthy_ops
    inject: Callable[[Transformer], None] = _healthy_model
    inapplicable: Callable[[ModelConfig], str | None] = _always  # why a config cannot express it
