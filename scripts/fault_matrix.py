"""`python -m scripts.fault_matrix`: run every probe on every fault, and write audits/faults.md.

Exit status 1 when a fault is caught by nothing, or a probe fires on a healthy run.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import Progress

from fathom.model.errors import ConfigError, did_you_mean
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import add_model, add_run_options, positive, run_options
from fathom.scripts.paths import AUDITS, Pages

if TYPE_CHECKING:
    from fathom.probes.finding import JSON
    from fathom.probes.matrix import Row

PAGE = AUDITS / "faults.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.fault_matrix", description=__doc__)
    add_model(p)
    p.add_argument("--out", action=Pages, default=PAGE, help="page to write, F.md; its picture and JSON go beside it")
    p.add_argument(
        "--again",
        nargs="+",
        metavar="FAULT",
        help="run these faults and the healthy run alone, and probes that the page has no column of; it keeps the other"
        " cells, and says so",
    )
    p.add_argument("--jobs", type=positive, default=1, help="processes that run probes at a time (default 1)")
    add_run_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run(arguments(parser(), argv))


def _kept(out: Path, again: Sequence[str]) -> "tuple[dict[str, Row], dict[str, JSON]]":
    """The rows of a page that stay, and the facts at its foot; ConfigError for a row or a fault that is not there."""
    from fathom.probes.faults import FAULTS
    from fathom.probes.matrix import Cell, Outcome

    if unknown := [name for name in again if name not in FAULTS]:
        raise ConfigError(f"--again {unknown[0]}: no such fault{did_you_mean(unknown[0], FAULTS)}")
    try:
        said = json.loads(out.with_suffix(".json").read_text("utf-8"))
        foot = out.read_text("utf-8").rpartition("```yaml\n")[2].partition("```")[0]
    except OSError as error:
        raise ConfigError(f"--again: {out}: {error.strerror}: only a page that is there has rows to keep") from None
    rows = {
        name: {probe: Cell(Outcome(cell["outcome"]), cell["evidence"]) for probe, cell in cells.items()}
        for name, cells in said.items()
    }
    if missing := [name for name in FAULTS if name not in rows and name not in again]:
        raise ConfigError(f"--again: {out} has no row of {missing[0]}: name it too")
    facts = {key: json.loads(value) for key, value in (line.split(": ", 1) for line in foot.splitlines())}
    del facts["verdict"]
    return rows, facts


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    import torch

    from fathom.probes.catalogue import QUICK
    from fathom.probes.faults import FAULTS
    from fathom.probes.matrix import Outcome, Row, uncaught
    from fathom.probes.report import write
    from fathom.probes.subject import Subject
    from fathom.runtime.report import commit
    from fathom.scripts.parts.faults_page import HEALTHY, SEEN, noticed, page, row_of

    options = run_options(args)
    kept, earlier = _kept(args.out, args.again) if args.again else ({}, {})
    healthy = Subject(directory=args.model, options=options)
    console, started, rows = Console(stderr=True), time.perf_counter(), dict[str | None, Row]()
    pool = ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"))
    with Progress(console=console, transient=True) as bar, pool:
        # of a page that was made before there were some of the probes, rows that stay lack their cells
        stays = {fault: kept.get(fault, {}) if args.again and fault not in args.again else {} for fault in FAULTS}
        asked = [fault for fault, cells in stays.items() if any(probe.name not in cells for probe in QUICK)]
        task = bar.add_task("faults", total=len(asked) + 1)
        names = {
            pool.submit(row_of, args.model, options, fault, stays[fault] if fault else {}): fault
            for fault in (None, *asked)
        }
        for done in as_completed(names):
            name = names[done]
            rows[name] = done.result()
            by = [probe for probe, cell in rows[name].items() if cell.outcome in SEEN]
            bar.advance(task)
            console.say(f"{name or HEALTHY}: {', '.join(by) or 'NOTHING'}")
    clean, matrix = rows[None], {name: rows[name] if name in rows else kept[name] for name in FAULTS}
    loaded = healthy.load()
    facts = {
        "commit": str(commit()),
        "command": args.command_line,
        "checkpoint": loaded.directory.resolve().name,
        "weights": loaded.weights_fingerprint,
        "config": loaded.model.config.fingerprint,
        "ops": loaded.model.arithmetic.ops.name,
        **options.to_json(),
        "torch": torch.__version__,
        "transformers": "there" if find_spec("transformers") else "not there",
        "seed": healthy.seed,
        "seconds": round(time.perf_counter() - started),
    }
    if args.again:
        lacked = sorted({probe.name for cells in kept.values() for probe in QUICK if probe.name not in cells})
        before = earlier.pop("again", {})
        if not isinstance(before, dict):  # a page from before rows were told with their commit
            before = dict.fromkeys(before, earlier.pop("again, at"))
        anew = before | dict.fromkeys(args.again, facts["commit"])
        facts = earlier | {"again": anew, "again, command": args.command_line}
        facts |= {"again, columns": earlier.get("again, columns", {}) | dict.fromkeys(lacked, facts["commit"])}
    told = noticed(matrix) if args.model.resolve() == DEMO and options == RunOptions() else ""
    write(page(args.out.stem, matrix, clean, facts, told), args.out.parent)
    print(f"wrote {args.out}", file=sys.stderr)
    fired = [name for name, cell in clean.items() if cell.outcome is not Outcome.MISSED]
    return 1 if fired or uncaught(matrix) else 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
