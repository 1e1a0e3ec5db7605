"""What `scripts.record` does once its command line is known to be good."""

import argparse
import contextlib
from collections.abc import Sequence

from rich.progress import Progress

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, one_line
from fathom.model.observe.observer import observed
from fathom.model.ranks.ranks import Group
from fathom.model.transformer import Transformer
from fathom.probes.fault import BREAKS_DOWN, Fault
from fathom.probes.faults import FAULTS
from fathom.probes.judge.recording import KEPT
from fathom.probes.ways import record
from fathom.runtime.group.processes import connected, leads, watched_load_any
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import read_config
from fathom.runtime.op_sets import op_set
from fathom.runtime.options import usual
from fathom.runtime.plan.experts import Work
from fathom.runtime.process import set_process
from fathom.scripts.console import Console
from fathom.scripts.flags import run_options
from fathom.scripts.probe import check_name
from fathom.scripts.record import check_sites


def run(args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: Watch | None) -> int:
    """Run tokens in calls of these lengths and write what passed; returns the exit status."""
    with connected(watch, args.device, args.rank_timeout) as group:
        return _record(args, ids, lengths, watch, group)


def _record(
    args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int], watch: Watch | None, group: Group
) -> int:
    options = run_options(args)
    config = read_config(args.model, options)
    chosen = check_sites(args.sites, [site.name for site in KEPT]) or [site.name for site in KEPT]
    ops = op_set(args.ops or usual(options.device), options, config)
    fault = None if args.inject is None else _fault(args.inject, config, group)
    faulty = ops if fault is None else fault.ops(ops)
    prompt = args.decode_from or len(ids)
    work = Work(prompt, 1 + len(ids) - prompt)  # one token more than steps
    loaded = watched_load_any(watch, args.model, options, faulty, group, context=len(ids), work=work)
    assert isinstance(loaded.model, Transformer), "as its config was read"
    if fault is not None:
        fault.inject(loaded.model)
    set_process(args.threads, loaded)
    kept = [site for site in KEPT if site.name in chosen]
    console = Console(stderr=True)
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


def _fault(name: str, config: ModelConfig, group: Group) -> Fault:
    """A fault by its name; ConfigError for one that this run cannot have."""
    check_name("fault", name, FAULTS)
    fault = FAULTS[name]
    none_here = "it acts between ranks alone" if fault.between_ranks and group.size == 1 else None
    none_here = "it acts in cache variants alone" if fault.in_variants else none_here
    none_here = "it acts on drafts alone" if fault.in_drafts else none_here
    if why := none_here or fault.inapplicable(config):
        raise ConfigError(f"--inject {name}: {why}")
    return fault
