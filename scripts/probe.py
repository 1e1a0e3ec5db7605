"""`python -m scripts.probe NAME ... | all`: measure what a V4 runtime gets wrong without an error; write a page.

Results go to stdout, progress to stderr. Exit status: 0 all passed; 1 a probe failed, was vacuous or broke down; 2 bad
arguments, or a checkpoint that cannot be loaded.
A plain run of the demo checkpoint writes the pages in audits/ again; any other writes pages where --out says.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from fathom.model.checkpoint import strict_json
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, quoted
from fathom.model.files import read_text
from fathom.probes import console as shown
from fathom.runtime.errors import PromptError
from fathom.runtime.options import DEMO, RunOptions, checked_config, usual
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.console import Console
from fathom.scripts.flags import add_model, add_op_set, add_rank_timeout, add_run_options, positive, run_options, seed
from fathom.scripts.paths import AUDITS, CHECKOUT, MAX_TEXT_BYTES, Fills, Texts, fillable, told

if TYPE_CHECKING:
    from fathom.model.ranks.ranks import Group
    from fathom.probes.probe import Probe, Run
    from fathom.probes.subject import Subject
    from fathom.runtime.group.watchdog import Watch


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.probe", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help="probes to run, or all")
    p.add_argument("--list", action="store_true", help="name the probes and the faults, and run nothing")
    add_model(p)
    p.add_argument("--out", action=Fills, help="folder for pages, made where it is not there")
    p.add_argument("--inject", metavar="FAULT", help="run with this fault in place")
    p.add_argument("--seed", type=int, default=0, help="of prompts and of what is drawn (default 0)")
    p.add_argument("--prompt-file", action=Texts, help="a UTF-8 text to run instead of made-up documents")
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="a knob of the one probe that is named, as in --set lengths=1024,4096; may come several times",
    )
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


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    if args.list and args.names:
        raise ConfigError("--list: takes no names, it runs nothing")
    if not (args.list or args.names):
        raise ConfigError("which probe? Name some, or all; --list names them")
    if args.set and len(args.names) != 1:
        raise ConfigError(f"--set {args.set[0]}: name the one probe whose knob it is")
    seed(args)
    return run(args, watch)


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known: ConfigError with one that is nearly the same."""
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "--list names them"
        raise ConfigError(f"no {what} {quoted(name)}; {hint}")


def run(args: argparse.Namespace, watch: "Watch | None") -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    from fathom.runtime.group.processes import connected

    out, err = Console(), Console(stderr=True)
    if args.list:
        _list(out)
        return 0
    with connected(watch, args.device, args.rank_timeout) as group:
        return _probe(args, watch, group, out, err)


def _probe(args: argparse.Namespace, watch: "Watch | None", group: "Group", out: Console, err: Console) -> int:
    import torch

    if args.model.resolve() == DEMO:
        args.model = DEMO  # however it was spelled
    chosen, subject = probes(args), subject_of(args)
    if not all(probe.of_llama for probe in chosen):
        ModelConfig.from_file(args.model / "config.json")  # says what is no V4 checkpoint
    subject = replace(subject, group=group, watch=watch)
    torch.set_num_threads(args.threads)
    folder = _folder(args, chosen, subject)
    subject.load_any()  # what is wrong with it is wrong for every probe: the command ends
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
    args: argparse.Namespace,
    chosen: "Sequence[Probe]",
    subject: "Subject",
    folder: Path | None,
    out: Console,
    err: Console,
) -> "list[Run]":
    """Run the probes, show what each found, and write its page."""
    from fathom.probes.probe import Run, attempt
    from fathom.probes.report import of_run, write

    runs: list[Run] = []
    for at, probe in enumerate(chosen, 1):
        with shown.watched(err, probe, at, len(chosen)) as progress:
            runs.append(attempt(probe, subject, progress))
        _show(out, runs[-1], brief="all" in args.names)
        if folder is not None:
            page = of_run(runs[-1], subject, command(args, probe.name, subject.group.size))
            if subject.group.rank == 0:
                write(page, folder)
            _say(err, f"wrote {folder / page.name}.md")
    return runs


def probes(args: argparse.Namespace) -> "list[Probe]":
    """Return the probes that are asked for, each once; ConfigError for a name that is none's."""
    from fathom.probes.catalogue import EXPERIMENTS, FULL, QUICK, QUICK_EXPERIMENTS

    every, more = (QUICK, QUICK_EXPERIMENTS) if args.quick else (FULL, EXPERIMENTS)
    known = {probe.name: probe for probe in (*every, *more)}
    for name in args.names:
        check_name("probe", name, ("all", *known))
    named = [known[name] for name in dict.fromkeys(args.names) if name != "all"]
    chosen = [*every, *(probe for probe in named if probe in more)] if "all" in args.names else named
    return [with_knobs(probe, args.set) for probe in chosen]


def with_knobs(probe: "Probe", settings: Sequence[str]) -> "Probe":
    """A probe with other values for some of its fields; ConfigError for a field that it has not, or a value of none."""
    default = {knob.name: getattr(probe, knob.name) for knob in fields(probe)}  # type: ignore[arg-type]
    changed: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in default:
            raise ConfigError(f"--set {setting}: {probe.name} has the knobs {', '.join(default) or 'none'}")
        changed[name] = _value(setting, default[name], text)
    return replace(probe, **changed)  # type: ignore[type-var]


def _value(setting: str, default: Any, text: str) -> Any:
    """A knob's value: text as it is; several of them or of numbers between commas, in brackets where they nest."""
    if isinstance(default, str):
        return text
    if _shape(default) == (tuple, str):
        return tuple(text.split(","))
    try:
        values = _tuples(strict_json.parse_text(f"[{text}]"))
    except ValueError:
        values = None
    value = values if isinstance(default, tuple) or not values or len(values) > 1 else values[0]
    if type(value) is not type(default) or (default and value and _shape(value) != _shape(default)):
        raise ConfigError(f"--set {setting}: want a value as {json.dumps(default).strip('[]')}")
    return value


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _shape(value: Any) -> Any:
    """Types of a value's first items, in depth."""
    return (tuple, _shape(value[0])) if isinstance(value, tuple) and value else type(value)


def _applying(args: argparse.Namespace, chosen: "Sequence[Probe]", subject: "Subject", out: Console) -> "list[Probe]":
    """Return the probes whose needs are met, less those of Fathom itself for another model; say which are not."""
    from fathom.probes.probe import unmet

    left = {probe.name: why for probe in chosen if (why := unmet(probe, subject)) is not None}
    for probe in chosen if args.model != DEMO else ():
        if probe.of_fathom and probe.name not in args.names:
            left[probe.name] = "it is about Fathom, hardly about a checkpoint: name it beside all to run it too"
    for name, why in left.items():
        _say(out, f"left out {name:14} {why}")
    return [probe for probe in chosen if probe.name not in left]


def subject_of(args: argparse.Namespace) -> "Subject":
    """Return what is measured, after a look at every flag and file that could be at fault."""
    from fathom.probes.faults import FAULTS
    from fathom.probes.subject import Subject
    from fathom.runtime.op_sets import op_set

    fault = None
    if args.inject is not None:
        check_name("fault", args.inject, FAULTS)
        fault = FAULTS[args.inject]
    subject = Subject(args.model, run_options(args), fault=fault, seed=args.seed, prompt=_prompt(args.prompt_file))
    config = checked_config(args.model, subject.options)
    subject = replace(subject, ops=op_set(args.ops or usual(subject.options.device), subject.options, config))
    if fault is not None and (why := fault.inapplicable(subject.config)) is not None:
        raise ConfigError(f"--inject {fault.name}: {why}")
    if subject.prompt is not None:
        subject.tokens(1)  # a bad prompt should not wait for the weights
    return subject


def _prompt(path: Path | None) -> str | None:
    return None if path is None else read_text(path, MAX_TEXT_BYTES, PromptError)


def _folder(args: argparse.Namespace, chosen: "Sequence[Probe]", subject: "Subject") -> Path | None:
    """Return where pages go, None where nowhere."""
    from fathom.probes.subject import Subject

    if args.out is not None:
        folder: Path = args.out
    elif (
        CHECKOUT  # what is installed has no pages
        and all(subject == Subject(options=probe.options) for probe in chosen)
        and not (args.quick or args.set)
    ):
        folder = AUDITS
    else:
        return None
    if subject.group.rank > 0:
        return folder
    fillable(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def command(args: argparse.Namespace, name: str, ranks: int = 1) -> str:
    """Return the command that makes the page of one probe again; of absolute paths only the last part is told."""
    default = RunOptions().to_json()
    flags = {
        "--model": None if args.model == DEMO else told(args.model),
        "--out": None if args.out is None else told(args.out),
        "--inject": args.inject,
        "--seed": args.seed or None,
        "--threads": args.threads if args.threads > 1 else None,
        "--prompt-file": None if args.prompt_file is None else told(args.prompt_file),
        **{
            f"--{field.replace('_', '-')}": None if value == default[field] else value
            for field, value in run_options(args).to_json().items()
        },
    }
    start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    words = [*start, "-m", "scripts.probe", name, *(["--quick"] if args.quick else [])]
    for setting in args.set:
        knob, _, value = setting.partition("=")
        words += ["--set", f"{knob}={told(Path(value)) if Path(value).is_absolute() else value}"]
    words += [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    return shlex.join(words)


def _list(out: Console) -> None:
    """Print what there is to run and to inject."""
    from fathom.probes.catalogue import EXPERIMENTS, FULL
    from fathom.probes.faults import FAULTS

    faults = {name: fault.what for name, fault in FAULTS.items()}
    for title, entries in (
        ("probes", {probe.name: probe.question for probe in FULL}),
        ("experiments, which all does not run", {probe.name: probe.question for probe in EXPERIMENTS}),
        ("faults, for --inject", faults),
    ):
        if out.is_terminal:
            out.print(shown.listing(title, entries))
        else:
            _say(out, f"{title}:", *(f"  {name}: {what}" for name, what in entries.items()))


def _show(out: Console, one: "Run", *, brief: bool) -> None:
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
