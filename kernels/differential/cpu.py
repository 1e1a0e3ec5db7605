"""Differential attention to a bounded cache: signal and noise as rows of one product, and one sum of values for both.

``(A_s - lambda A_n) V`` instead of ``A_s V - lambda (A_n V)``: three products instead of four. That takes the softmax
of a row as a whole, so that a tile holds all the slots that its tokens see; what bounds it is how many tokens it has,
and slots are bounded by the cache. Everything is computed in fp32; the equations are
`kernels.differential.reference`'s.

A block's own keys are attended to causally: a tile of tokens multiplies the keys up to its last token, and masks the
triangle at the end. For inference: scratch is written in place, and torch refuses tensors that require a gradient.
"""

import torch
from torch import Tensor

from fathom.kernels.differential.reference import Noise, Own, Past
from fathom.kernels.norm.reference import rms_norm

FEW = 16  # tokens up to which slots that none of them sees are masked, and above which they are left out
LOGITS = 1 << 18  # numbers in a tile of logits: 1 MiB


def differential_attend(
    q: Tensor, noise: Noise, norm: Tensor | None, eps: float, past: Past, own: Own | None
) -> Tensor:
    """Attend and norm what remains: `kernels.differential.reference.differential_attend`, [t, H, D] as `q`."""
    out = attend(q, noise, past, own)
    return (out if norm is None else rms_norm(out, norm, eps)).to(q.dtype)


def attend(q: Tensor, noise: Noise | None, past: Past, own: Own | None) -> Tensor:
    """Attend with grouped queries: ``A(q) - lambda A(R(theta) q)``, or ``A(q)`` alone.

    Parameters
    ----------
    q
        [t, H, D], RoPE applied, H a multiple of K.
    noise
        None for ordinary attention.
    past, own
        What the tokens see.

    Returns
    -------
    Tensor
        [t, H, D] float32; zeros where there is nothing to see at all.

    """
    t, heads, d = q.shape
    kv_heads = past.keys.shape[0]
    assert heads % kv_heads == 0, f"{heads} query heads do not divide among {kv_heads} KV heads"
    keys, values, seen = _rows_seen(past) if t > FEW else past
    slots = keys.shape[1]
    if own is not None:
        keys = torch.cat((keys, own.keys.transpose(0, 1).to(keys.dtype)), dim=1)
        values = torch.cat((values, own.values.transpose(0, 1).to(values.dtype)), dim=1)
    if t == 0 or keys.shape[1] == 0:
        return q.new_zeros(q.shape, dtype=torch.float32)
    keys, values = keys.float().mT, values.float()  # [K, D, s], [K, s, D]
    rows, lam = _streams(q, noise, kv_heads), None  # [K, n, H / K, t, D]
    if noise is not None:
        lam = noise.lam.float().T.reshape(kv_heads, -1, t, 1)  # [K, H / K, t, 1]
    if own is None and (seen is None or seen.ndim == 1) and rows.numel() // d * slots <= LOGITS:
        return _attend_few(rows, lam, keys, values, seen).permute(2, 0, 1, 3).reshape(t, heads, d)
    per_token = rows.numel() // (kv_heads * t * d) * values.shape[1]  # logits of a token and a KV head
    tile = max(1, min(t, LOGITS // per_token))
    beside = max(1, min(kv_heads, LOGITS // (per_token * tile)))  # KV heads in one product
    scratch = [q.new_empty(beside * tile * per_token, dtype=torch.float32) for _ in range(2)]
    out = q.new_empty(t, kv_heads, heads // kv_heads, d, dtype=torch.float32)
    for start in range(0, t, tile):
        tokens, width = slice(start, min(start + tile, t)), slots if own is None else slots + min(start + tile, t)
        for low in range(0, kv_heads, beside):
            kv_range = slice(low, low + beside)
            part = rows[kv_range, :, :, tokens]
            strength = None if lam is None else lam[kv_range, :, tokens].flatten(1, 2)
            size, shape = part.numel() // d * width, (part.shape[0], -1, width)
            scores = torch.bmm(part.flatten(1, 3), keys[kv_range, :, :width], out=scratch[0][:size].view(shape))
            _hide(scores.view(part.shape[0], -1, part.shape[3], width), tokens, slots, seen, own)
            mass = torch.softmax(scores, -1, out=scratch[1][:size].view(shape))
            summed = torch.bmm(_mixed(mass, strength), values[kv_range, :width])
            out[tokens, kv_range] = summed.view(part.shape[0], -1, *part.shape[3:]).permute(2, 0, 1, 3)
    return out.view(t, heads, d)


def attend_scratch(tokens: int, heads: int, kv_heads: int, d: int, slots: int, own: int, item: int) -> int:
    """Bytes alive at most in `attend`, the result included: all keys and values in fp32, and two tiles of logits.

    `slots` are the past's, `own` how many keys the tokens have themselves; `item` is of the keys as they are stored.
    """
    queries, per_token = tokens * heads * d * 4, heads // kv_heads * (slots + own)  # logits of a token and a KV head
    rows = 2 * kv_heads * (slots + own) * d * ((item if own else 0) + (0 if item == 4 else 4))
    return 4 * queries + rows + 2 * max(per_token, min(LOGITS, kv_heads * tokens * per_token)) * 4 + own**2


def _attend_few(rows: Tensor, lam: Tensor | None, keys: Tensor, values: Tensor, seen: Tensor | None) -> Tensor:
    """`attend` in one tile, from tokens that have no keys of their own: [K, H / K, t, D] float32."""
    kv_heads, _, group, t, d = rows.shape
    logits = torch.bmm(rows.view(kv_heads, -1, d), keys)  # [K, n H / K t, s]
    if seen is not None:
        logits.masked_fill_(~seen, -torch.inf)
    mass = _mixed(torch.softmax(logits, -1), None if lam is None else lam.flatten(1, 2))
    return torch.bmm(mass, values).view(kv_heads, group, t, d)


def _mixed(mass: Tensor, lam: Tensor | None) -> Tensor:
    """Signal less lambda noise, [k, r, s] of `mass` [k, 2 r, s], which is written over; or `mass`, without a lambda."""
    if lam is None:
        return mass
    signal, noise = mass.unflatten(1, (2, -1)).unbind(1)
    return torch.addcmul(signal, noise, lam, value=-1, out=signal)


def _rows_seen(past: Past) -> Past:
    """`past` with only those slots that some token sees."""
    keys, values, seen = past
    if seen is None or seen.ndim == 2:
        return past
    index = seen.nonzero()[:, 0]
    return Past(keys.index_select(1, index), values.index_select(1, index), None)


def _streams(q: Tensor, noise: Noise | None, kv_heads: int) -> Tensor:
    """Queries and noise queries scaled by D^-0.5, by the KV head they read: [K, n, H / K, t, D] float32."""
    t, heads, d = q.shape
    streams = 1 if noise is None else 2
    scale: float = d**-0.5
    out = q.new_empty(kv_heads, streams, heads // kv_heads, t, d, dtype=torch.float32)
    by_head = q.reshape(t, kv_heads, -1, d).permute(1, 2, 0, 3)  # [K, H / K, t, D]
    torch.mul(by_head.float(), scale, out=out[:, 0])  # in fp32: with `out`, torch multiplies in the dtype of its input
    if noise is not None:
        signal, turned = torch.view_as_complex(out.view(*out.shape[:-1], d // 2, 2)).unbind(1)
        turn = torch.complex(noise.cos, noise.sin).view(kv_heads, -1, 1, d // 2)  # [K, H / K, 1, D / 2]
        torch.mul(signal, turn, out=turned)
    return out


def _hide(logits: Tensor, tokens: slice, slots: int, seen: Tensor | None, own: Own | None) -> None:
    """Hide from `tokens` what they do not see: of the slots, and of their own keys; logits are [.., tokens, keys]."""
    if seen is not None:
        logits[..., :slots].masked_fill_(~(seen if seen.ndim == 1 else seen[tokens]), -torch.inf)
    if own is None:
        return
    n = tokens.stop - tokens.start
    later = torch.ones(n, n, dtype=torch.bool, device=logits.device).triu_(1)
    logits[..., slots + tokens.start :].masked_fill_(later, -torch.inf)
    if own.window is not None:
        token = torch.arange(tokens.start, tokens.stop, device=logits.device)[:, None]
        key = torch.arange(tokens.stop, device=logits.device)
        logits[..., slots:].masked_fill_(key <= token - own.window, -torch.inf)
