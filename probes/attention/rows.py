"""What the attention of a run computed, token by token, beside what its equation says, and which rows it read."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import LayerKind, ModelConfig
from model.observe import sites
from model.transformer import Transformer
from probes.attention.oracle import attend
from probes.shared.recorder import Recorder

BEYOND = 8  # rows of KV that no token may see, which the counting lays beside the window
KINDS = ("window", "entries", "outside the window", "other entries")  # rows that the counting tells apart


class Layer(NamedTuple):
    """One layer's attention at the tokens that were looked at."""

    layer: int
    kind: LayerKind
    positions: Tensor  # [t]
    wanted: Tensor  # [t, 4] rows that config and selection demand, by `KINDS`
    counted: Tensor  # [t, h, 4] rows that the run's op reads
    error: Tensor  # [t, h] distance of the output from the oracle's, relative
    masses: Tensor  # [t, h, 3] share of the softmax on sink, window and entries
    norm: Tensor  # [t] norm of the output
    moved: Tensor  # [t] norm of the output less what the window alone would have given
    weight: float  # mean norm of an entry over that of a row of the window; 0 in a layer without


def compare(
    layer: int, model: Transformer, cached: Recorder, chosen: Recorder, positions: Sequence[int], sink: Tensor
) -> Layer:
    """Compare one layer of a run with the oracle.

    Parameters
    ----------
    layer, model
        The layer, and the model that ran; what it should have read is taken from its config alone.
    cached
        Heard `sites.KV` and `sites.ENTRY` of all tokens.
    chosen
        Heard `sites.QUERY`, `sites.MIXED` and `sites.SELECTED` of the tokens at `positions`.
    sink
        [h] float32, from the checkpoint.

    """
    config, kind = model.config, model.config.layer_kind(layer)
    kv, queries, mixed = cached.rows(sites.KV, layer), chosen.rows(sites.QUERY, layer), chosen.rows(sites.MIXED, layer)
    has_entries = kind is not LayerKind.SWA and config.ratio(layer) <= len(kv)
    entries = cached.rows(sites.ENTRY, layer) if has_entries else kv[:0]
    selections = chosen.rows(sites.SELECTED, layer) if kind is LayerKind.CSA and has_entries else None
    rows: list[tuple[Tensor, ...]] = []  # wanted, counted, error, masses, norm, moved
    for i, position in enumerate(positions):
        near = kv[max(0, position - config.sliding_window + 1) : position + 1]
        visible = (position + 1) // config.ratio(layer) if has_entries else 0
        selected = None if selections is None else selections[i]
        far = torch.arange(visible) if selected is None else selected[selected >= 0].long()
        demanded = min(visible, config.index_topk) if kind is LayerKind.CSA else visible
        truth = attend(queries[i], near, entries[far], sink)
        output = mixed[i].double()
        rows.append(
            (
                torch.tensor([len(near), demanded, 0, 0]),
                count_rows(model, layer, position, len(entries) if has_entries else None, far, selected),
                (output - truth.output).norm(dim=1) / truth.output.norm(dim=1),
                torch.stack((truth.sink, truth.window, truth.entries), dim=1),
                output.norm(),
                (output - truth.alone).norm(),
            )
        )
    wanted, counted, error, masses, norm, moved = (torch.stack(column) for column in zip(*rows, strict=True))
    weight = entries.double().norm(dim=1).mean() / kv.double().norm(dim=1).mean() if has_entries else 0.0
    return Layer(
        layer, kind, torch.tensor(positions), wanted, counted, error, masses, norm, moved, weight=float(weight)
    )


def count_rows(
    model: Transformer, layer: int, position: int, entries: int | None, far: Tensor, selected: Tensor | None
) -> Tensor:
    """Count the rows that the run's `attend` reads for one token, by `KINDS`: [h, 4] int64.

    Its output is a mean of the rows it reads where all logits are equal. So it is given queries of zeros, rows that
    hold a 1 in the column of their kind, and a sink that weighs as much as all rows that it should read.

    Parameters
    ----------
    model, layer, position
        Whose op, and for which token of which layer.
    entries
        Compressed entries there are in all, later ones included; None in a layer without.
    far
        The entries that the token should read.
    selected
        [k], the selection that the run handed to the op, or None.

    """
    config, device = model.config, model.device
    window, heads, d = config.sliding_window, config.num_attention_heads, config.head_dim
    ring = torch.zeros(window + BEYOND, d)
    ring[:, 2] = 1
    near = torch.arange(max(0, position - window + 1), position + 1) % len(ring)
    ring[near] = torch.eye(d)[0]
    table = None
    if entries is not None:
        table = torch.zeros(entries, d)
        table[:, 3] = 1
        table[far] = torch.eye(d)[1]
    weight = len(near) + len(far)
    shares = (
        model.arithmetic.ops.attend(
            torch.zeros(1, heads, d, device=device),
            ring.to(device),
            position,
            window,
            None if table is None else table.to(device),
            config.ratio(layer),
            None if selected is None else selected[None].to(device),
            torch.full((heads,), math.log(weight), device=device),
        )[0, :, :4]
        .cpu()
        .double()
    )  # rows of a kind / (rows + weight)
    left = (1 - shares.sum(1, keepdim=True)).clamp(min=1e-9)  # the sink's share, weight / (rows + weight)
    return (shares * weight / left).round().long()


def looked_at(length: int, count: int, edges: Sequence[int]) -> list[int]:
    """About `count` positions below `length`, an odd number apart so that they take every residue, and the `edges`."""
    step = max(1, length // count) | 1
    near = {position for edge in edges for position in (edge - 1, edge, edge + 1) if 0 <= position < length}
    return sorted({*range(length - 1, -1, -step), *near})


def edges(config: ModelConfig) -> list[int]:
    """Positions at which a window is full and first entries are complete."""
    return [config.sliding_window, *(ratio - 1 for ratio in set(config.compress_ratios) if ratio)]
