"""The compressor's tail: tokens' values and gates in, entries of the windows that they close into the cache.

A window is `ratio` tokens. Where windows do not overlap (HCA), a token brings one series of `width` channels. Where
they do (CSA), it brings two side by side, [next | own] (paper section 2.3.1: Ca and Cb): an entry pools the second
series of its own window with the first series of the window before. The first window has none before it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats import ring_reference, rows_reference
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


def windows(
    kv: Tensor, gate: Tensor, ring: TokenRing, first: int, ratio: int, width: int, pool: Callable[..., Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Take t tokens into `ring`, and pool the windows that they close.

    Parameters
    ----------
    kv, gate
        [t, series * width] float32, of the tokens at positions ``first ..``; `gate` holds the position bias.
    ring
        Of the tokens before `first`: whole windows, at least as many as there are series.
    first, ratio, width
        Position of the first token, tokens of a window, channels of an entry.
    pool
        `Ops.pool`.

    Yields
    ------
    tuple[int, Tensor]
        An entry, and the pooled windows from its own on, [n, width] float32; in order, each once.

    """
    t, entry = kv.shape[0], first // ratio

    def keep(begin: int, end: int) -> None:
        for part, new in zip(ring, (kv, gate), strict=True):
            ring_reference.write(part, first + begin, new[begin:end])

    def before(entry: int) -> Window | None:
        return _window(ring, entry - 1, ratio) if entry else None

    head = min(-first % ratio, t)  # tokens of the window that is open
    if head:
        keep(0, head)
        if (first + head) % ratio == 0:
            yield entry, _pooled(*_window(ring, entry, ratio), before(entry), width, pool)
            entry += 1
    whole = (t - head) // ratio
    if whole:
        own_kv, own_gate = (part[head : head + whole * ratio].unflatten(0, (whole, ratio)) for part in (kv, gate))
        yield entry, _pooled(own_kv, own_gate, before(entry), width, pool)
    if head < t:
        keep(head, t)


Window = tuple[Tensor, Tensor]  # values and gates of the tokens of one, [1, ratio, series * width] each


def _window(ring: TokenRing, entry: int, ratio: int) -> Window:
    """Views of the window of an entry, which lies in one piece."""
    start = entry * ratio % ring.kv.shape[0]
    return ring.kv[None, start : start + ratio], ring.gate[None, start : start + ratio]


def _pooled(kv: Tensor, gate: Tensor, before: Window | None, width: int, pool: Callable[..., Tensor]) -> Tensor:
    """Pool windows [n, ratio, series * width] that follow each other, and the one before them, into [n, width]."""
    own_kv, own_gate = kv[..., -width:], gate[..., -width:]
    if kv.shape[2] == width:  # they do not overlap
        return pool(own_kv, own_gate, None, None)
    first = (None, None) if before is None else (part[..., :width] for part in before)
    pooled = torch.empty(kv.shape[0], width, dtype=torch.float32, device=kv.device)
    pooled[:1] = pool(own_kv[:1], own_gate[:1], *first)
    if kv.shape[0] > 1:
        pooled[1:] = pool(own_kv[1:], own_gate[1:], kv[:-1, :, :width], gate[:-1, :, :width])
    return pooled


Finish = Callable[[int, Tensor], None]  # is given what `windows` yields


class Tail(NamedTuple):
    """What becomes of a pooled window, see `compress_at_once`."""

    norm: Tensor  # [width] float32
    eps: float  # of the norm
    freqs: Tensor  # [r / 2] float32
    rounding: Rounding
    rows: Rows  # the whole cache
    dtype: torch.dtype  # of the run


@dataclass(frozen=True, slots=True)
class Compress:
    """Take t tokens, and write the entries of the windows that they close. Of an op set's own parts."""

    pool: Callable[..., Tensor]
    compress_at_once: Callable[..., Tensor]

    def __call__(
        self,
        kv: Tensor,
        gate: Tensor,
        ring: TokenRing,
        first: int | Tensor,
        ratio: int,
        tail: Tail,
        finish: Finish,
    ) -> Tensor | None:
        """Step by step where the host knows the position: `finish` is given what `windows` yields, and writes it.

        Of a call that is captured it is on the device, [] int64, and how many windows close is known there alone: one
        launch does it all, by what `tail` says. Returns what that returns, else None.
        """
        if isinstance(first, Tensor):
            return self.compress_at_once(kv, gate, ring, first, ratio, *tail)
        for entry, pooled in windows(kv, gate, ring, first, ratio, tail.norm.shape[0], self.pool):
            finish(entry, pooled)
        return None


def compress_at_once(  # noqa: PLR0913, PLR0917 (the tail of a layer: five ops, the state and the cache)
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

    Equation: entry e pools the tokens of its window, ``e ratio .. (e + 1) ratio - 1`` (`windows`). It is
    rounded to `dtype`, normed, rotated as of position ``e ratio``, rounded as `rounding` says, and stored as row e.
    Source: DeepSeek `Compressor.forward`.

    Parameters
    ----------
    kv, gate
        [t, series * width] float32, of the tokens at positions ``first ..``; `gate` holds the position bias.
    ring
        Of the tokens before `first`, whole windows, at least `series`; the rows of these t, or the last of them, are
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
    first, width = int(first), norm.shape[0]
    begin = first // ratio
    pooled = [part for _, part in windows(kv, gate, ring, first, ratio, width, pool)]
    entries = rms_norm(torch.cat((kv.new_empty(0, width), *pooled)).to(dtype), norm, eps)
    positions = (begin + torch.arange(len(entries), device=kv.device)) * ratio
    entries = _rounded(rotate(entries, *angles(positions, freqs)), rounding, 2 * freqs.shape[0])
    rows_reference.write(rows, begin, entries)
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


compress = Compress(pool, compress_at_once)
