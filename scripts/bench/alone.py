"""What `prefill` and `decode` share: our side alone, its time by component, repetitions, and the tables of both."""

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from kernels.ops import CPU
from model.state import State
from runtime.load import load_any
from runtime.memory import new_state
from scripts.bench.clock import Clock
from scripts.bench.comparison import Spread
from scripts.bench.record import rendered
from scripts.console import Console
from scripts.flags import run_options

JSON = dict[str, Any]


class Alone:
    """A loaded model, the clock around its ops, and tokens to read."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        options = run_options(args)
        self.clock, self.chunk = Clock(args.device), options.prefill_chunk
        self.model = load_any(args.model, options, self.clock.watch(CPU)).model
        self.draw = torch.Generator().manual_seed(args.seed)

    def tokens(self, count: int) -> Tensor:
        """Drawn ids [count]."""
        return torch.randint(0, self.model.config.vocab_size, (count,), generator=self.draw).to(self.model.device)

    def state(self, context: int, prompt: int) -> State:
        """Return an empty state for `context` tokens, of which `prompt` are read in calls of the chunk."""
        return new_state(self.model, context, self.chunk, prompt)

    def read(self, tokens: Tensor, state: State) -> None:
        """Take tokens in calls of the chunk, and compute the logits after the last."""
        for part in tokens.split(self.chunk):
            hidden = self.model(part, state)
        self.model.logits(hidden[-1:])


def seconds(row: JSON) -> float:
    """Of a repetition: its components are all of it."""
    return float(sum(row["components"].values()))


def show(title: str, rows: Sequence[JSON], unit: str, scale: float, console: Console) -> None:
    """Print speed and time by component against context.

    Parameters
    ----------
    title
        Of both tables.
    rows
        Repetitions: `context`, `tokens` taken in it, seconds by `components`.
    unit, scale
        Of the times: so many tokens' milliseconds.
    console
        Where to.

    """
    contexts = sorted({row["context"] for row in rows})
    by = {n: [row for row in rows if row["context"] == n] for n in contexts}
    speeds = []
    for n, some in by.items():
        rate = Spread.of([row["tokens"] / seconds(row) for row in some])
        took = Spread.of([1e3 * scale * seconds(row) / row["tokens"] for row in some])
        speeds.append((str(n), str(rate), str(took), str(len(some))))
    console.print(rendered(title, ("context", "tokens/s (from .. to)", f"{unit} (from .. to)", "repetitions"), speeds))
    spent = {n: components(some, scale) for n, some in by.items()}
    names = sorted(
        {name for some in spent.values() for name in some}, key=lambda name: -spent[contexts[-1]].get(name, 0)
    )
    cells = [(name, *(f"{spent[n].get(name, 0):.3g}" for n in contexts)) for name in names]
    console.print(rendered(f"{title}: {unit} by component", ("component", *map(str, contexts)), cells))


def components(rows: Sequence[JSON], scale: float) -> dict[str, float]:
    """Milliseconds for `scale` tokens by component, medians over repetitions."""
    names = {name for row in rows for name in row["components"]}
    return {
        name: median(1e3 * scale * row["components"].get(name, 0.0) / row["tokens"] for row in rows) for name in names
    }
