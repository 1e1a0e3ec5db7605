"""By what a run decodes: the model itself, call by call, or a CUDA graph of one call."""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.architectures import Config, Model
from fathom.model.config import ModelConfig
from fathom.model.draft import DraftHead
from fathom.model.errors import ConfigError
from fathom.model.observe.observer import observed
from fathom.model.state import State
from fathom.model.transformer import Transformer

HEARS_NOTHING: Final = "a draft head hears nothing of a captured call"
LISTENED: Final = "the model has listeners, which hear nothing of a captured call"

# The next token to the logits after it, [vocab] float32, which the next call may overwrite.
Step = Callable[[int], Tensor]


class Decoding(NamedTuple):
    """How a run decodes, as its report says."""

    how: str  # "graph" or "eager"
    why_eager: str | None  # why not by a graph; None: by one
    step: Step


def eager(model: Model, state: State) -> Step:
    """The model itself, with a call of one token."""

    def step(token: int) -> Tensor:
        return model.logits(model(torch.tensor([token], dtype=torch.int64, device=model.device), state))[0]

    return step


def check_graph(config: Config, device: str, ops: Ops) -> None:
    """Refuse --graph before any weight is read, where that can be known by then: ConfigError, saying why."""
    if (why := _why_no_graph(config, device, ops)) is not None:
        raise ConfigError(f"--graph: {why}")


def decoding(model: Model, state: State, *, graph: bool | None, steps: int, head: DraftHead | None = None) -> Decoding:
    """Choose how `state` is decoded, and capture the graph where it is by one.

    Parameters
    ----------
    model, state
        The state as it is before the run: its prompt may yet have to be prefilled.
    graph
        Whether one is asked for: True, and ConfigError, saying why, where there can be none; False; None: where there
        can be one. Why there is none is told by `Decoding.why_eager`.
    steps
        Tokens that will be decoded at most. For none nothing is captured.
    head
        What drafts, where a head does.

    """
    why = "--no-graph" if graph is False else _why_eager(model, head)
    if why is None and steps < 1:
        why = "no token to decode"
    if why is None:
        from fathom.runtime import graph as graphs  # noqa: PLC0415 (Triton is not on every platform)

        assert isinstance(model, Transformer), f"a captured call of a {type(model).__name__}"
        return Decoding("graph", None, graphs.Captured(graphs.Step(model, state)))
    if graph and steps >= 1:
        raise ConfigError(f"--graph: {why}")
    return Decoding("eager", why, eager(model, state))


def _why_no_graph(config: Config, device: str, ops: Ops) -> str | None:
    if not isinstance(config, ModelConfig):
        return f"a {config.model_type} model: only DeepSeek-V4 can be captured"
    if device != "cuda":
        return f"--device {device}: CUDA graphs are of CUDA devices"
    if ops.name != "triton":
        return f"--ops {ops.name}: a captured call is of the triton kernels"
    return None


def _why_eager(model: Model, head: DraftHead | None) -> str | None:
    why = _why_no_graph(model.config, model.device.type, model.arithmetic.ops)
    if why is not None:
        return why
    if head is not None:
        return f"--draft {head.kind.option}: {HEARS_NOTHING}"
    if observed(model).listening:
        return LISTENED
    from fathom.runtime.graph import refusal  # noqa: PLC0415 (Triton is not on every platform)

    assert isinstance(model, Transformer), f"a V4 config of a {type(model).__name__}"
    return refusal(model)
