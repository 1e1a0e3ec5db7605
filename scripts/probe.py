"""`python -m scripts.probe NAME ... | all`: measure what a V4 runtime gets wrong in silence, and say so in a page.

Results go to stdout, progress to stderr. Exit status: 0 all passed; 1 a probe failed, was vacuous or broke down; 2 bad
arguments, or a checkpoint that cannot be loaded.
A plain run of the demo checkpoint writes the pages in audits/ again; any other writes pages where --out says.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from model.errors import ConfigError, quoted
from model.ranks import Group
from probes import console as shown
from probes import markdown
from probes.catalogue import FULL, QUICK
from probes.faults import FAULTS
from probes.probe import Probe, Run, attempt, unmet
from probes.subject import Subject
from runtime.errors import PromptError
from runtime.group import connected
from runtime.op_sets import op_set
from runtime.options import DEMO, RunOptions, usual
from runtime.watch import Watch
from scripts.cli import arguments, run_on_ranks
from scripts.flags import add_op_set, add_rank_timeout, add_run_options, positive, run_options

AUDITS = Path(__file__).resolve().parents[1] / "audits"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.probe", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help="probes to run, or all")
    p.add_argument("--list", action="store_true", help="name the probes and the faults, and run nothing")
    p.add_argument("--model", type=Path, default=DEMO, help="checkpoint directory (default: the demo checkpoint)")
    p.add_argument("--out", type=Path, help="folder for pages, made where it is not there")
    p.add_argument("--inject", metavar="FAULT", help="run with this fault in place")
    p.add_argument("--seed", type=int, default=0, help="of prompts and of what is drawn (default 0)")
    p.add_argument("--prompt-file", type=Path, help="a UTF-8 text to run instead of made-up documents")
    p.add_argument("--quick", action="store_true", help="each probe with its smallest settings, a second or so")
    p.add_argument(
        "--threads",
        type=positive,
        default=1,
        help="of torch (default 1: small tensors are slower with more, much slower on a busy machine)",
    )
    add_run_options(p)
    add_op_set(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: Watch | None = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    if args.list:
        if args.names:
            raise ConfigError("--list: takes no names, it runs nothing")
        _list(out)
        return 0
    with connected(watch, args.device, args.rank_timeout) as group:
        return _probe(args, watch, group, out, err)


def _probe(args: argparse.Namespace, watch: Watch | None, group: Group, out: Console, err: Console) -> int:
    if args.model.resolve() == DEMO:
        args.model = DEMO  # however it was spelled
    chosen, subject = probes(args), replace(subject_of(args), group=group, watch=watch)
    torch.set_num_threads(args.threads)
    folder = _folder(args, subject)
    subject.load()  # what is wrong with it is wrong for every probe: the command ends
    if subject.fault is not None:
        _say(out, f"with a fault in place, {subject.fault.name}: {subject.fault.what}")
    if "all" in args.names:
        chosen = _applying(args, chosen, subject, out)
    runs = _run(args, chosen, subject, folder, out, err)
    if len(runs) > 1:
        if out.is_terminal:
            out.print(shown.closing(runs))
        _say(out, *shown.failures(runs))
        _say(out, shown.total(runs))
    if folder is None:
        _say(err, "no page written: --out FOLDER writes pages for this run")
    return 1 if any(one.report.failed for one in runs) else 0


def _run(
    args: argparse.Namespace, chosen: Sequence[Probe], subject: Subject, folder: Path | None, out: Console, err: Console
) -> list[Run]:
    """Run the probes, show what each found, and write its page."""
    runs: list[Run] = []
    for at, probe in enumerate(chosen, 1):
        with shown.watched(err, probe, at, len(chosen)) as progress:
            runs.append(attempt(probe, subject, progress))
        _show(out, runs[-1], brief="all" in args.names)
        if folder is not None:
            page = markdown.page(runs[-1], subject, command(args, probe.name, subject.group.size))
            if subject.group.rank == 0:
                markdown.write(page, folder)
            _say(err, f"wrote {folder / page.name}.md")
    return runs


def probes(args: argparse.Namespace) -> list[Probe]:
    """Return the probes that are asked for, each once."""
    known = {probe.name: probe for probe in (QUICK if args.quick else FULL)}
    if not args.names:
        raise ConfigError("which probe? Name some, or all; --list names them")
    for name in args.names:
        if name != "all":
            _check("probe", name, known)
    return list(known.values()) if "all" in args.names else [known[name] for name in dict.fromkeys(args.names)]


def _applying(args: argparse.Namespace, chosen: Sequence[Probe], subject: Subject, out: Console) -> list[Probe]:
    """Return the probes whose needs are met, less those of Fathom itself for another model; say which are not."""
    left = {probe.name: why for probe in chosen if (why := unmet(probe, subject)) is not None}
    for probe in chosen if args.model != DEMO else ():
        if probe.of_fathom and probe.name not in args.names:
            left[probe.name] = "it is about Fathom, hardly about a checkpoint: name it beside all to run it too"
    for name, why in left.items():
        _say(out, f"left out {name:14} {why}")
    return [probe for probe in chosen if probe.name not in left]


def subject_of(args: argparse.Namespace) -> Subject:
    """Return what is measured, after a look at every flag and file that could be at fault."""
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: want 0 to 2^63 - 1")
    fault = None
    if args.inject is not None:
        _check("fault", args.inject, FAULTS)
        fault = FAULTS[args.inject]
    subject = Subject(args.model, run_options(args), fault=fault, seed=args.seed, prompt=_prompt(args.prompt_file))
    subject = replace(subject, ops=op_set(args.ops or usual(subject.options.device), subject.options, subject.config))
    if fault is not None and (why := fault.inapplicable(subject.config)) is not None:
        raise ConfigError(f"--inject {fault.name}: {why}")
    if subject.prompt is not None:
        subject.tokens(1)  # a bad prompt should not wait for the weights
    return subject


def _check(what: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "--list names them"
        raise ConfigError(f"no {what} {quoted(name)}; {hint}")


def _prompt(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_bytes().decode("utf-8")  # as it is: no translation of line ends
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: byte {error.start} is no UTF-8") from error


def _folder(args: argparse.Namespace, subject: Subject) -> Path | None:
    """Return where pages go, None where nowhere; refuse a folder that cannot be written, before the work is done."""
    if args.out is not None:
        folder: Path = args.out
    elif subject == Subject() and not args.quick:
        folder = AUDITS
    else:
        return None
    if subject.group.rank > 0:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{folder}: pages cannot be written there ({error.strerror})") from error
    return folder


def command(args: argparse.Namespace, name: str, ranks: int = 1) -> str:
    """Return the command that makes the page of one probe again; of absolute paths only the last part is told."""
    default = RunOptions().to_json()
    flags = {
        "--model": None if args.model == DEMO else _told(args.model),
        "--out": None if args.out is None else _told(args.out),
        "--inject": args.inject,
        "--seed": args.seed or None,
        "--threads": args.threads if args.threads > 1 else None,
        "--prompt-file": None if args.prompt_file is None else _told(args.prompt_file),
        **{
            f"--{field.replace('_', '-')}": None if value == default[field] else value
            for field, value in run_options(args).to_json().items()
        },
    }
    start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    words = [*start, "-m", "scripts.probe", name, *(["--quick"] if args.quick else [])]
    words += [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    return shlex.join(words)


def _told(path: Path) -> str:
    return path.name if path.is_absolute() else str(path)


def _list(out: Console) -> None:
    """Print what there is to run and to inject."""
    faults = {name: fault.what for name, fault in FAULTS.items()}
    for title, entries in (
        ("probes", {probe.name: probe.question for probe in FULL}),
        ("faults, for --inject", faults),
    ):
        if out.is_terminal:
            out.print(shown.listing(title, entries))
        else:
            _say(out, f"{title}:", *(f"  {name}: {what}" for name, what in entries.items()))


def _show(out: Console, one: Run, *, brief: bool) -> None:
    if out.is_terminal and not brief:
        out.print(shown.findings(one))
        return
    head, *failed = shown.lines(one)
    if out.is_terminal:
        out.print(head, no_wrap=True, overflow="ellipsis")
    else:
        _say(out, head)
    _say(out, *failed)


def _say(console: Console, *lines: str | Text) -> None:
    for line in lines:
        console.print(shown.plain(line) if isinstance(line, str) else line, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
