"""`performance`: makes audits/performance.md: compare-transformers, longer contexts of our side, time by component."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from model.checkpoint import strict_json
from model.errors import ConfigError
from model.files import read_bounded
from runtime.output import write_text
from scripts.bench import page
from scripts.bench.compare_transformers import DisagreementError, compared, show
from scripts.bench.record import Record, check_one_run
from scripts.console import Console

BENCHES = ("performance", "compare-transformers")  # whose JSON a page can be made of
MAX_SAVED_BYTES = 64 << 20  # of it: several hundred times what a run writes


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench and write its page, or write the page of an earlier run; returns the exit status."""
    args.out.mkdir(parents=True, exist_ok=True)
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
        write_text(args.out / name, text)
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
    data = read_bounded(path, MAX_SAVED_BYTES, ConfigError)
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("bench") not in BENCHES:
        raise ConfigError(f"{path}: not what `scripts.bench {' or '.join(BENCHES)}` wrote")
    return document
