"""What being watched costs the demo checkpoint: sites that nobody listens at, and tripwires, in decode and prefill."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from model.observe import invariants, sites
from model.observe.observer import PLACES, Point, listening, observed
from model.state import State
from model.transformer import Transformer
from runtime.load import load
from runtime.options import DEMO, RunOptions
from scripts.bench.pairs import Pair

CONTEXT = 2048  # tokens before the first step that is timed: windows, selections and dense entries are all full
STEPS = 8  # decoded tokens per call
CHUNK = 512


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


def _guards(call: Callable[[], object]) -> list[Callable[[], object]]:
    """Run `call` and return every check that a tripwire made in it, to be made again."""
    made: list[Callable[[], object]] = []

    def noting(check: Callable[..., object]) -> Callable[..., object]:
        def note(*given: object) -> object:
            made.append(partial(check, *given))
            return check(*given)

        return note

    with ExitStack() as stack:
        for name in ("finite", "width", "count", "room", "columns", "routing", "selection"):
            stack.enter_context(mock.patch.object(invariants, name, noting(getattr(invariants, name))))
        call()
    return made


def _runs(model: Transformer) -> dict[str, Callable[[], None]]:
    return {
        f"decode, {STEPS} tokens": Decoding(model),
        f"prefill, {CONTEXT} tokens": lambda: _prefill(model),
    }


def tripwires() -> Iterator[Pair]:
    """The checks of a run, made again on the same tensors: the ratio is their share of the run."""
    for label, call in _runs(load(DEMO, RunOptions()).model).items():
        made = _guards(call)

        def again(made: list[Callable[[], object]] = made) -> None:
            for check in made:
                check()

        yield Pair(f"{label}, {len(made)} checks", "run", call, "its tripwires", again)


def idle_sites() -> Iterator[Pair]:
    """Sites that nobody listens at: the ratio is their share of a run."""
    model = load(DEMO, RunOptions()).model
    observer = observed(model)
    for label, call in _runs(model).items():
        passes: list[tuple[sites.Site, int | None, Tensor]] = []

        def note(site: sites.Site, passes: list[tuple[sites.Site, int | None, Tensor]] = passes) -> sites.Listener:
            return lambda layer, tensor: passes.append((site, layer, tensor[:0]))

        with listening(model, {site: note(site) for site in sites.SITES}):
            call()

        def idle(passes: list[tuple[sites.Site, int | None, Tensor]] = passes) -> None:
            with observer.unchecked():
                for site, layer, tensor in passes:
                    observer.passes(Point(layer, ((site, PLACES[site]._replace(output=-1)),)), None, (), tensor)

        yield Pair(f"{label}, {len(passes)} passes", "run", call, "its sites", idle)
