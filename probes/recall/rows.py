"""What the indexer of a run let through, compared with the oracles, by layer and context length."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats.rows import read
from kernels.quantise.reference import simulate_fp4
from model.cache.layers import CsaCache
from model.config import LayerKind, ModelConfig
from model.observe import sites
from model.state import State
from probes.recall.drawn import narrow_selection
from probes.recall.oracle import Comparison, compare, correlations, exact_scores, hadamard_matrix, rounding_error
from probes.shared.recorder import Recorder

SITES = (
    sites.INDEX_QUERY,
    sites.INDEX_QUERY_USED,
    sites.INDEX_KEY,
    sites.INDEX_KEY_USED,
    sites.INDEX_WEIGHTS,
    sites.SELECTED,
)

TINY = torch.finfo(torch.float64).tiny


class Layer(NamedTuple):
    """What one CSA layer let through."""

    layer: int
    ratio: int
    positions: Tensor  # [t] of the tokens that were kept
    q: Tensor  # [t, h, d], before rounding
    q_used: Tensor  # [t, h, d]
    head_weights: Tensor  # [t, h]
    selected: Tensor  # [t, k]
    keys: Tensor  # [n, d], before rounding
    keys_used: Tensor  # [n, d]
    cached: Tensor  # [n, d], what the cache held in the end


class Group(NamedTuple):
    """The tokens of one layer before one context length that see more than top-k entries, and how they chose."""

    layer: int
    length: int
    positions: Tensor  # [t]
    residues: Tensor  # [t] of the context (the token included) modulo the ratio
    visible: Tensor  # [t]
    a: Comparison  # against the exact scores of what was scored
    narrow: Comparison  # as `a`, had the scores been rounded to BF16 before the selection
    b: Comparison  # against the exact scores of unrounded queries and keys
    correlation: Tensor  # [t] of these two scores
    level: Tensor  # [t] bool: the best and the k-th score are equal
    not_finite: int  # scores


class Sides(NamedTuple):
    """Where oracle B's loss comes from, in one layer at its longest context."""

    layer: int
    length: int
    off: tuple[float, float]  # distance of queries and keys as scored from the rotated unrounded ones, relative
    common: tuple[float, float]  # share of their squared norm that is their mean's (queries: each head's own)
    recall: tuple[
        float, float, float, float
    ]  # oracle B with queries alone rounded, keys alone, both, keys about a mean


def csa_layers(config: ModelConfig) -> list[int]:
    """The layers with an indexer."""
    return [layer for layer in range(config.num_hidden_layers) if config.layer_kind(layer) is LayerKind.CSA]


def recorded(layer: int, config: ModelConfig, positions: list[int], recorder: Recorder, state: State) -> Layer:
    """Collect what `recorder` heard of `SITES` in one layer."""
    cache = state.layers[layer]
    assert isinstance(cache, CsaCache), f"CSA layer {layer} has a {type(cache).__name__}"
    q, q_used, keys, keys_used, head_weights, selected = (recorder.rows(site, layer) for site in SITES)
    held = cache.keys.view()
    stored = held.cpu() if isinstance(held, Tensor) else read(held, 0, held.shape[0]).to(keys_used.dtype).cpu()
    ratio = config.ratio(layer)
    return Layer(layer, ratio, torch.tensor(positions), q, q_used, head_weights, selected, keys, keys_used, stored)


def groups(at: Layer, lengths: tuple[int, ...], rows: int, k: int) -> Iterator[Group]:
    """Compare the `rows` tokens before each length; lengths at which none sees more than k entries are left out."""
    for length in lengths:
        visible = (at.positions + 1) // at.ratio
        rest = (at.positions >= length - rows) & (at.positions < length) & (visible > k)
        if not rest.any():
            continue
        visible, n = visible[rest], length // at.ratio
        q, head_weights, keys = at.q_used[rest], at.head_weights[rest], at.keys_used[:n]
        scores = exact_scores(q, head_weights, keys)
        truth = exact_scores(at.q[rest], head_weights, at.keys[:n])
        hidden = torch.arange(n) >= visible[:, None]
        best = scores.masked_fill(hidden, -torch.inf).topk(k).values
        chosen = at.selected[rest]
        rounded = narrow_selection(scores.masked_fill(hidden, -torch.inf), k)
        yield Group(
            at.layer,
            length,
            at.positions[rest],
            (at.positions[rest] + 1) % at.ratio,
            visible,
            a=compare(chosen, scores, visible, k, rounding_error(q, head_weights, keys)),
            narrow=compare(rounded, scores, visible, k),
            b=compare(chosen, truth, visible, k),
            correlation=correlations(scores, truth, visible),
            level=best[:, 0] == best[:, -1],
            not_finite=int((~torch.isfinite(scores) & ~hidden).sum()),
        )


def keys_changed(at: Layer) -> int:
    """Keys that the cache does not hold bit for bit as they were handed to it, missing ones included."""
    held, given = at.cached, at.keys_used
    if held.shape != given.shape or held.dtype != given.dtype:
        return len(given)
    return int((held.view(torch.uint8) != given.view(torch.uint8)).any(1).sum())


def sides(at: Layer, group: Group, k: int) -> Sides:
    """Take the loss of oracle B at `group` apart; only where queries and keys are rotated and rounded."""
    rotation = hadamard_matrix(at.keys.shape[1])
    rest = torch.isin(at.positions, group.positions)
    n = group.length // at.ratio
    q, q_used, head_weights = at.q[rest].double(), at.q_used[rest].double(), at.head_weights[rest]
    keys, keys_used = at.keys[:n].double(), at.keys_used[:n].double()
    truth = exact_scores(q, head_weights, keys)
    turned = keys @ rotation
    mean = turned.mean(0)

    def recall(queries: Tensor, entries: Tensor) -> float:
        scores = exact_scores(queries, head_weights, entries)
        scores.masked_fill_(torch.arange(n) >= group.visible[:, None], -torch.inf)
        return compare(scores.topk(k).indices, truth, group.visible, k).recall.mean().item()

    return Sides(
        at.layer,
        group.length,
        (off_rotation(q, q_used), off_rotation(keys, keys_used)),
        (_common(q), _common(keys)),
        (
            recall(q_used, turned),
            recall(q @ rotation, keys_used),
            group.b.recall.mean().item(),
            recall(q_used, simulate_fp4((turned - mean).float()).double() + mean),
        ),
    )


def off_rotation(rows: Tensor, used: Tensor) -> float:
    """Distance of `used` [..., d] from the Hadamard rotation of `rows`, relative to their norm."""
    rotated = rows.double() @ hadamard_matrix(rows.shape[-1])
    return float((used.double() - rotated).norm() / rotated.norm().clamp(min=TINY))


def _common(rows: Tensor) -> float:
    """Share of the squared norm of rows [n, ..., d] that is that of their mean over n."""
    return float(rows.mean(0).square().sum() / rows.square().mean(0).sum().clamp(min=TINY))
