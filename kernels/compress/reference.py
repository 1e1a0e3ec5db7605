"""The compressor's tail: tokens' values and gates in, entries of the windows that they close into the cache."""

import torch
from torch import Tensor

from kernels.formats import rows_reference as stored
from kernels.formats.groups import INDEX_GROUP, KV_GROUP
from kernels.formats.stored import Rounding, Rows, Window
from kernels.norm.reference import rms_norm
from kernels.quantise.reference import hadamard, simulate_fp4, simulate_fp8
from kernels.rope.reference import angles, rotate


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    """Pool each window by a softmax over its tokens, channel by channel.

    Equation: ``c[n, d] = sum_j softmax_j(gate[n, :, d]) kv[n, j, d]``; with overlap, j runs over the previous window's
    first series and this window's second (paper section 2.3.1: Ca and Cb), as one softmax over 2r tokens.

    Parameters
    ----------
    kv, gate
        [n, r, d] float32; `gate` holds the position bias already.
    previous_kv, previous_gate
        [n, r, d] float32, or None where windows do not overlap (HCA). A gate of -inf takes a token out: the first
        window has no predecessor.

    Returns
    -------
    Tensor
        [n, d] float32.

    """
    assert kv.dtype == torch.float32, f"kv: {kv.dtype}, want float32"
    if previous_kv is not None and previous_gate is not None:
        kv = torch.cat((previous_kv, kv), dim=1)  # [n, 2r, d]
        gate = torch.cat((previous_gate, gate), dim=1)
    return (kv * gate.softmax(dim=1)).sum(dim=1)


def pool_scratch(tokens: int, width: int, series: int) -> int:
    """Bytes alive at most in `pool` of the windows of so many tokens, the result aside: series joined, and products."""
    return tokens * width * 4 * (8 if series == 2 else 2)


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
    (`pool`). It is rounded to `dtype`, normed, rotated as of position ``e ratio``, rounded as
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
