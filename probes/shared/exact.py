"""Ops in fp64, rounded once: a token's result does not depend on how many tokens shared its call.

In fp32 the last bit of a sum depends on its order, the order on the kernel, and the kernel on the shape: one token is a
matrix-vector product, two are a matrix product, and attention falls into tiles where the ring happens to wrap. So two
correct runs of one prompt that was cut differently differ in last bits, and nothing can be compared bit by bit. Of sums
in fp64 that are rounded once to bf16, another order changes one in 10^12 or so. What stays in fp32 is rounded less, so
matrix products are also taken in tiles of the same number of rows, for which the kernel is the same.

A probe replaces ops of the run by these and keeps the run's name: `Subject.load` then puts the fault around them.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.formats.reference import decode
from fathom.kernels.formats.rows_reference import decode as decode_rows
from fathom.kernels.formats.stored import Rows, Slots, Weight
from fathom.kernels.indexer.reference import best_places, of_blocks, opened, peaks
from fathom.kernels.ops import Ops
from fathom.kernels.quantise.reference import hadamard as reference_hadamard

TILE = 32  # rows per matrix product, and tokens per attention
LAMBDA = 6.0  # of a sum of independent errors: beyond it once in 10^7 and less (Hoeffding's inequality)


def exact_linears(ops: Ops) -> Ops:
    """`ops` with exact matrix products: no row of them depends on what else is in the batch."""

    @cache  # by identity of the tensors; a prompt in calls of one token decodes each weight hundreds of times
    def decoded(weight: Weight) -> Tensor:
        return decode(weight).double().T.contiguous()  # [in, out]

    def linear(x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
        return _product(x, decoded(weight)).to(torch.float32 if wide else x.dtype)

    def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
        parts = decoded(weight).chunk(groups, dim=1)
        return torch.stack([_product(x[:, g], part) for g, part in enumerate(parts)], dim=1).to(x.dtype)

    return ops._replace(linear=linear, grouped_linear=grouped_linear)


def exact(ops: Ops) -> Ops:
    """`ops` with all that sums made exact; rounding to FP8 and FP4 treats each number by itself."""
    return exact_linears(ops)._replace(
        rms_norm=rms_norm,
        rotate=rotate,
        hadamard=hadamard,
        pool=pool,
        select=select,
        open_blocks=open_blocks,
        select_open=select_open,
        attend=attend,
        hyper_weights=hyper_weights,
        head_weights=head_weights,
        collapse=lambda streams, pre: (pre.double()[..., None] * streams.double()).sum(1).to(streams.dtype),
        expand=expand,
        route=route,
        route_weights=route_weights,
        swiglu=swiglu,
    )


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """[t, in] times [in, out] float64, in tiles of `TILE` rows: [t, out] float64."""
    t = x.shape[0]
    padded = functional.pad(x.double(), (0, 0, 0, -t % TILE))
    return torch.cat([tile @ matrix for tile in padded.split(TILE)])[:t]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`kernels.norm.reference.rms_norm`."""
    wide = x.double()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight.double()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`kernels.rope.reference.rotate`; in fp32, rows that fill no vector of the processor are rounded once more."""
    half = cos.shape[-1]
    cos, sin = (part.double()[:, None] if x.ndim == 3 else part.double() for part in (cos, sin))
    a, b = x[..., -2 * half :].double().unflatten(-1, (half, 2)).unbind(-1)
    out = x.clone()
    out[..., -2 * half :] = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return out


def hadamard(x: Tensor) -> Tensor:
    """`kernels.quantise.reference.hadamard`."""
    signs = reference_hadamard(torch.eye(x.shape[-1], device=x.device)).sign().double()
    scale: float = x.shape[-1] ** -0.5
    return (_product(x.flatten(0, -2), signs) * scale).view(x.shape).to(x.dtype)


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    """`kernels.compress.reference.pool`."""
    if previous_kv is not None and previous_gate is not None:
        kv, gate = torch.cat((previous_kv, kv), dim=1), torch.cat((previous_gate, gate), dim=1)
    return (kv.double() * gate.double().softmax(dim=1)).sum(dim=1).float()


def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
    """`kernels.indexer.reference.select`."""
    (scores, seen), n = _scores(q, head_weights, keys, first, ratio), keys.shape[0]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, n)]
    best = torch.where(best < seen, best, n).sort(dim=-1).values
    return torch.where(best < n, best, -1).to(torch.int32)


def _scores(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Scores [t, n] rounded to fp32, so that equal ones are equal, -inf where not visible; entries that are [t, 1]."""
    per_head = (q.double() @ decode_rows(keys).double().T).relu()  # [t, h, n]
    scores = (head_weights.double()[:, None] @ per_head)[:, 0].float()
    seen = ((torch.arange(first, first + q.shape[0], device=q.device) + 1) // ratio)[:, None]
    return scores.masked_fill_(torch.arange(keys.shape[0], device=q.device) >= seen, float("-inf")), seen


def open_blocks(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, size: int, count: int) -> Tensor:
    """`kernels.indexer.reference.open_blocks`."""
    scores, seen = _scores(q, head_weights, keys, first, ratio)
    return opened(peaks(scores, size), seen, size, count)


def select_open(
    q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int, blocks: Tensor, size: int
) -> Tensor:
    """`kernels.indexer.reference.select_open`."""
    return best_places(of_blocks(_scores(q, head_weights, keys, first, ratio)[0], blocks, size), k)


def attend(
    q: Tensor,
    ring: Tensor,
    first: int,
    window: int,
    entries: Rows | Slots | None,
    ratio: int,
    selected: Tensor | None,
    sink: Tensor,
) -> Tensor:
    """`kernels.attention.reference.attend`, with every key that a token sees gathered for it."""
    out = torch.empty_like(q)
    for part, mass, total, rows in _seen(q, ring, first, window, entries, ratio, selected, sink):
        out[part] = (mass @ rows / total[..., None]).to(q.dtype)
    return out


def attend_off(unit: float, q: Tensor, *rest: Any) -> Tensor:
    """`shares_off` of `attend`'s output where masses are rounded: [t, h, d] float64."""
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    for part, mass, total, rows in _seen(q, *rest) if unit else ():
        out[part] = shares_off(unit, mass / total[..., None], rows)
    return out


def shares_off(unit: float, shares: Tensor, keys: Tensor) -> Tensor:
    """How far ``shares @ keys`` may be off where each share was rounded by itself, by up to `unit` of its size.

    The errors have either sign and are independent: their sum is within LAMBDA roots of the sum of the squares that
    they are bounded by (Hoeffding's inequality), and never beyond the sum of their sizes.
    """
    return unit * torch.minimum(LAMBDA * (shares.square() @ keys.square()).sqrt(), shares @ keys.abs())


def _seen(
    q: Tensor,
    ring: Tensor,
    first: int,
    window: int,
    entries: Rows | Slots | None,
    ratio: int,
    selected: Tensor | None,
    sink: Tensor,
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Of some tokens: masses of keys [t, h, m], all mass [t, h], and keys [t, m, d], in float64."""
    capacity = ring.shape[0]
    slots = Slots(entries, None, 0) if entries is not None and not isinstance(entries, Slots) else entries
    keys = ring if slots is None else torch.cat((ring, decode_rows(slots.rows)))
    bias = torch.zeros(keys.shape[0], dtype=torch.float64, device=q.device)
    if slots is not None and slots.bias is not None:
        bias[capacity:] = slots.bias
    for start in range(0, q.shape[0], TILE):
        part = q[start : start + TILE].double()
        position = torch.arange(first + start, first + start + part.shape[0], device=q.device)[:, None]
        near = position - torch.arange(window - 1, -1, -1, device=q.device)  # [t, window] positions
        index = torch.where(near >= 0, near % capacity, -1)
        if slots is not None:
            far = torch.arange(slots.shape[0], device=q.device).expand(part.shape[0], -1)
            far = far if selected is None else selected[start : start + TILE].long()
            visible = (far >= 0) & (far < slots.shape[0]) & (far < (position + 1) // ratio - slots.hidden)
            index = torch.cat((index, torch.where(visible, capacity + far, -1)), dim=1)
        unseen = (index < 0)[:, None]  # [t, 1, m]
        index = torch.where(index < 0, position % capacity, index)  # something finite to read: the token's own KV
        rows = keys[index].double()  # [t, m, d]
        logits = part @ rows.mT * q.shape[-1] ** -0.5 + bias[index][:, None]  # [t, h, m]
        logits.masked_fill_(unseen, float("-inf"))
        highest = sink.double().clamp(max=torch.finfo(torch.float32).max)
        peak = torch.maximum(logits.amax(-1), highest)
        mass = (logits - peak[..., None]).exp()
        total = mass.sum(-1) + (sink.double() - peak).exp()
        yield slice(start, start + TILE), mass, total, rows


def _mixes(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(1).double()
    return _product(flat, fn.double().T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def hyper_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.hyper.reference.hyper_weights`."""
    s = streams.shape[1]
    mixes = _mixes(streams, fn, norm_eps)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(mixes[:, :s] * scale[0] + base[:s]) + eps
    post = 2 * torch.sigmoid(mixes[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (mixes[:, 2 * s :] * scale[2] + base[2 * s :]).unflatten(-1, (s, s)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre.float(), post.float(), comb.float()


def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """`kernels.hyper.reference.head_weights`."""
    return (torch.sigmoid(_mixes(streams, fn, norm_eps) * scale.double() + base.double()) + eps).float()


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`kernels.hyper.reference.expand`."""
    new = post.double()[..., None] * y.double()[:, None]
    return (new + comb.double().mT @ streams.double()).to(streams.dtype)


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """`kernels.gate.reference.route`."""
    biased = functional.softplus(logits.double()).sqrt() + bias.double()
    ids = biased.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids, route_weights(logits, ids, scale)


def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """`kernels.gate.reference.route_weights`."""
    chosen = functional.softplus(logits.double()).sqrt().gather(1, ids)
    return (scale * chosen / chosen.sum(-1, keepdim=True)).float()


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """`kernels.swiglu.reference.swiglu`."""
    out = functional.silu(gate.double().clamp(max=limit)) * up.double().clamp(-limit, limit)
    return (out if weight is None else out * weight.double()[:, None]).to(gate.dtype)
