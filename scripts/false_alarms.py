"""`python -m scripts.false_alarms`: judge healthy runs of random models, and write audits/false-alarms.md.

How often the checks call a healthy row wrong, in every numerics and dtype, and how small an error is that they still
see. Exit status 1 when a healthy row was called wrong.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Final

from rich.progress import Progress

from fathom.probes.finding import JSON, Part, Table, Text
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import positive
from fathom.scripts.paths import AUDITS, Pages

if TYPE_CHECKING:
    from fathom.probes.report import Page
    from fathom.scripts.parts.healthy_runs import Tally

NOT_CLAIMED: Final = """\
The rows are those of small models with drawn weights, and of the demo: larger rows have more numbers near a tie, each
of which matters less. Runs of fp16 are the oracle's own equations with every tensor rounded; a runtime that fuses steps
rounds less often. That other processors sum in other orders was not seen on one machine; what sums may differ by is in
the bound."""
KEPT_HOW: Final = """\
Layers whose input is not there are run from the embeddings on. How each run rounds is found from what was kept; one for
which another rounding is found, and not as an assumption, counts as a false alarm too."""

PAGE: Final = AUDITS / "false-alarms.md"
ROWS: Final = 10_000_000


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.false_alarms", description=__doc__)
    p.add_argument("--out", action=Pages, default=PAGE, help="page to write, F.md; its JSON goes beside it")
    p.add_argument("--count", type=positive, default=ROWS, help=f"healthy rows to judge, about (default {ROWS:,})")
    p.add_argument("--jobs", type=positive, default=1, help="processes at a time (default 1)")
    p.add_argument("--seed", type=int, default=0, help="of the first model (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run(arguments(parser(), argv))


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    import torch

    from fathom.probes.report import write
    from fathom.runtime.report import commit
    from fathom.scripts.parts.healthy_runs import Tally, judged

    console, started = Console(stderr=True), time.perf_counter()
    found: dict[tuple[str, str], Tally] = {}
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"))
    with Progress(console=console, transient=True) as bar, pool:
        task, seed = bar.add_task("healthy rows", total=args.count), args.seed
        waiting: set[Future[tuple[tuple[str, str], Tally]]] = set()
        while (done := sum(tally.rows for tally in found.values())) < args.count:
            while len(waiting) < 2 * args.jobs:
                waiting.add(pool.submit(judged, seed))
                seed += 1
            finished = next(as_completed(waiting))
            waiting.remove(finished)
            of, tally = finished.result()
            found.setdefault(of, Tally()).add(tally)
            bar.update(task, completed=done + tally.rows)
            for alarm in tally.alarms:
                console.say(f"false alarm: {json.dumps(alarm)}")
            if not console.is_terminal:
                console.say(f"{done + tally.rows:,} rows, {time.perf_counter() - started:.0f} s")
        for future in waiting:
            future.cancel()
    facts = {
        "commit": str(commit()),
        "command": args.command_line,
        "seeds": [args.seed, seed - 1],
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "seconds": round(time.perf_counter() - started),
    }
    page = _page(args.out.stem, found, facts)
    write(page, args.out.parent)
    print(f"wrote {args.out}: {page.verdict}", file=sys.stderr)
    return 1 if any(tally.alarms for tally in found.values()) else 0


def _page(name: str, found: "Mapping[tuple[str, str], Tally]", facts: Mapping[str, JSON]) -> "Page":
    from fathom.probes.judge.again import MANY
    from fathom.probes.judge.oracle import PRECISION, SIGNS
    from fathom.probes.report import Page
    from fathom.scripts.parts.healthy_runs import TIMES, Tally

    whole = Tally()
    for tally in found.values():
        whole.add(tally)
    rate = f"{len(whole.alarms)} of {whole.rows:,} healthy rows were called wrong"
    again = sum(whole.again.values())
    verdict = f"{'Fail' if whole.alarms else 'Pass'}: {rate}"
    least = next((times for times in TIMES if whole.moved[times] and whole.seen[times] == whole.moved[times]), None)
    summary = (
        f"Another {again} were outside their first bound and inside after a second look, with more random rounding and"
        " with near ties taken both ways."
        f" A single row that is moved in a random direction is always found from {least:g} times its bound on."
        if least is not None
        else "No size of error was always found."
    )
    rows = [
        (numerics, dtype, tally.rows, sum(tally.again.values()), len(tally.alarms))
        for (numerics, dtype), tally in sorted(found.items())
    ]
    columns = ("numerics", "dtype", "healthy rows", "explained when looked at again", "called wrong")
    moved = [(times, whole.moved[times], whole.seen[times]) for times in TIMES if whole.moved[times]]
    parts: list[Part] = [
        Table(
            "Healthy rows", columns, rows, "Rows of all sites of all layers, rotated dims and heads by themselves too."
        ),
        Table("What was kept of runs", ("kept", "runs"), whole.runs.most_common(), KEPT_HOW),
        Table(
            "Where healthy rows stood out",
            ("site", "rows"),
            whole.again.most_common(),
            f"Each looked at again alone, with up to {MANY * SIGNS} more replicas, and its near ties taken the other"
            " way.",
        ),
        Table(
            "How small an error is seen",
            ("times the bound of the row", "rows that were moved", "found"),
            moved,
            "One row of one site at a time, moved in a drawn direction; its own rounding adds to that or takes from it."
            " Sites that are stored narrow are left out, and embeddings: there any number that the format, or the"
            " table, does not have is found.",
        ),
        Text("What this does not claim", NOT_CLAIMED),
    ]
    data: dict[str, JSON] = {
        f"{numerics}, {dtype}": {"rows": tally.rows, "again": dict(tally.again), "alarms": tally.alarms}
        for (numerics, dtype), tally in sorted(found.items())
    } | {"moved": {str(times): [count, seen] for times, count, seen in moved}}
    bits = {str(dtype).removeprefix("torch."): bits for dtype, bits in PRECISION.items()}
    facts = {"verdict": "fail" if whole.alarms else "pass", **facts, "bits": bits}
    title = "How often is a healthy run called wrong, and how small an error is seen?"
    return Page(name, title, verdict, summary, parts, facts, data)


if __name__ == "__main__":
    sys.exit(run_alone(main))
