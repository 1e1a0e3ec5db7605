"""`python -m scripts.evaluate --text F`: perplexity of a text, and divergence from another run of the same model.

Runs differ by `--kv`, numerics, dtype, cache formats or backend, and read the same text, call by call in turn. Flags of
a run are those of all runs; `--run "FLAGS"`, any number of times, is a run with these flags too, `--against "FLAGS"`
the one that all are compared with. Without it that is the full cache, with everything else the same.

    fathom evaluate --text book.txt --kv all=shard                              against the full cache
    fathom evaluate --text book.txt --run "--kv all=shard" --run "--kv all=coda"      two variants of it
    fathom evaluate --text book.txt --numerics plain --against "--numerics deployed"
    fathom evaluate --needle --lengths 4096,32768 --kv all=shard                codes told in a long text, asked for
"""

import argparse
import copy
import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fathom.model.architectures import Config
from fathom.model.errors import CapacityError, ConfigError
from fathom.probes.demo_language.words import NAMES
from fathom.probes.finding import Text, ranges
from fathom.runtime.options import RunOptions, usual
from fathom.runtime.output import write_json
from fathom.scripts import paths
from fathom.scripts.cli import arguments, parsed, run_on_ranks
from fathom.scripts.console import Console, grid, progress
from fathom.scripts.flags import (
    add_json,
    add_model,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_threads,
    add_variants,
    lengths,
    positions,
    positive,
    run_options,
    seed,
)
from fathom.scripts.paths import Fills, Texts

if TYPE_CHECKING:
    from fathom.model.ranks.ranks import Group
    from fathom.runtime.group.watchdog import Watch
    from fathom.runtime.load import AnyLoaded
    from fathom.scripts.parts.evaluate_codes import Codes
    from fathom.scripts.parts.evaluate_text import Likelihood


FULL = "full cache"
LENGTHS = (1024, 4096)
OF_TEXT = ("tokens", "context", "stride", "decode")  # mean nothing with --needle


class Asked(NamedTuple):
    """A run as its flags describe it."""

    name: str
    options: RunOptions
    ops: str  # backend


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(
        prog="python -m scripts.evaluate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model(p)
    p.add_argument("--text", action=Texts, metavar="FILE", help="UTF-8 text, taken as it is")
    p.add_argument("--tokens", type=positive, help="of the text, at most (default: all of it)")
    p.add_argument(
        "--context",
        type=positions,
        help="tokens that are run together, BOS among them (default: the text, or as many as the model has positions)",
    )
    p.add_argument(
        "--stride",
        type=positive,
        help="tokens by which the next such window begins later; the last ones of a window are scored, those before"
        " them are its prompt, which shard compresses (default: all are scored, and windows do not overlap)",
    )
    p.add_argument("--decode", action="store_true", help="read what is scored token by token, as generation does")
    needle = p.add_argument_group("--needle", "codes told once in a long text, and asked for behind it")
    needle.add_argument("--needle", action="store_true", help="ask for codes, told in --text or in made-up sentences")
    needle.add_argument(
        "--lengths", type=lengths, default=LENGTHS, metavar="N,N,..", help="tokens of the documents (default 1024,4096)"
    )
    needle.add_argument("--needles", type=positive, default=8, help="codes told in each, at even depths (default 8)")
    needle.add_argument("--documents", type=positive, default=2, help="of each length (default 2)")
    needle.add_argument("--seed", type=int, default=0, help="another seed, other codes (default 0)")
    for flag, says in (
        ("--run", "a run with these flags too; may come several times (default: one run, of the flags beside it)"),
        ("--against", "the run that all are compared with (default: the full cache)"),
    ):
        action = "append" if flag == "--run" else "store"
        p.add_argument(flag, action=action, metavar='"FLAGS"', help=says)
    _add_flags(p)
    add_threads(p)
    add_rank_timeout(p)
    add_json(p, "what was measured")
    p.add_argument("--out", action=Fills, help="folder for a page, evaluate.md, made where it is not there")
    return p


def _add_flags(p: argparse.ArgumentParser) -> None:
    """Add what one run may have that another has not."""
    add_run_options(p)
    add_op_set(p)
    add_variants(p)


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    _check(args)
    runs = asked_for(args)
    return run(args, runs, watch)


def _check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other: ConfigError."""
    default = parser().get_default
    if args.text is None and not args.needle:
        raise ConfigError("--text FILE is needed, or --needle")
    other = OF_TEXT if args.needle else ("lengths", "needles", "documents", "seed")
    for name in other:
        if getattr(args, name) != default(name):
            raise ConfigError(f"--{name}: {'not with --needle' if args.needle else 'means nothing without --needle'}")
    seed(args)
    if args.needles > (most := len(NAMES)):
        raise ConfigError(f"--needles {args.needles}: there are {most} names of people to give a code to")


def asked_for(args: argparse.Namespace) -> list[Asked]:
    """Return the runs, what they are held against first; a single one where there is nothing but the full cache."""
    changed = [_changed(args, "--run", flags) for flags in args.run or ()] or [(_named(args), args)]
    if args.against is not None:
        reference = _changed(args, "--against", args.against)
    else:
        reference = (FULL, argparse.Namespace(**vars(args) | {"kv": []}))
    runs = [Asked(name, run_options(of), of.ops or usual(of.device)) for name, of in (reference, *changed)]
    alone = args.against is None and len(runs) == 2 and runs[0][1:] == runs[1][1:]
    return runs[:1] if alone else runs


def _changed(args: argparse.Namespace, flag: str, text: str) -> tuple[str, argparse.Namespace]:
    """The flags of a run: those of all, and the ones in a flag's value; ConfigError for what they cannot be."""
    p = argparse.ArgumentParser(prog=f'{flag} "{text}"', add_help=False, allow_abbrev=False)
    _add_flags(p)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f'{flag} "{text}": {error}') from None
    of = parsed(p, words, copy.copy(args))
    paths.check(of)
    return text or "as all", of


def _named(args: argparse.Namespace) -> str:
    """The run of the command's own flags."""
    return " ".join(f"--kv {rule}" for rule in args.kv) or "this run"


def run(args: argparse.Namespace, asked: Sequence[Asked], watch: "Watch | None") -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    from fathom.runtime.group.processes import connected

    with connected(watch, args.device, args.rank_timeout) as group:
        return _evaluate(args, asked, watch, group)


def _evaluate(args: argparse.Namespace, asked: Sequence[Asked], watch: "Watch | None", group: "Group") -> int:
    import torch

    from fathom.probes.evaluation import Run
    from fathom.runtime.group.processes import leads, watched_load_any
    from fathom.runtime.op_sets import op_set
    from fathom.runtime.process import set_process
    from fathom.runtime.report import commit
    from fathom.scripts.parts.evaluate_codes import Codes
    from fathom.scripts.parts.evaluate_text import Likelihood

    err, began = Console(stderr=True), time.perf_counter()
    configs = [_config(args, one) for one in asked]
    ops = [op_set(one.ops, one.options, config) for one, config in zip(asked, configs, strict=True)]
    task = Codes(args, configs[0]) if args.needle else Likelihood(args, configs[0])
    loaded: list[AnyLoaded] = []
    for one, chosen in zip(asked, ops, strict=True):
        with err.loading(args.model):
            loaded.append(watched_load_any(watch, args.model, one.options, chosen, group, context=task.room))
    set_process(args.threads, loaded[0])
    runs = [Run(one.name, made.model, one.options.prefill_chunk) for one, made in zip(asked, loaded, strict=True)]
    with progress(err, task.work(len(runs))) as advance:
        found = task.measure(runs, advance)
    facts = {
        "commit": str(commit()),
        "command": args.command_line,
        "checkpoint": args.model.resolve().name,
        "config": configs[0].fingerprint,
        "weights": loaded[0].weights_fingerprint,
        "threads": torch.get_num_threads(),
        "ranks": group.size,
        **task.facts(),
    }
    told = [
        {"name": one.name, "ops": one.ops, "options": one.options.to_json()} | values
        for one, values in zip(asked, found, strict=True)
    ]
    if leads(watch):
        _show(args, task, facts, told, time.perf_counter() - began)
    return 0


def _show(
    args: argparse.Namespace,
    task: "Likelihood | Codes",
    facts: dict[str, Any],
    runs: list[dict[str, Any]],
    seconds: float,
) -> None:
    """Print what was found, and write it where the flags say."""
    from fathom.probes.report import Page, write

    out, table, said = Console(), task.table(runs), notes(runs) + task.notes(runs)
    out.say(task.headline(runs))
    out.print(grid(table))
    out.say(*said)
    data = facts | {"runs": runs, "seconds": seconds}
    if args.json is not None:
        write_json(args.json, data)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        parts = [*task.pictures(runs), table, *([Text("", "\n".join(f"- {line}" for line in said))] if said else [])]
        page = Page("evaluate", task.title, task.headline(runs), "", [*parts, *task.explained], facts, data)
        write(page, args.out)
        Console(stderr=True).say(f"wrote {args.out / 'evaluate.md'}")


def _config(args: argparse.Namespace, one: Asked) -> Config:
    from fathom.runtime.load import read_any_config

    try:
        return read_any_config(args.model, one.options)
    except (ConfigError, CapacityError) as error:
        several = args.run or args.against is not None
        raise type(error)(f'the run "{one.name}": {error}' if several else str(error)) from error


def notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a number does not show: where a run could not have differed from its reference."""
    reference, out = runs[0], list[str]()
    if len(runs) == 1:
        out.append("Nothing is compared: every run here is the full cache. --kv, --run or --against name another one")
    for one in runs[1:]:
        name, idle, varied = one["name"], one["exact_layers"], one["varied_layers"]
        if (one["options"], one["ops"]) == (reference["options"], reference["ops"]):
            out.append(f"{name}: VACUOUS, its flags are those of the reference")
        if idle and idle == varied:
            more = "longer texts, a smaller --prefill-chunk or --decode show more"
            out.append(f"{name}: VACUOUS, no scored token saw anything evicted or compressed; {more}")
        elif idle:
            out.append(f"{name}: no scored token saw anything evicted or compressed in layers {ranges(idle)}")
        if varied and one["options"]["numerics"] == "deployed":
            rounds = "deployed numerics round the entries of a full cache and not these"
            out.append(f"{name}: {rounds}; --numerics plain compares the caches alone")
        if varied and sum(one["cache_bytes"].values()) >= sum(reference["cache_bytes"].values()):
            out.append(f"{name}: its caches take no less than the reference's, at this length")
    return out


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
