"""Entries of V4's layers in a basis (`shard:basis=`): attended to with their mean, and stored alike however they come.

Entries are drawn around a mean as large as what varies, a basis is fitted to some of them as `runtime.basis` fits one
to a text's, and others go into the caches that a model with this basis has. What is stored is decoded by the equation
and attended to in float64.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels.formats import basis_fit
from kernels.formats.rows_reference import decode
from kernels.formats.stored import BasisRows
from model.cache.layers import AnyEntries
from model.config import LayerKind, ModelConfig
from model.state import State
from model.transformer import Transformer
from model.variants.choice import Basis, Full, Shard
from probes.finding import Finding, at_most, judged
from probes.variants.banks import WINDOW, attended, caches, fed
from probes.variants.grouped import CUTS, differing

FITTED = 600  # entries to which a basis is fitted: none of those that are stored
SHARED = 100_000  # entries of a context that share a basis
BITS = 6  # as many as a rotated entry has
DECAY = 1.03  # of deviations, from one direction to the next
SINKS = (-2.0, 6.0, 30.0)  # which take a little, most and nearly all of the mass: weights of entries sum to less
SUM = at_most(2e-5)  # fp32 sums of coefficients against float64, over the RMS of the output


def left_out(config: ModelConfig) -> str | None:
    """Why rows of the model's widths have no basis, None where they have one."""
    rope = config.qk_rope_head_dim
    nope = config.head_dim - rope
    if rope & (rope - 1) == 0 and rope >= 8 and basis_fit.group_of(nope):
        return None
    return f"Entries in a basis: {nope} columns and {rope} that carry a position cannot be divided."


def drawn(count: int, width: int, seed: int) -> Tensor:
    """Rows [count, width] around a mean of N(0, 1), with directions along which they vary more than along others."""
    g = torch.Generator().manual_seed(seed)
    mix, _ = torch.linalg.qr(torch.randn(width, width, generator=g))
    mean, x = torch.randn(width, generator=g), torch.randn(count, width, generator=g)
    deviation = DECAY ** -torch.arange(width, dtype=torch.float32)
    out: Tensor = mean + (x * deviation * (width / deviation.square().sum()).sqrt()) @ mix.mT
    return out


def fitted(config: ModelConfig, x: Tensor) -> Shard:
    """The variant with a basis fitted to rows x [n, head_dim]."""
    nobody = basis_fit.Sample(x, x.new_zeros(0, 1, x.shape[1]), torch.ones(0, len(x), dtype=torch.bool))
    found = basis_fit.fit(nobody, config.qk_rope_head_dim, BITS, SHARED)
    assert found.fit is not None, f"no basis for {len(x)} rows of {x.shape[1]}"
    return Shard(basis=Basis("drawn", found.fit, found.rope_bits))


def state(model: Transformer, shard: Shard, count: int) -> State:
    """A state of the model as it is with this variant on every layer that has entries."""
    kinds, ratio = model.config.layer_kinds, max(model.config.compress_ratios)
    variants = tuple(Full() if kind is LayerKind.SWA else shard for kind in kinds)
    formats = model.arithmetic.formats._replace(variants=variants)
    return State(model.config, ratio * count, ratio * min(count, max(CUTS)), formats, model.device)


def measure(model: Transformer, count: int, cuts: Sequence[int], seed: int) -> Iterator[Finding]:
    """Attention with sinks of every size, and what is stored of rows that come so many at a time."""
    config = model.config
    rows = drawn(FITTED + count, config.head_dim, seed)
    shard, given = fitted(config, rows[:FITTED]), rows[FITTED:]
    kept: dict[int, dict[int, dict[str, Tensor]]] = {}
    for cut in cuts:
        for layer, cache in caches(state(model, shard, count)):
            fed(cache.entries, given.to(model.device), cut)
            kept.setdefault(layer, {})[cut] = cache.entries.tensors(count * cache.entries.ratio)
            if cut == cuts[-1]:
                yield _attention(model, cache.entries, seed, layer)
    for layer, tensors in kept.items():
        what = f"V4, shard in a basis, rows in turns of {', '.join(map(str, cuts))}: stored tensors that differ"
        yield differing(what, tensors, layer)


def _attention(model: Transformer, entries: AnyEntries, seed: int, layer: int) -> Finding:
    data, heads = entries.view(), model.config.num_attention_heads
    assert isinstance(data, BasisRows), f"layer {layer}: {type(data).__name__}"
    g, (count, width) = torch.Generator().manual_seed(seed + 1), data.shape
    q, ring = 2 * torch.randn(1, heads, width, generator=g), torch.randn(WINDOW, width, generator=g)
    keys = torch.cat((ring.double(), decode(data).cpu().double()))
    logits = q[0].double() @ keys.mT * width**-0.5
    worst, mass = (-1.0, 0.0), {}
    for sink in SINKS:
        sinks = torch.full((heads,), sink)
        weights = torch.cat((logits, sinks[:, None].double()), 1).softmax(1)[:, :-1]
        wanted = weights @ keys
        out = attended(model, entries, q, ring, sinks, entries.ratio * count - 1)
        error = float((out.double() - wanted).abs().max() / wanted.square().mean().sqrt())
        mass[f"{sink:g}"] = float(weights[:, WINDOW:].sum(1).mean())
        if not error <= worst[0]:  # NaN is worst
            worst = error, sink
    what = (
        f"V4, shard in a basis, {count} entries with a mean, sinks to {SINKS[-1]:g}: attention, largest error over RMS"
    )
    return judged(what, worst[0], SUM, layer=layer, sink=worst[1], mass_of_entries=mass)
