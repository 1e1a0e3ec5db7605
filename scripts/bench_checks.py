"""What being watched costs the demo checkpoint: sites that nobody listens at, and tripwires, in decode and prefill."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from model import sites, tripwire
from model.state import State
from model.transformer import Transformer
from runtime.load import DEMO, load
from runtime.options import RunOptions

CONTEXT = 2048  # tokens before the first step that is timed: windows, selections and dense entries are all full
STEPS = 8  # decoded tokens per call
CHUNK = 512


class Pair(NamedTuple):
    """Two ways to compute the same: a label, and a name and a call for each."""

    label: str
    first: str
    run_first: Callable[[], object]
    second: str
    run_second: Callable[[], object]


class Decoding:
    """Decodes on and on: each call runs `STEPS` tokens of the demo after `CONTEXT` others."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.state = _filled(model, model.config.max_position_embeddings)

    def __call__(self) -> None:
        """Decode the next tokens."""
        for _ in range(STEPS):
            token = torch.tensor([self.state.position % self.model.config.vocab_size])
            self.model.logits(self.model(token, self.state))


def _filled(model: Transformer, max_context: int) -> State:
    state = model.new_state(max_context, CHUNK)
    for ids in _tokens(model).split(CHUNK):
        model(ids, state)
    return state


def _tokens(model: Transformer) -> Tensor:
    return torch.arange(CONTEXT) % model.config.vocab_size


def _prefill(model: Transformer) -> None:
    _filled(model, CONTEXT)


def _unguarded(call: Callable[[], object]) -> None:
    """Run `call` with every tripwire replaced by nothing."""

    def nothing(*_: object) -> None:
        return None

    with ExitStack() as stack:
        for name in ("finite", "width", "count", "room", "columns", "routing"):
            stack.enter_context(mock.patch.object(tripwire, name, nothing))
        stack.enter_context(mock.patch.object(tripwire, "selection", lambda *given: given[-1]))
        call()


def tripwires() -> Iterator[Pair]:
    """Runs with and without tripwires: the ratio is what they add."""
    model = load(DEMO, RunOptions()).model
    steps, bare = Decoding(model), Decoding(model)
    yield Pair(f"decode, {STEPS} tokens", "without", lambda: _unguarded(bare), "with", steps)
    yield Pair(
        f"prefill, {CONTEXT} tokens",
        "without",
        lambda: _unguarded(lambda: _prefill(model)),
        "with",
        lambda: _prefill(model),
    )


def idle_sites() -> Iterator[Pair]:
    """Sites that nobody listens at: the ratio is their share of a run."""
    model = load(DEMO, RunOptions()).model
    taps = model.arithmetic.taps
    steps = Decoding(model)
    runs: dict[str, Callable[[], object]] = {
        f"decode, {STEPS} tokens": steps,
        f"prefill, {CONTEXT} tokens": lambda: _prefill(model),
    }
    for label, call in runs.items():
        passes: list[tuple[sites.Site, int | None, Tensor]] = []

        def note(site: sites.Site, passes: list[tuple[sites.Site, int | None, Tensor]] = passes) -> sites.Listener:
            return lambda layer, tensor: passes.append((site, layer, tensor[:0]))

        with model.attached({site: note(site) for site in sites.SITES}):
            call()

        def idle(passes: list[tuple[sites.Site, int | None, Tensor]] = passes) -> None:
            for site, layer, tensor in passes:
                taps(site, layer, tensor)

        yield Pair(f"{label}, {len(passes)} passes", "run", call, "its sites", idle)
