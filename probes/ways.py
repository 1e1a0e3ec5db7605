"""How a recording of ours is made: tokens are run, and what passes at each site is written."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from fathom.model.config import ModelConfig
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site, axes
from fathom.model.transformer import Transformer
from fathom.probes.judge.recording import IN_FP32, KEPT, OF_ENTRIES, TOKENS, WHOLE_MODEL, has_site, stored_name
from fathom.runtime.output import reserved

HEAD_ROWS: Final = 64  # rows of logits that are made at a time
STORED: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32"}
WIDE: Final = (sites.LOGITS.name, sites.INDEX_WEIGHTS.name, sites.EXPERT_WEIGHTS.name)


def record(
    model: Transformer,
    tokens: Sequence[int],
    lengths: Sequence[int],
    path: Path,
    kept: Sequence[Site] = KEPT,
    layers: Sequence[int] | None = None,
    *,
    steer: Mapping[Site, Listener] | None = None,
    after: Callable[[], None] = lambda: None,
) -> int:
    """Run tokens from position 0 and write what passes; returns how many tensors that are, tokens aside.

    Parameters
    ----------
    model
        The model, whose state is a new one.
    tokens, lengths
        Token ids, and the lengths of the calls that they are run in.
    path
        The file, replaced when all is written.
    kept, layers
        Sites, and layers of which they are kept; None: all, and what is behind the last layer.
    steer
        Listeners that write into what passes before it is recorded.
    after
        Called after each call.

    """
    chosen = range(model.config.num_hidden_layers) if layers is None else layers
    planned = _planned(model.config, kept, chosen, len(tokens), model.arithmetic.dtype, whole=layers is None)
    ids, start = torch.tensor(tokens, device=model.device), 0
    state = model.new_state(len(tokens), max(lengths))
    with reserved(path, {name: (STORED[dtype], shape) for name, (dtype, shape) in planned.items()}) as append:

        def write(name: str, rows: Tensor) -> None:
            append(name, rows.detach().cpu().contiguous().view(torch.uint8).numpy().data)

        write(TOKENS, ids)
        with listening(model, _writers(kept, planned, steer or {}, write)):
            for length in lengths:
                hidden = model(ids[start : start + length], state)
                if sites.LOGITS.name in planned:
                    for part in hidden.split(HEAD_ROWS):
                        write(sites.LOGITS.name, model.logits(part))  # what is told, which need not be what passed
                start += length
                after()
    return len(planned) - 1


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
    fp32 = site.name in WIDE or site.name.endswith(IN_FP32)
    return torch.float32 if fp32 else dtype


def _writers(
    kept: Sequence[Site],
    planned: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    steer: Mapping[Site, Listener],
    write: Callable[[str, Tensor], None],
) -> dict[Site, Listener]:
    """Write what passes, where it is planned, after it was steered."""

    def listener(site: Site) -> Listener:
        def listen(layer: int | None, x: Tensor) -> None:
            if site in steer:
                steer[site](layer, x)
            if site != sites.LOGITS and (place := stored_name(site.name, layer)) in planned:
                dtype, shape = planned[place]
                if site == sites.SELECTED:
                    x = torch.nn.functional.pad(x, (0, shape[1] - x.shape[1]), value=-1)
                write(place, x.to(dtype))

        return listen

    return {site: listener(site) for site in {*kept, *steer}}
