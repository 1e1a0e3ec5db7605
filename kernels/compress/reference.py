"""The compressor's tail: tokens' values and gates in, entries of the windows that they close into the cache."""

import torch
from torch import Tensor

from kernels.compress.pool import pool
from kernels.formats import rows_reference as stored
from kernels.formats.stored import Rounding, Rows, Window
from kernels.norm.reference import rms_norm
from kernels.quantise.reference import hadamard, simulate_fp4, simulate_fp8
from kernels.rope.reference import angles, rotate

KV_GROUP = 64  # columns of an entry that share a scale
INDEX_GROUP = 32  # columns of an index key that share one


def compress(  # noqa: PLR0913, PLR0917 (the tail of a layer: five ops, the state and the cache)
    kv: Tensor,
    gate: Tensor,
    window: Window,
    first: int | Tensor,
    norm: Tensor,
    eps: float,
    freqs: Tensor,
    rounding: Rounding,
    rows: Rows,
    dtype: torch.dtype,
) -> Tensor:
    """Take t tokens, write the entries ``first // ratio .. (first + t) // ratio - 1`` and keep the rest in `window`.

    Equation: entry e pools, channel by channel, the tokens of its window, ``e ratio .. (e + 1) ratio - 1``; where
    windows overlap, their second series (own) and the first series (next) of the tokens of the window before
    (`kernels.compress.pool`). It is rounded to `dtype`, normed, rotated as of position ``e ratio``, rounded as
    `rounding` says, and stored as row e. Source: DeepSeek `Compressor.forward`.

    Parameters
    ----------
    kv, gate
        [t, series * width] float32, of the tokens at positions ``first ..``; `gate` holds the position bias.
    window
        The state after the tokens before `first`; overwritten.
    first
        Position of the first token, or [] int64 on the device.
    norm, eps
        [width] float32 and the eps of the norm.
    freqs
        [r / 2] float32, radians per position of the pairs in the last r columns.
    rounding
        "kv": E4M3 per 64 columns but for the last r; "index": Hadamard transform, then E2M1 per 32 columns; "none".
    rows
        The whole cache, [capacity, width]: a tensor, Fp8Entries, Fp8Keys or Fp4Keys.
    dtype
        Of the run, bfloat16 or float32: to it the pooled entry and what each step makes of it are rounded.

    Returns
    -------
    Tensor
        [n, width] in `dtype`, the entries that were stored.

    """
    first = int(first)
    ratio, width = window.kv.shape[0], norm.shape[0]
    start = first // ratio * ratio  # of the open window
    count = (first + kv.shape[0]) // ratio - first // ratio
    kept = slice(0, first - start)
    kv, gate = torch.cat((window.kv[kept], kv)), torch.cat((window.gate[kept], gate))
    closed = count * ratio
    if count:
        kvs, gates = (x[:closed].unflatten(0, (count, ratio)) for x in (kv, gate))
        before: tuple[Tensor | None, Tensor | None] = (None, None)
        if len(window.previous_kv) > 0:
            series = zip((kvs, gates), (window.previous_kv, window.previous_gate), strict=True)
            before_kv, before_gate = (torch.cat((last[None], x[:-1, :, :width])) for x, last in series)
            before = before_kv, before_gate
            window.previous_kv.copy_(kvs[-1, :, :width])
            window.previous_gate.copy_(gates[-1, :, :width])
        entries = rms_norm(pool(kvs[..., -width:], gates[..., -width:], *before).to(dtype), norm, eps)
        positions = torch.arange(start, start + closed, ratio, device=kv.device)
        entries = rotate(entries, *angles(positions, freqs))
        entries = _rounded(entries, rounding, 2 * freqs.shape[0])
        stored.write(rows, start // ratio, entries)
        kept = slice(0, 0)
    else:
        entries = kv.new_empty(0, width, dtype=dtype)
    window.kv[kept.stop : len(kv) - closed] = kv[closed:][kept.stop :]
    window.gate[kept.stop : len(kv) - closed] = gate[closed:][kept.stop :]
    return entries


def _rounded(entries: Tensor, rounding: Rounding, rope: int) -> Tensor:
    match rounding:
        case "kv":
            nope = entries.shape[1] - rope
            return torch.cat((simulate_fp8(entries[:, :nope], KV_GROUP), entries[:, nope:]), dim=1)
        case "index":
            return simulate_fp4(hadamard(entries), INDEX_GROUP)
        case "none":
            return entries
