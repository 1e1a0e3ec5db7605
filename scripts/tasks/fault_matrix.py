"""What `scripts.fault_matrix` does once its command line is known to be good."""

import argparse
import sys
import time
from importlib.util import find_spec

import torch
from rich.progress import Progress

from probes.catalogue import QUICK
from probes.faults import FAULTS
from probes.matrix import Outcome, Row, markdown, row, uncaught
from probes.subject import Subject
from runtime.options import DEMO, RunOptions
from runtime.output import write_json, write_text
from runtime.report import commit
from scripts.console import Console
from scripts.flags import run_options

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


def noticed(matrix: dict[str, Row]) -> str:
    """What surprised us, with the counts of this matrix."""
    outcomes = [cells["needle"].outcome for cells in matrix.values()]
    caught, passed = outcomes.count(Outcome.CAUGHT), outcomes.count(Outcome.MISSED)
    return NOTICED.format(asked=caught + passed, caught=caught, passed=passed)


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
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
            console.say(f"{name}: {', '.join(by) or 'NOTHING'}")
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
        "command": args.command_line,
        "seconds": f"{time.perf_counter() - started:.0f}",
    }
    told = noticed(matrix) if args.model.resolve() == DEMO and options == RunOptions() else ""
    write_text(args.out, markdown(matrix, clean, FAULTS, names, facts, told))
    rows = {"": clean} | matrix
    data = {fault: {probe: cell.to_json() for probe, cell in cells.items()} for fault, cells in rows.items()}
    write_json(args.out.with_suffix(".json"), data)
    print(f"wrote {args.out}", file=sys.stderr)
    fired = [name for name, cell in clean.items() if cell.outcome is not Outcome.MISSED]
    return 1 if fired or uncaught(matrix) else 0
