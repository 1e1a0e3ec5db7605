"""`python -m scripts.long_context`: one prefill of up to a million tokens, measured and questioned on its way.

A document of the demo language is read once. At each mark the walk stops: how fast were the last calls, how long takes
a token, which op takes what, how much memory, and are codes told so far back still found. Progress goes to stderr; the
page and its pictures to --out.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch

from kernels.ops import BLOCKED
from model.errors import CapacityError, ConfigError
from probes import markdown
from probes.probe import run_probe
from probes.subject import Subject
from runtime.options import DEMO, RunOptions
from scripts.cli import run_alone
from scripts.flags import add_run_options, lengths, positive, run_options
from scripts.long.document import RESERVED
from scripts.long.probe import LongContext, read
from scripts.long.timing import Clock
from scripts.paths import writable

SENTENCE = 16  # tokens of the longest sentence and more: the text before a mark ends with one
LENGTHS = tuple(1 << i for i in range(10, 21))
PAGES = Path(__file__).resolve().parents[1] / "audits"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.long_context", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO, help="a checkpoint that speaks the demo language")
    p.add_argument(
        "--lengths", type=lengths, default=LENGTHS, metavar="N,N,..", help="marks (default 1024,2048,..,1048576)"
    )
    p.add_argument("--questions", type=positive, default=66, help="at each mark, at most (default 66: all codes)")
    p.add_argument("--seed", type=int, default=0, help="another seed, another document (default 0)")
    p.add_argument("--threads", type=positive, default=1, help="that torch may use (default 1)")
    p.add_argument("--json", type=Path, help="write what is measured there, after every mark")
    p.add_argument("--saved", type=Path, help="make the page from what an earlier run wrote with --json")
    p.add_argument(
        "--out",
        type=Path,
        help="folder of the page, made where there is none (default audits, for the run of all defaults alone)",
    )
    add_run_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    out = folder(args)
    writable(args.json)
    writable(out / "long-context.md")
    torch.set_num_threads(args.threads)
    clock = Clock()
    subject = Subject(args.model, run_options(args), clock.watch(BLOCKED), seed=args.seed)
    if args.lengths[-1] > (room := subject.config.max_position_embeddings):
        raise CapacityError(f"--lengths: {args.lengths[-1]} tokens, the model has {room} positions")
    probe = LongContext(clock, args.lengths, args.questions, args.json, args.saved)
    if (why := probe.vacuous(subject)) is not None:
        raise ConfigError(f"--model {args.model}, --lengths {args.lengths[0]}: {why}")
    if args.prefill_chunk > (most := args.lengths[0] - RESERVED - SENTENCE):
        raise ConfigError(f"--prefill-chunk {args.prefill_chunk}: before {args.lengths[0]} tokens, a call has {most}")
    found = run_probe(probe, subject, lambda _, what: print(what, file=sys.stderr, flush=True))
    if args.saved is not None:
        saved = read(args.saved, subject)
        found = replace(found, seconds=saved["seconds"], commit=saved.get("commit", "unknown"))
    page = markdown.page(found, subject, command(args))
    markdown.write(page, out)
    print(f"{out / 'long-context.md'}: {found.report.summary}", file=sys.stderr)
    return int(found.report.failed)


def folder(args: argparse.Namespace) -> Path:
    """Where the page goes; ConfigError where another run's would replace the one of `audits`."""
    if args.out is None:
        if other := asked_for(args):
            flag = f"--{other[0].replace('_', '-')}"
            raise ConfigError(f"{flag}: audits has the page of a run without it; --out FOLDER takes this one's")
        return PAGES
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    return out


def asked_for(args: argparse.Namespace) -> list[str]:
    """What decides the numbers and is not the default."""
    names = ("model", "lengths", "questions", "seed", "threads", *(field.name for field in fields(RunOptions)))
    default = parser().get_default
    return [name for name in names if hasattr(args, name) and getattr(args, name) != default(name)]


def command(args: argparse.Namespace) -> str:
    """Return the command that makes the page again; of an absolute path only the last part is told."""
    flags = {
        "lengths": ",".join(map(str, args.lengths)),
        "model": args.model.name if args.model.is_absolute() else args.model,
    }
    words = [
        word
        for name in asked_for(args)
        for word in (f"--{name.replace('_', '-')}", str(flags.get(name, getattr(args, name))))
    ]
    return shlex.join(["python", "-m", "scripts.long_context", *words])


if __name__ == "__main__":
    sys.exit(run_alone(main))
