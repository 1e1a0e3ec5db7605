"""The compressor's tail: tokens' values and gates in, entries of the windows that they close into the cache."""

import torch
from torch import Tensor

from fathom.kernels.formats import rows_reference as stored
from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP
from fathom.kernels.formats.stored import Rounding, Rows, TokenRing
from fathom.kernels.norm.reference import rms_norm
from fathom.kernels.quantise.reference import hadamard, simulate_fp4, simulate_fp8
from fathom.kernels.rope.reference import angles, rotate


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    """Pool each window by a softmax over its tokens, channel by channel.

    Equation: ``c[n, d] = sum_j softmax_j(gate[n, :, d]) kv[n, j, d]``; with overlap, j runs over the previous window's
    first series and this window's second (paper section 2.3.1: Ca and Cb), as one softmax over 2r tokens.

    Parameters
    ----------
    kv, gate
        [n, r, d] float32; `gate` holds the position bias already.
    previous_kv, previous_gate
        [n, r, d] float32, or None where there is no window before: windows do not overlap (HCA), or it is the first.
        A gate of -inf takes a token out.

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
    ring: TokenRing,
    first: int | Tensor,
    ratio: int,
    norm: Tensor,
    eps: float,
    freqs: Tensor,
    rounding: Rounding,
    rows: Rows,
    dtype: torch.dtype,
) -> Tensor:
    """Take t tokens, write the entries ``first // ratio .. (first + t) // ratio - 1``, and the tokens into `ring`.

    Equation: entry e pools, channel by channel, the tokens of its window, ``e ratio .. (e + 1) ratio - 1``; where
    windows overlap, their second series (own) and the first series (next) of the tokens of the window before
    (`pool`). It is rounded to `dtype`, normed, rotated as of position ``e ratio``, rounded as
    `rounding` says, and stored as row e. Source: DeepSeek `Compressor.forward`.

    Parameters
    ----------
    kv, gate
        [t, series * width] float32, of the tokens at positions ``first ..``; `gate` holds the position bias.
    ring
        Of the tokens before `first`, at least ``series * ratio - 1``; the rows of these t, or the last of them, are
        overwritten.
    first
        Position of the first token, or [] int64 on the device.
    ratio
        Tokens of a window.
    norm, eps
        [width] float32 and the eps of the norm.
    freqs
        [r / 2] float32, radians per position of the pairs in the last r columns.
    rounding
        "kv": E4M3 per 64 columns but for the last r; "index": Hadamard transform, then E2M1 per 32 columns; "row": E4M3
        with one scale for all columns; "none".
    rows
        The whole cache, [capacity, width]: a tensor, Fp8Entries, Fp8Keys or Fp4Keys.
    dtype
        Of the run, bfloat16 or float32: to it the pooled entry and what each step makes of it are rounded.

    Returns
    -------
    Tensor
        [n, width] in `dtype`, the entries that were stored.

    """
    first, (t, columns), width = int(first), kv.shape, norm.shape[0]
    series, begin, end = columns // width, first // ratio, (first + t) // ratio
    oldest = (begin - series + 1) * ratio  # of the tokens that entry `begin` pools; before position 0 there is none
    before = torch.arange(oldest, first, device=kv.device)
    row = before % ring.kv.shape[0]
    none = (before < 0)[:, None]
    known_kv = torch.cat((ring.kv[row].masked_fill(none, 0), kv))
    known_gate = torch.cat((ring.gate[row].masked_fill(none, -torch.inf), gate))
    last = torch.arange(t, device=kv.device)[-ring.kv.shape[0] :]
    for part, new in zip(ring, (kv, gate), strict=True):
        part[(first + last) % part.shape[0]] = new[last]
    if begin == end:
        return kv.new_empty(0, width, dtype=dtype)
    windows = (end - begin + series - 1, ratio)
    kvs, gates = (x[: windows[0] * ratio].unflatten(0, windows) for x in (known_kv, known_gate))
    own = kvs[series - 1 :, :, -width:], gates[series - 1 :, :, -width:]
    previous = (kvs[:-1, :, :width], gates[:-1, :, :width]) if series == 2 else (None, None)
    entries = rms_norm(pool(*own, *previous).to(dtype), norm, eps)
    positions = torch.arange(begin, end, device=kv.device) * ratio
    entries = _rounded(rotate(entries, *angles(positions, freqs)), rounding, 2 * freqs.shape[0])
    stored.write(rows, begin, entries)
    return entries


def _rounded(entries: Tensor, rounding: Rounding, rope: int) -> Tensor:
    match rounding:
        case "kv":
            nope = entries.shape[1] - rope
            return torch.cat((simulate_fp8(entries[:, :nope], KV_GROUP), entries[:, nope:]), dim=1)
        case "index":
            return simulate_fp4(hadamard(entries), INDEX_GROUP)
        case "row":
            return simulate_fp8(entries, entries.shape[1])
        case "none":
            return entries
