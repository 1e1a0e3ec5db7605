"""`python -m scripts.fault_matrix`: run every probe on every fault, and write audits/faults.md.

Exit status 1 when a fault is caught by nothing, or a probe fires on a healthy run.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from probes.catalogue import QUICK
from probes.faults import FAULTS
from probes.matrix import Outcome, Row, markdown, row, uncaught
from probes.subject import Subject
from runtime.options import DEMO, RunOptions
from runtime.report import commit
from scripts.cli import run_alone
from scripts.flags import add_run_options, run_options
from scripts.paths import writable

NOTICED = """\
**Answers hide faults.** Of the {asked} faults that `needle` could see and that no tripwire stops there, it catches
{caught} and passes {passed}. Swapped nibbles, a transposed mixing of the streams, a ring read one row off, no clamp:
the demo goes on finding the codes that it is asked for. Fluent and even right answers say next to nothing about a
runtime.

**The cheapest check found what was thought to need a golden vector.** Doubly stochastic is what all wrong Sinkhorns
nearly are, but this checkpoint has learned matrices that the iterations do not finish, and those of a row-first one
leave columns that are too far off at the very first token. The tripwire ends that run right there.

**A dropped clamp in the shared expert shows in one place only**: where the experts are pushed beyond the limit on
purpose. No prompt that we ran gets there.

**A stale frontier shows in probes that never look at state**, rope and quantisation among them: they run two prompts,
and the second comes out differently."""
PAGE = Path(__file__).resolve().parents[1] / "audits" / "faults.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.fault_matrix", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO)
    p.add_argument("--out", type=Path, default=PAGE, help="Markdown page to write; the JSON goes beside it")
    add_run_options(p)
    return p


def noticed(matrix: dict[str, Row]) -> str:
    """What surprised us, with the counts of this matrix."""
    outcomes = [cells["needle"].outcome for cells in matrix.values()]
    caught, passed = outcomes.count(Outcome.CAUGHT), outcomes.count(Outcome.MISSED)
    return NOTICED.format(asked=caught + passed, caught=caught, passed=passed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    given = sys.argv[1:] if argv is None else list(argv)
    writable(args.out)
    options, names = run_options(args), [probe.name for probe in QUICK]
    healthy = Subject(directory=args.model, options=options)
    console, started, matrix = Console(stderr=True), time.perf_counter(), dict[str, Row]()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("healthy", total=(len(FAULTS) + 1) * len(QUICK))
        clean = row(healthy, QUICK, lambda: bar.advance(task))
        for name, fault in FAULTS.items():
            bar.update(task, description=name)
            subject = Subject(directory=args.model, options=options, fault=fault)
            matrix[name] = row(subject, QUICK, lambda: bar.advance(task))
            by = [probe for probe, cell in matrix[name].items() if cell.outcome in {Outcome.CAUGHT, Outcome.TRIPPED}]
            console.print(f"{name}: {', '.join(by) or 'NOTHING'}")
    loaded = healthy.load()
    facts = {
        "checkpoint": loaded.directory.resolve().name,
        "weights": loaded.weights_fingerprint,
        "config": loaded.model.config.fingerprint,
        "ops": loaded.model.arithmetic.ops.name,
        **{key: str(value) for key, value in options.to_json().items()},
        "torch": torch.__version__,
        "commit": str(commit()),
        "transformers": "there" if find_spec("transformers") else "not there",
        "seed": str(healthy.seed),
        "command": " ".join(["python -m scripts.fault_matrix", *given]),
        "seconds": f"{time.perf_counter() - started:.0f}",
    }
    told = noticed(matrix) if args.model.resolve() == DEMO and options == RunOptions() else ""
    args.out.write_text(markdown(matrix, clean, FAULTS, names, facts, told), encoding="utf-8")
    rows = {"": clean} | matrix
    data = {fault: {probe: cell.to_json() for probe, cell in cells.items()} for fault, cells in rows.items()}
    args.out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {args.out}", file=sys.stderr)
    fired = [name for name, cell in clean.items() if cell.outcome is not Outcome.MISSED]
    return 1 if fired or uncaught(matrix) else 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
