"""What `scripts.record` does once its command line is known to be good."""

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from rich.progress import track
from torch import Tensor

from model.config import ModelConfig
from model.errors import ConfigError
from model.observe import sites
from model.observe.observer import listening, observed
from model.observe.sites import Listener, Site, axes
from probes.fault import Fault
from probes.faults import FAULTS
from probes.recording import KEPT, OF_ENTRIES, TOKENS, WHOLE_MODEL, has_site, stored_name
from runtime.load import load, read_config
from runtime.op_sets import op_set
from runtime.options import usual
from runtime.output import reserved
from runtime.threads import set_threads
from scripts.console import Console
from scripts.flags import run_options
from scripts.probe import check_name
from scripts.record import check_sites

HEAD_ROWS: Final = 64  # rows of logits at a time
DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}
WIDE: Final = (sites.LOGITS.name, sites.INDEX_WEIGHTS.name, sites.EXPERT_WEIGHTS.name)


def run(args: argparse.Namespace, ids: Sequence[int], lengths: Sequence[int]) -> int:
    """Run tokens in calls of these lengths and write what passed; returns the exit status."""
    options = run_options(args)
    config = read_config(args.model, options)
    chosen = check_sites(args.sites, [site.name for site in KEPT]) or [site.name for site in KEPT]
    layers = range(config.num_hidden_layers) if args.layers is None else args.layers
    ops = op_set(args.ops or usual(options.device), options, config)
    fault = None if args.inject is None else _fault(args.inject, config)
    loaded = load(args.model, options, ops if fault is None else fault.ops(ops), context=len(ids))
    if fault is not None:
        fault.inject(loaded.model)
    set_threads(args.threads, loaded)
    model = loaded.model
    kept = [site for site in KEPT if site.name in chosen]
    planned = _planned(config, kept, layers, len(ids), model.arithmetic.dtype, whole=args.layers is None)
    tokens = torch.tensor(ids, device=model.device)
    state = model.new_state(len(ids), max(lengths))
    console, start = Console(stderr=True), 0
    with reserved(args.out, {name: (DTYPES[dtype], shape) for name, (dtype, shape) in planned.items()}) as append:

        def write(name: str, rows: Tensor) -> None:
            append(name, rows.detach().cpu().contiguous().view(torch.uint8).numpy().data)

        write(TOKENS, tokens)
        # A fault that a tripwire would end is to be seen to its end.
        watched = contextlib.nullcontext() if fault is None else observed(model).unchecked()
        with watched, listening(model, _listeners(kept, planned, write)):
            for length in track(lengths, "record", console=console, transient=True, disable=not console.is_terminal):
                hidden = model(tokens[start : start + length], state)
                if sites.LOGITS.name in planned:
                    for part in hidden.split(HEAD_ROWS):
                        model.logits(part)
                start += length
    console.say(f"{args.out}: {len(planned) - 1} tensors of {len(ids)} tokens from {len(lengths)} calls")
    return 0


def _fault(name: str, config: ModelConfig) -> Fault:
    """A fault by its name; ConfigError for one that this run cannot have."""
    check_name("fault", name, FAULTS)
    fault = FAULTS[name]
    none_here = "it acts between ranks alone" if fault.between_ranks else None
    none_here = "it acts in cache variants alone" if fault.in_variants else none_here
    if why := none_here or fault.inapplicable(config):
        raise ConfigError(f"--inject {name}: {why}")
    return fault


def _planned(
    config: ModelConfig, kept: Sequence[Site], layers: Sequence[int], tokens: int, dtype: torch.dtype, *, whole: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of every tensor of the recording, by its name."""
    known = axes(config)
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {TOKENS: (torch.int64, (tokens,))}
    for site in kept:
        places = [None] if site.name in WHOLE_MODEL else [layer for layer in layers if has_site(config, layer, site)]
        for layer in places:
            if layer is None and not whole and site != sites.EMBEDDED:
                continue
            rows, entries = tokens, 0 if layer is None or not config.ratio(layer) else tokens // config.ratio(layer)
            if site.name in OF_ENTRIES:
                rows = entries
            free = min(config.index_topk, entries) if site == sites.SELECTED else 0
            shape = (rows, *(known.get(axis, free) for axis in site.shape.split()[1:]))
            found[stored_name(site.name, layer)] = _dtype(site, dtype), shape
    return found


def _dtype(site: Site, dtype: torch.dtype) -> torch.dtype:
    if site == sites.SELECTED:
        return torch.int32
    if site == sites.EXPERT_IDS:
        return torch.int64
    fp32 = site.name in WIDE or site.name.endswith((".pre", ".post", ".comb"))
    return torch.float32 if fp32 else dtype


def _listeners(
    kept: Sequence[Site],
    planned: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    write: Callable[[str, Tensor], None],
) -> dict[Site, Listener]:
    """Write what passes, where it is planned."""

    def listener(site: Site) -> Listener:
        def listen(layer: int | None, x: Tensor) -> None:
            if (place := stored_name(site.name, layer)) in planned:
                dtype, shape = planned[place]
                if site == sites.SELECTED:
                    x = torch.nn.functional.pad(x, (0, shape[1] - x.shape[1]), value=-1)
                write(place, x.to(dtype))

        return listen

    return {site: listener(site) for site in kept}
