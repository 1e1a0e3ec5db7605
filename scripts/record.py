"""`python -m scripts.record`: run a token sequence and keep what passes the model's sites, as one recording.

`python -m scripts.compare` judges a recording, of this runtime or of any other; README has the format.
"""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.progress import Progress

from fathom.model.errors import ConfigError, one_line, quoted
from fathom.runtime.options import checked_config, usual
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.console import Console
from fathom.scripts.flags import (
    add_model,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_threads,
    check_layers,
    chunk_lengths,
    numbers,
    positive,
    run_options,
)
from fathom.scripts.paths import Reads, Writes
from fathom.scripts.probe import check_name
from fathom.scripts.prompts import read_tokens

if TYPE_CHECKING:
    from fathom.model.config import ModelConfig
    from fathom.model.ranks.ranks import Group
    from fathom.probes.fault import Fault
    from fathom.runtime.group.watchdog import Watch


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.record", description=__doc__)
    add_model(p)
    p.add_argument("--tokens", action=Reads, required=True, help="JSON list of token ids")
    p.add_argument("--out", action=Writes, required=True, help="recording to write, a safetensors file")
    p.add_argument("--layers", type=numbers, help="layers between commas, as 0,17 (default: all, and the head)")
    p.add_argument("--sites", help="sites between commas, as attention.output,streams (default: all but steps)")
    p.add_argument(
        "--steps", action="store_true", help="keep steps too, as attention.query_unrotated, which lie between sites"
    )
    p.add_argument(
        "--inject", metavar="FAULT", help="run with this fault in place, to see what it looks like to compare"
    )
    p.add_argument("--decode-from", type=positive, help="prefill this number of tokens, feed the rest one at a time")
    add_run_options(p)
    add_op_set(p)
    add_threads(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    options = run_options(args)
    config = checked_config(args.model, options)
    check_layers(args.layers, config.num_hidden_layers)
    ids = read_tokens(args.tokens, config.vocab_size)
    lengths = chunk_lengths(len(ids), options.prefill_chunk, args.decode_from)
    return run(args, ids, lengths, watch)


def check_sites(text: str | None, known: Sequence[str]) -> list[str] | None:
    """Return what --sites names; ConfigError for what is no site."""
    if text is None:
        return None
    for name in text.split(","):
        if name not in known:
            raise ConfigError(f"--sites {quoted(name)}: no site; there are {', '.join(known)}")
    return text.split(",")


def run(args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: "Watch | None") -> int:
    """Run tokens in calls of these lengths and write what passed; returns the exit status."""
    from fathom.runtime.group.processes import connected

    with connected(watch, args.device, args.rank_timeout) as group:
        return _record(args, ids, lengths, watch, group)


def _record(
    args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: "Watch | None", group: "Group"
) -> int:
    from fathom.model.observe.observer import not_shown, observed
    from fathom.model.observe.sites import STEPS
    from fathom.model.transformer import Transformer
    from fathom.probes.fault import BREAKS_DOWN
    from fathom.probes.judge.recording import kept_of
    from fathom.probes.ways import record
    from fathom.runtime.group.processes import leads, watched_load_any
    from fathom.runtime.load import read_config
    from fathom.runtime.op_sets import op_set
    from fathom.runtime.plan.experts import Work
    from fathom.runtime.process import set_process

    options = run_options(args)
    config = read_config(args.model, options)
    ops = op_set(args.ops or usual(options.device), options, config)
    fault = None if args.inject is None else _fault(args.inject, config, group)
    work = Work.of(len(ids), args.decode_from or len(ids))
    faulty = ops if fault is None else fault.ops(ops)
    loaded = watched_load_any(watch, args.model, options, faulty, group, context=len(ids), work=work)
    assert isinstance(loaded.model, Transformer), "as its config was read"
    if fault is not None:
        fault.inject(loaded.model)
    set_process(args.threads, loaded)
    hidden = not_shown(faulty.name)
    usual_sites = kept_of(config)
    shown = [site for site in (*usual_sites, *STEPS) if site not in hidden]
    chosen = check_sites(args.sites, [site.name for site in shown]) or [site.name for site in usual_sites]
    kept = [site for site in shown if site.name in chosen or (args.steps and site in STEPS)]
    console = Console(stderr=True)
    if args.steps:
        console.say(f"Steps that {faulty.name} ops do not show: {', '.join(site.name for site in hidden)}")
    # A fault that a tripwire would end is to be seen to its end.
    unchecked = contextlib.nullcontext() if fault is None else observed(loaded.model).unchecked()
    with unchecked, Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("record", total=len(lengths))
        out = args.out if leads(watch) else None
        try:
            tensors = record(loaded.model, ids, lengths, out, kept, args.layers, after=lambda: bar.advance(task))
        except BREAKS_DOWN as error:
            if fault is None:
                raise
            raise ConfigError(f"--inject {args.inject}: the run breaks down with it: {one_line(str(error))}") from error
    console.say(f"{args.out}: {tensors} tensors of {len(ids)} tokens from {len(lengths)} calls")
    return 0


def _fault(name: str, config: "ModelConfig", group: "Group") -> "Fault":
    """A fault by its name; ConfigError for one that this run cannot have."""
    from fathom.probes.faults import FAULTS

    check_name("fault", name, FAULTS)
    fault = FAULTS[name]
    none_here = "it acts between ranks alone" if fault.between_ranks and group.size == 1 else None
    none_here = "it acts in cache variants alone" if fault.in_variants else none_here
    none_here = "it acts on drafts alone" if fault.in_drafts else none_here
    if why := none_here or fault.inapplicable(config):
        raise ConfigError(f"--inject {name}: {why}")
    return fault


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
