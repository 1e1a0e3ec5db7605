"""The entries that a model makes of a text, and the basis that each of its layers is to remember them in."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fathom.kernels.formats.basis_fit import Fitted, Sample, fit
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener
from fathom.model.transformer import Transformer

QUERIES = 2048  # of a layer that are kept, heads of a token counted one by one


def samples(model: Transformer, ids: Sequence[int], chunk: int) -> dict[int, Sample]:
    """The compressed entries of every CSA and HCA layer as the compressor makes them, and queries; all on the CPU.

    The model must be one in `plain` numerics and fp32, with full caches: any other shows rounded ones.
    """
    arithmetic, config = model.arithmetic, model.config
    assert (arithmetic.numerics, arithmetic.dtype) == ("plain", torch.float32), "entries would come rounded"
    rows: dict[int, list[Tensor]] = {layer: [] for layer in with_entries(config)}
    queries: dict[int, list[Tensor]] = {layer: [] for layer in rows}
    selected: dict[int, list[Tensor]] = {layer: [] for layer in rows}
    last, first = len(ids) // 8, 0  # tokens whose queries are looked at, and where the call begins
    every = max(1, last * config.num_attention_heads // QUERIES)
    chosen = torch.arange(len(ids) - 1, len(ids) - 1 - last, -every).flip(0)

    def keep_entries(layer: int | None, made: Tensor) -> None:
        assert layer is not None, "an entry of no layer"
        rows[layer].append(made.to("cpu", torch.float32, copy=True))

    def keep(kept: dict[int, list[Tensor]]) -> Listener:
        def listen(layer: int | None, made: Tensor) -> None:
            if layer in kept:
                rows_of_call = chosen[(chosen >= first) & (chosen < first + len(made))] - first
                kept[layer].append(made[rows_of_call.to(made.device)].cpu())

        return listen

    state = model.new_state(len(ids), chunk)
    listeners = {sites.ENTRY: keep_entries, sites.QUERY: keep(queries), sites.SELECTED: keep(selected)}
    with listening(model, listeners):
        for part in torch.tensor(ids, device=model.device).split(chunk):
            model(part, state)
            first += len(part)
    none = torch.zeros(0, config.head_dim)
    found = {layer: torch.cat([none, *made]) for layer, made in rows.items()}
    return {
        layer: Sample(made, torch.cat(queries[layer]), _seen(chosen, config.ratio(layer), len(made), selected[layer]))
        for layer, made in found.items()
    }


def _seen(tokens: Tensor, ratio: int, n: int, selected: list[Tensor]) -> Tensor:
    """Which of n entries tokens [m] attend to, [m, n]: those `selected` in each call [t, k], or all complete ones."""
    if not selected:
        return torch.arange(n) < ((tokens + 1) // ratio)[:, None]
    seen, start = torch.zeros(len(tokens), n + 1, dtype=torch.bool), 0  # the extra column collects padding
    for part in selected:
        seen[start : start + len(part)].scatter_(1, torch.where(part < 0, n, part).long(), value=True)
        start += len(part)
    return seen[:, :n]


def fit_layers(config: ModelConfig, made: dict[int, Sample], bits: int, context: int) -> Iterator[tuple[int, Fitted]]:
    """Fit each layer's basis for the entries of `context` positions, at the bytes of rotated rows of so many `bits`."""
    for layer, sample in made.items():
        yield layer, fit(sample, config.qk_rope_head_dim, bits, context // config.ratio(layer))


def with_entries(config: ModelConfig) -> list[int]:
    """Layers that have entries: all but SWA."""
    return [layer for layer, kind in enumerate(config.layer_kinds) if kind is not LayerKind.SWA]
