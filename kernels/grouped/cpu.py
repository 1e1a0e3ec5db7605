"""Causal GQA in tiles: memory does not grow with the context.

Tokens are taken a few at a time, and one at a time where a call has few. For these, positions arrive in tiles, from the
oldest on, and are folded into a running softmax (peak, total, accumulator, all fp32): no logits and no fp32 copies of
keys and values beyond one tile ever exist. A token's result depends on the tiles it fell into by rounding alone.
Positions that no token of a tile may see are not read, whatever they hold; NaN in any other reaches every token of the
tile, which may be more than saw it.
"""

import torch
from torch import Tensor

from fathom.kernels.softmax import Softmax

FEW = 8  # tokens up to which each has a tile of its own, and so the bits that it has alone: a draft and its rows
ROWS = 1024  # (token, query head) pairs per tile
LOGITS = 1 << 19  # numbers in a tile of logits: 2 MiB
KEYS = 1 << 19  # numbers in a tile of keys, and as many in one of values: 2 MiB each


def attend(q: Tensor, keys: Tensor, values: Tensor, first: int, window: int | None) -> Tensor:
    """Attend causally with grouped heads: `kernels.grouped.reference.attend`."""
    t, heads, _ = q.shape
    kv_heads = keys.shape[0]
    assert heads % kv_heads == 0, f"{heads} query heads for {kv_heads} heads of keys"
    assert keys.shape[1] >= first + t, f"{keys.shape[1]} rows do not hold positions up to {first + t - 1}"
    out = torch.empty_like(q)
    tokens = 1 if t <= FEW else max(1, ROWS // heads)
    for start in range(0, t, tokens):
        stop = min(start + tokens, t)
        out[start:stop] = _attend_tokens(q[start:stop], keys, values, first + start, window)
    return out


def attend_scratch(tokens: int, heads: int, kv_heads: int, d: int, context: int, item: int) -> int:
    """Bytes alive at most in `attend` to so many positions, the result included: queries and sums, and a tile."""
    rows = 1 if tokens <= FEW else min(tokens, max(1, ROWS // heads))
    queries, tile = rows * heads * d * 4, min(context, tile_length(rows, heads, kv_heads, d))
    widened = 0 if item == 4 else 2 * kv_heads * tile * d * 4
    return tokens * heads * d * item + 2 * queries + max(queries, widened + rows * tile * (heads * 4 + 3))


def tile_length(tokens: int, heads: int, kv_heads: int, d: int) -> int:
    """Positions per tile for so many tokens: few tokens take long tiles, for fewer calls."""
    return max(1, min(LOGITS // (tokens * heads), KEYS // (kv_heads * d)))


def _attend_tokens(q: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """Attend from the tokens of one tile, q [s, H, d], at positions ``start ..``; [s, H, d] float32.

    Rows of the softmax are s times H / K: the query heads that read a head of keys, and of each the tokens in turn.
    """
    tokens, heads, d = q.shape
    kv_heads, stop = keys.shape[0], start + tokens
    grouped = (q.float() * d**-0.5).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)  # [K, R, d]
    # The peak begins finite, so that no difference of peaks is inf - inf where a tile holds nothing that a token sees.
    peak = grouped.new_full(grouped.shape[:2], torch.finfo(torch.float32).min)
    state = Softmax(peak, torch.zeros_like(peak), (torch.zeros_like(grouped),))
    tile = tile_length(tokens, heads, kv_heads, d)
    # Two buffers for all tiles: MiBs that are freed after every tile go back to the kernel, which zeroes them anew.
    widened = 0 if keys.dtype == torch.float32 else kv_heads * min(tile, stop) * d
    scratch = [grouped.new_empty(widened) for _ in range(2)]
    position = torch.arange(start, stop, device=q.device)[:, None]  # [s, 1]
    for low in range(0 if window is None else max(0, start - window + 1), stop, tile):
        high = min(low + tile, stop)
        seen = None
        if high - 1 > start or (window is not None and low <= stop - 1 - window):
            key = torch.arange(low, high, device=q.device)
            seen = key <= position  # [s, m]
            if window is not None:
                seen &= key > position - window
        tiles = zip((keys[:, low:high], values[:, low:high]), scratch, strict=True)
        wide_keys, wide_values = (_wide(x, buffer) for x, buffer in tiles)
        _accumulate(state, grouped, wide_keys, wide_values, seen)
    mixed: Tensor = state.values[0].div_(state.total[..., None]).unflatten(1, (-1, tokens))  # [K, H / K, s, d]
    return mixed.permute(2, 0, 1, 3).flatten(1, 2)


def _wide(x: Tensor, scratch: Tensor) -> Tensor:
    """`x` in fp32: itself, or a copy in `scratch`."""
    return x if x.dtype == torch.float32 else scratch[: x.numel()].view(x.shape).copy_(x)


def _accumulate(state: Softmax, q: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None) -> None:
    """Fold a tile of keys and values [K, m, d] in; `seen` [s, m] says which token sees which, None: all do."""
    logits = torch.bmm(q, keys.mT)  # [K, R, m]
    if seen is not None:
        logits.unflatten(1, (-1, len(seen))).masked_fill_(~seen, float("-inf"))
    masses = state.fold(logits)
    state.values[0].baddbmm_(masses, values)
