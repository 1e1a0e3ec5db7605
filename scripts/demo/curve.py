"""The curve of a training run on the console, beside its progress bar."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from rich.progress import Progress

from scripts.console import Console

SHOWN_EVERY: Final = 20  # steps


class Step(Protocol):
    """What one step of training showed: numbers by name, nan where it asked nothing of a kind."""

    @property
    def step(self) -> int:
        """Its number, from 0."""
        ...


@contextmanager
def curve(
    console: Console, columns: Sequence[str], steps: int, task: str = "training", prefix: str = ""
) -> Iterator[Callable[[Step], None]]:
    """Yield what to call after each of so many steps: a line of means over every `SHOWN_EVERY` of them."""
    reports: list[Step] = []
    with Progress(console=console) as progress:
        bar = progress.add_task(task, total=steps)

        def each(report: Step) -> None:
            reports.append(report)
            progress.advance(bar)
            if (report.step + 1) % SHOWN_EVERY == 0 or report.step + 1 == steps:
                console.say(f"{prefix}{summary(reports, columns)}")
                reports.clear()

        yield each


def summary(reports: Sequence[Step], columns: Sequence[str]) -> str:
    """One line of the curve."""
    shown = "  ".join(f"{name} {mean([getattr(r, name) for r in reports])}" for name in columns)
    return f"{reports[-1].step + 1:5d}  {shown}"


def mean(values: list[float]) -> str:
    """Mean of the values that are numbers; a step that asked nothing of a kind reports nan."""
    numbers = [v for v in values if v == v]  # noqa: PLR0124 -- nan is the one value that differs from itself
    return f"{sum(numbers) / len(numbers):6.3f}" if numbers else "     -"
