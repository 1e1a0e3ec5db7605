"""`performance`: makes audits/performance.md: compare-transformers, longer contexts of our side, time by component."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from model.errors import ConfigError
from scripts.bench import compare_transformers, page
from scripts.bench.compare_transformers import DisagreementError, compared, show
from scripts.bench.record import ROOT, Record, check_one_run
from scripts.paths import writable

NAME = "performance"
OURS_ONLY = (32768, 131072)  # where transformers would take hours
BENCHES = (NAME, compare_transformers.NAME)  # whose JSON a page can be made of


def add_flags(p: argparse.ArgumentParser) -> None:
    """Add the flags of this bench."""
    compare_transformers.add_flags(p, OURS_ONLY)
    p.add_argument("--out", type=Path, default=ROOT / "audits", help="folder of page, plots and JSON (default audits)")
    p.add_argument("--saved", type=Path, nargs="+", metavar="FILE", help="measure nothing: the page of this JSON")


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench and write its page, or write the page of an earlier run; returns the exit status."""
    args.out.mkdir(parents=True, exist_ok=True)
    writable(args.out / f"{page.name_of(args.theirs_dtype)}.md")
    if args.saved is not None:
        document = saved(args.saved)
    else:
        try:
            results = compared(args, record, components=True)
        except DisagreementError as error:
            print(error, file=sys.stderr)
            return 1
        show(results, console)
        document = record.document(results)
    for name, text in page.files(document).items():
        (args.out / name).write_text(text, encoding="utf-8")
    print(f"wrote {args.out / page.name_of(document['results']['about']['theirs_dtype'])}.md", file=sys.stderr)
    return 0


def saved(paths: Sequence[Path]) -> dict[str, Any]:
    """Read what one run wrote, the file with most of it; ConfigError where there is another run in it, or it broke off.

    Every measured process is held against the run in whose file it stands: a file put together by hand is refused too.
    """
    documents = [(path.name, _read(path)) for path in paths]
    check_one_run(documents)
    name, whole = max(documents, key=lambda named: len(named[1]["results"]["runs"]))
    for one in whole["results"]["runs"]:
        here = {"run": one.get("run"), "commit": whole["commit"], "machine": whole["machine"]}
        check_one_run([(name, whole), (f"a process in {name}", here)])
    if not whole["complete"]:
        raise ConfigError(f"{name}: the run broke off before its end")
    return whole


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("bench") not in BENCHES:
        raise ConfigError(f"{path}: not what `scripts.bench {' or '.join(BENCHES)}` wrote")
    return document
