"""Attending with a CoDA cache: the order of a step, that of a block as published, and a strict block.

What token P sees of the past, W being the window:

===========  ======================================================  ========================================
order        tokens themselves                                       banks
===========  ======================================================  ========================================
`step`       P - W + 1 .. P                                          hold what left the ring, P - W included
`prefill`    i-th token of a block, i from 0: P - W - i .. P         as before the block
strict       P - W + 1 .. P                                          as before the block: tokens P - W - i ..
                                                                     P - W are in neither
===========  ======================================================  ========================================

So after the first eviction the three are different functions, and what a published block sees depends on where blocks
begin: W + i + 1 tokens. A strict block has the window of a step whatever the block size, and pays with a gap of i + 1
tokens between window and banks. The banks' content depends on the blocks in both. While nothing has been evicted, all
three are full causal attention.

The query mechanism is apart from the cache: without `Differential` the same functions are ordinary softmax attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.differential.reference import Noise, Own, Past
from fathom.kernels.ops import CPU, Ops
from fathom.model.variants.coda import CodaCache


class Differential(NamedTuple):
    """The parameters of a layer's query mechanism, see `kernels.differential.reference`."""

    cos: Tensor  # [H, D / 2] float32, of theta
    sin: Tensor
    norm: Tensor | None  # [D] float32, weight of the head norm; None: identity
    eps: float


class Tokens(NamedTuple):
    """What a layer's projections give for t tokens; queries and keys with RoPE applied."""

    q: Tensor  # [t, H, D]
    k: Tensor  # [t, K, D]
    v: Tensor  # [t, K, D]
    gates: Tensor | None  # [t] float32, write gates; None: 1
    lam: Tensor | None  # [t, H], strength of the noise stream; None without one

    def part(self, rows: slice) -> "Tokens":
        """Return some of the tokens."""
        gates, lam = (None if part is None else part[rows] for part in (self.gates, self.lam))
        return Tokens(self.q[rows], self.k[rows], self.v[rows], gates, lam)


def step(cache: CodaCache, tokens: Tokens, differential: Differential | None, ops: Ops = CPU) -> Tensor:
    """Write one token, which may drive another into the banks, then attend: [1, H, D] in the dtype of the query."""
    cache.write(tokens.k, tokens.v, tokens.gates)
    return attend(cache, tokens.q, tokens.lam, differential, ops)


def attend(
    cache: CodaCache, q: Tensor, lam: Tensor | None, differential: Differential | None, ops: Ops = CPU
) -> Tensor:
    """Attend from q [t, H, D] to what the cache holds, and write nothing: [t, H, D]; zeros while it is empty."""
    return _attend(q, lam, differential, Past(*cache.view()), None, ops)


def prefill(
    cache: CodaCache,
    tokens: Tokens,
    differential: Differential | None,
    block: int,
    *,
    strict: bool = False,
    ops: Ops = CPU,
) -> Tensor:
    """Attend and write in blocks, each of which attends before it writes.

    Parameters
    ----------
    cache
        Advanced by t tokens.
    tokens
        Of t tokens.
    differential
        The query mechanism, or None for ordinary attention.
    block
        Tokens of a block; the last may have fewer.
    strict
        Each token sees exactly its last W tokens of ring and block, instead of the whole ring.
    ops
        What to compute with.

    Returns
    -------
    Tensor
        [t, H, D] in the dtype of the query.

    """
    assert block > 0, f"block {block}"
    out = torch.empty_like(tokens.q)
    for first in range(0, tokens.q.shape[0], block):
        rows = slice(first, first + block)
        out[rows] = _block(cache, tokens.part(rows), differential, ops, strict=strict)
    return out


def _block(cache: CodaCache, tokens: Tokens, differential: Differential | None, ops: Ops, *, strict: bool) -> Tensor:
    past = Past(*(cache.strict_view(tokens.q.shape[0]) if strict else cache.view()))
    own = Own(tokens.k, tokens.v, cache.settings.window if strict else None)
    out = _attend(tokens.q, tokens.lam, differential, past, own, ops)
    cache.write_block(tokens.k, tokens.v, tokens.gates)
    return out


def _attend(
    q: Tensor, lam: Tensor | None, differential: Differential | None, past: Past, own: Own | None, ops: Ops
) -> Tensor:
    assert (lam is None) == (differential is None), "lambda and the noise query come together"
    if lam is None or differential is None:
        return ops.attend_banks(q, None, past, own).to(q.dtype)
    rest = ops.attend_banks(q, Noise(lam, differential.cos, differential.sin), past, own)
    normed = rest if differential.norm is None else ops.rms_norm(rest, differential.norm, differential.eps)
    return normed.to(q.dtype)
