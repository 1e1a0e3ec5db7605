"""`gains`: where the time goes in two commits of this repository, before and after, in turn, on the same checkpoint.

Each profile is a process of its own, started beside the files of its commit: those of --before from a worktree that git
makes for the run, those of now from this folder. Both read the same prompt and decode the same tokens.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from model.errors import ConfigError
from runtime.output import write_text
from runtime.report import Commit
from scripts.bench.children import THREADS, warm
from scripts.bench.compare_transformers import checkpoint
from scripts.bench.comparison import Spread, short
from scripts.bench.record import Record, markdown, rendered
from scripts.console import Console
from scripts.paths import ROOT

KINDS = ("prefill", "decode")
HEADS = ("component", "before, ms", "after, ms", "before / after", "from .. to")
LEAST = 0.01  # of the whole before: components below are not shown
JSON = dict[str, Any]


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status."""
    with checkpoint(args.checkpoint, args.seed) as model, worktree(args.before) as (before, commit):
        rows: list[JSON] = []
        for pair in range(args.pairs):
            sides = [("before", before), ("after", ROOT)]
            for side, folder in sides if pair % 2 == 0 else reversed(sides):
                rows.append({"pair": pair, "side": side} | profile(args, model, folder))
                told = ", ".join(f"{kind} {sum(rows[-1][kind].values()):.2f} s" for kind in KINDS)
                print(f"{side}, pair {pair + 1}: {told}", file=sys.stderr, flush=True)
                record.write({"before": commit, "profiles": rows}, complete=False)
    record.write({"before": commit, "profiles": rows})
    for kind in KINDS:
        console.print(rendered(title(kind, args), HEADS, table(rows, kind, unit(kind, args))))
    if args.page is not None:
        write_text(args.page, page(record, rows, commit, args))
    return 0


@contextmanager
def worktree(commit: str) -> Iterator[tuple[Path, str]]:
    """A folder with the files of a commit, and its hash; ConfigError where git knows none of that name."""
    git = shutil.which("git")
    if git is None:
        raise ConfigError("--before: needs git, which is not installed")
    known = subprocess.run(  # noqa: S603
        [git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{commit}^{{commit}}"],
        cwd=ROOT, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if known.returncode:
        raise ConfigError(f"--before {commit}: git knows no such commit here")
    found = known.stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "before"
        subprocess.run([git, "worktree", "add", "--quiet", "--detach", place, found], cwd=ROOT, check=True)  # noqa: S603
        try:
            yield place, found
        finally:
            subprocess.run([git, "worktree", "remove", "--force", place], cwd=ROOT, check=True)  # noqa: S603


def profile(args: argparse.Namespace, model: Path, folder: Path) -> JSON:
    """Run one profile beside the files of a folder; RuntimeError with what it said where it fails."""
    warm(model)
    asked = {name: getattr(args, name) for name in ("context", "decode", "chunk", "threads", "numerics", "seed")}
    child = Path(__file__).with_name("gains_child.py")
    # -P: not beside this file, whose neighbours have names of packages
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-P", child, json.dumps(asked | {"model": str(model)})],
        cwd=folder, check=False, capture_output=True, text=True,
        env=dict(os.environ) | {"PYTHONPATH": str(folder)} | dict.fromkeys(THREADS, str(args.threads)),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{folder.name}: ended with {done.returncode}: {done.stderr[-2000:]}")
    found: JSON = json.loads(done.stdout.splitlines()[-1])
    return found


def unit(kind: str, args: argparse.Namespace) -> float:
    """Milliseconds of a second's share: of a thousand tokens of the prompt, or of one decoded token."""
    tokens: float = args.context / 1000 if kind == "prefill" else args.decode
    return 1e3 / tokens


def title(kind: str, args: argparse.Namespace) -> str:
    """Head of a table."""
    return f"Prefill, {args.context} tokens: ms per 1000" if kind == "prefill" else "Decode: ms per token"


def table(rows: list[JSON], kind: str, scale: float) -> list[tuple[str, ...]]:
    """Cells: every component that took a share of the whole before, largest first, and the whole."""
    pairs = [
        tuple(next(r[kind] for r in rows if (r["pair"], r["side"]) == (pair, side)) for side in ("before", "after"))
        for pair in sorted({row["pair"] for row in rows})
    ]
    whole = [(sum(a.values()), sum(b.values())) for a, b in pairs]
    names = {name for pair in pairs for side in pair for name in side}
    by_name = {name: [(a.get(name, 0.0), b.get(name, 0.0)) for a, b in pairs] for name in names}
    least = LEAST * Spread.of([a for a, _ in whole]).median
    shown = {name: both for name, both in by_name.items() if Spread.of([max(pair) for pair in both]).median >= least}
    ordered = sorted(shown.items(), key=lambda item: -Spread.of([a for a, _ in item[1]]).median)
    out: list[tuple[str, ...]] = []
    for name, both in [*ordered, ("all", whole)]:
        before, after = (short(scale * Spread.of(side).median) for side in zip(*both, strict=True))
        ratio = Spread.of([a / b if b else float("inf") for a, b in both])
        out.append((name, before, after, f"{ratio.median:.2f}", f"{ratio.low:.2f} .. {ratio.high:.2f}"))
    return out


def verdict(kind: str, rows: list[JSON], args: argparse.Namespace) -> str:
    """What one table says of the whole, as a sentence."""
    _, before, after, ratio, spread = table(rows, kind, unit(kind, args))[-1]
    low, high = map(float, spread.split(" .. "))
    unchanged = "no change beyond the spread, " if low <= 1 <= high else ""
    return f"{title(kind, args)}: {before} before, {after} after, {unchanged}{ratio} times as fast ({spread})."


def page(record: Record, rows: list[JSON], commit: str, args: argparse.Namespace) -> str:
    """The tables as a page."""
    head = record.header
    lines = [
        "---",
        f"machine: {json.dumps(head['machine']['processor'])}",
        f"flags: {json.dumps(' '.join(head['machine']['flags']))}",
        f"command: {json.dumps(head['command'])}",
        f"before: {commit[:12]}",
        f"commit: {Commit(**head['commit'])}",
        f"pairs: {args.pairs}",
        "---",
        "",
        f"# Where the time goes, before and after, in {args.numerics} numerics",
        "",
        f"**{' '.join(verdict(kind, rows, args) for kind in KINDS)}**",
        "",
        "Two commits, profiled in turn on the same checkpoint by a clock around every op. *checks* are the tripwires,",
        "*other* is what neither takes. Medians over the profiles; the ratio is of the two of each pair.",
        "",
    ]
    for kind in KINDS:
        lines += markdown(title(kind, args), HEADS, table(rows, kind, unit(kind, args)))
    return "\n".join(lines)
