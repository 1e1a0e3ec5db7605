"""Attention over keys and values in Shard's forms: each segment split over its keys, the parts added up in one order.

Five launches: the middle's basis with its scales folded in, one for each segment, and one that adds up the parts of a
query, undoes the rotation of the sum of stored values, and divides. Parts lie in fp32 scratch: 4 d bytes a query and
part, of which there are at most `PARTS` a segment; it does not grow with the context beyond that.

What is not taken raises NotImplementedError that names it: components with bits by group (DP), sketched keys (QJL),
ranks below 32, and heads of less than 32 columns. Lloyd-Max codes of all of 1 to 8 bits are.

Products of compressed rows are of fp16 operands, 8 times finer than bf16, that are scaled so that fp16 holds them: a
query by the power of two below its largest number, a basis by its largest factor. A rebuilt key of 65 520 or more, or
such a decoded value, is infinite, as are the means that this form stores in fp16. With float32 queries all operands are
fp32, on plain cores. Positions below 2^24, as everywhere.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats import lloyd_max
from fathom.kernels.formats.stored import CodedRows, StreamKeys
from fathom.kernels.formats.triton import centroids, hadamard, rotated_query
from fathom.kernels.formats.triton_rounding import UPCAST, rounded
from fathom.kernels.shard import reference
from fathom.kernels.shard import triton_middle as shard_middle
from fathom.kernels.shard.reference import Middle
from fathom.kernels.shard.triton_middle import LOG2E, SHIFT, Sums, sums

__all__ = ["Middle", "Stream", "attend"]

ROWS = 16  # least rows of a product on tensor cores
TILE = 64  # tokens
PARTS = 64  # of a segment, at most; of the middle `shard_middle.PROGRAMS`


class Stream(NamedTuple):
    """`kernels.shard.reference.Stream`, whose number of tokens may lie on the device."""

    keys: StreamKeys
    values: CodedRows
    tokens: int | Tensor  # or [] int64; rows from there on are not read


@triton.jit
def _fold(peak, total, summed, logits, values, operand: tl.constexpr, SHIFT: tl.constexpr):
    """Fold logits [ROWS, TILE] and values [TILE, D] into a running softmax."""
    new = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(new == -float("inf"), 0.0, new)  # nothing finite yet: exp2(-inf) and not exp2(NaN)
    mass = tl.exp2(logits - base[:, None] + SHIFT)
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(mass, 1)
    return new, total, tl.dot(mass.to(operand), values, summed * shrink[:, None], input_precision="ieee")


@triton.jit(do_not_specialize=["tokens", "rows"])
def _exact(q, keys, values, peaks, totals, sums, tokens, rows, key_token, key_head, value_token, value_head,
           KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
           WIDE: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    operand = tl.float32 if WIDE else keys.dtype.element_ty
    split, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)  # head strides may be large
    column, row = tl.arange(0, D), tl.arange(0, ROWS)
    wanted = row < rows // KV
    query = row // GROUP * (KV * GROUP) + head * GROUP + row % GROUP  # of [t, h]
    x = tl.load(q + query[:, None] * D + column[None, :], wanted[:, None], 0.0).to(operand)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, D), tl.float32)
    tokens_per_split = tl.cdiv(tl.cdiv(tokens, TILE), tl.num_programs(0)) * TILE
    for start in range(split * tokens_per_split, tl.minimum(tokens, (split + 1) * tokens_per_split), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < tokens
        at = keys + token[:, None] * key_token + head * key_head + column[None, :]
        logits = tl.dot(x, tl.trans(tl.load(at, inside[:, None], 0.0).to(operand)), input_precision="ieee")
        logits = tl.where(inside[None, :], logits * SCALE, -float("inf"))
        at = values + token[:, None] * value_token + head * value_head + column[None, :]
        value = tl.load(at, inside[:, None], 0.0).to(operand)
        peak, total, summed = _fold(peak, total, summed, logits, value, operand, SHIFT)
    out = split * rows + query
    tl.store(peaks + out, peak, wanted)
    tl.store(totals + out, total, wanted)
    tl.store(sums + out[:, None] * D + column[None, :], summed, wanted[:, None])


@triton.jit(do_not_specialize=["rows"])
def _stream(q, key_norm, key_codes, key_table, key_signs, norm, codes, table, peaks, totals, sums, held, rows, slot,
            KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr,
            TILE: tl.constexpr, KEY_BITS: tl.constexpr, BITS: tl.constexpr, SIGNED: tl.constexpr, WIDE: tl.constexpr,
            ROOT: tl.constexpr, SCALE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    operand = tl.float32 if WIDE else tl.float16
    split, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = tl.load(held)
    column, row = tl.arange(0, D), tl.arange(0, ROWS)
    wanted = row < rows // KV
    query = row // GROUP * (KV * GROUP) + head * GROUP + row % GROUP  # of [t, h]
    x = tl.load(q + query[:, None] * D + column[None, :], wanted[:, None], 0.0).to(tl.float32)
    x, size = rotated_query(x, key_signs, ROWS, D, STEPS, SIGNED)
    x = x.to(operand)
    peak = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, D), tl.float32)
    tokens_per_split = tl.cdiv(tl.cdiv(tokens, TILE), tl.num_programs(0)) * TILE
    for start in range(split * tokens_per_split, tl.minimum(tokens, (split + 1) * tokens_per_split), TILE):
        token = start + tl.arange(0, TILE)
        inside = token < tokens
        stored = token * KV + head
        key = centroids(key_codes, key_table, stored, inside, D, KEY_BITS).to(operand)
        length = tl.load(key_norm + stored, inside, 0.0).to(tl.float32) * ROOT
        logits = tl.dot(x, tl.trans(key), input_precision="ieee") * (size * SCALE)[:, None] * length[None, :]
        logits = tl.where(inside[None, :], logits, -float("inf"))
        length = tl.load(norm + stored, inside, 0.0).to(tl.float32) * ROOT
        value = (centroids(codes, table, stored, inside, D, BITS) * length[:, None]).to(operand)
        peak, total, summed = _fold(peak, total, summed, logits, value, operand, SHIFT)
    out = (slot + split) * rows + query
    tl.store(peaks + out, peak, wanted)
    tl.store(totals + out, total, wanted)
    tl.store(sums + out[:, None] * D + column[None, :], summed, wanted[:, None])


@triton.jit(do_not_specialize=["rows", "exact", "middle", "slots"])
def _combine(peaks, totals, sums, largest, signs, out, rows, exact, middle, slots, H: tl.constexpr,
             GROUP: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, MANY: tl.constexpr, SCALED: tl.constexpr,
             SIGNED: tl.constexpr, ROOT: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """Add up a query's parts: those below `exact`, those below `middle`, which `largest` scales, and the stream's."""
    query = tl.program_id(0)
    column = tl.arange(0, D)
    top = tl.full((MANY,), -float("inf"), tl.float32)
    for start in range(0, slots, MANY):
        part = start + tl.arange(0, MANY)
        top = tl.maximum(top, tl.load(peaks + part.to(tl.int64) * rows + query, part < slots, -float("inf")))
    top = tl.max(top, 0)
    total = tl.zeros((MANY,), tl.float32)
    plain, turned = tl.zeros((MANY, D), tl.float32), tl.zeros((MANY, D), tl.float32)
    factor = tl.full((D,), 1.0, tl.float32)
    if SCALED:
        factor = tl.load(largest + query % H // GROUP * D + column).to(tl.float32)
    for start in range(0, slots, MANY):
        part = start + tl.arange(0, MANY)
        at = part.to(tl.int64) * rows + query
        weight = tl.exp2(tl.load(peaks + at, part < slots, -float("inf")) - top)
        total += tl.load(totals + at, part < slots, 0.0) * weight
        found = tl.load(sums + at[:, None] * D + column[None, :], (part < slots)[:, None], 0.0) * weight[:, None]
        plain += tl.where((part < exact)[:, None], found, 0.0)
        found = tl.where(((part >= exact) & (part < middle))[:, None], found * factor[None, :], found)
        turned += tl.where((part >= exact)[:, None], found, 0.0)
    rotated = hadamard(tl.sum(turned, 0, keep_dims=True), 1, D, STEPS) * ROOT
    if SIGNED:
        rotated *= tl.load(signs + column)[None, :]
    result = (tl.sum(plain, 0, keep_dims=True) + rotated) / tl.sum(total, 0)
    at = out + query * D + column[None, :]
    tl.store(at, rounded(result, out.dtype.element_ty, UPCAST))


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    middle: Middle | None,
    stream: Stream | reference.Stream | None,
    signs: Tensor | None,
) -> Tensor:
    """Attend from each query to all keys of all segments: `kernels.shard.cpu.attend`; see above for what is taken.

    `stream` may have its number of tokens on the device, so that one CUDA graph serves every step. Queries are taken as
    many at a time as fill one product: it is an op of decode.
    """
    h, d = q.shape[1:]
    kv = keys.shape[1]
    assert h % kv == 0, f"{h} query heads are no multiple of {kv} KV heads"
    assert keys.shape[0], "no exact key"
    assert d & (d - 1) == 0, f"heads of {d} are no power of two"
    if d < ROWS:
        raise NotImplementedError(f"shard on a GPU: heads of {d}, want {ROWS} at least")
    wide = UPCAST and q.dtype == torch.bfloat16
    wide = wide or torch.float32 in (q.dtype, keys.dtype)
    basis = None
    if middle is not None:
        shard_middle.taken(middle, d)
        basis = shard_middle.fold_basis(middle, kv, wide=q.dtype == torch.float32)
    if stream is not None and not isinstance(stream.keys, CodedRows):
        raise NotImplementedError("shard on a GPU: sketched keys (QJL) in the stream")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    step = max(1, ROWS * kv // h)
    for start in range(0, q.shape[0], step):
        part = q[start : start + step].contiguous()
        _attend(part, out[start : start + step], keys, values, middle, basis, stream, signs, wide=wide)
    return out


def _attend(
    q: Tensor,
    out: Tensor,
    keys: Tensor,
    values: Tensor,
    middle: Middle | None,
    basis: tuple[Tensor, Tensor] | None,
    stream: Stream | reference.Stream | None,
    signs: Tensor | None,
    *,
    wide: bool,
) -> None:
    """`attend` of as many queries as fill one product."""
    t, h, d = q.shape
    kv = keys.shape[1]
    rows = max(ROWS, triton.next_power_of_2(t * h // kv))
    exact = min(PARTS, triton.cdiv(keys.shape[0], TILE))
    compressed = 0 if middle is None else shard_middle.splits(middle, kv)[0]
    streamed = 0 if stream is None else min(PARTS, triton.cdiv(max(1, stream.values.shape[0] // kv), TILE))
    slots = exact + compressed + streamed
    into = sums(slots, q)
    constants = {
        "KV": kv, "GROUP": h // kv, "ROWS": rows, "D": d, "TILE": TILE, "SCALE": d**-0.5 * LOG2E, "SHIFT": SHIFT,
    }  # fmt: skip
    keys, values = (x if x.stride(2) == 1 else x.contiguous() for x in (keys, values))
    _exact[(exact, kv)](
        q, keys, values, *into, keys.shape[0], t * h, *keys.stride()[:2], *values.stride()[:2],
        **constants, WIDE=wide, num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    if middle is not None and basis is not None:
        shard_middle.score(q, middle, basis, into, exact, wide=q.dtype == torch.float32)
    if stream is not None:
        _stream_sums(q, stream, into, exact + compressed, (streamed, kv), constants)
    largest = None if middle is None else middle.values.largest.contiguous()
    _combine[(t * h,)](
        *into, q if largest is None else largest, q if signs is None else signs, out, t * h, exact,
        exact + compressed, slots, H=h, GROUP=h // kv, D=d, STEPS=d.bit_length() - 1,
        MANY=min(64, triton.next_power_of_2(slots)), SCALED=largest is not None, SIGNED=signs is not None,
        ROOT=d**-0.5, UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def _stream_sums(
    q: Tensor,
    stream: Stream | reference.Stream,
    into: Sums,
    slot: int,
    grid: tuple[int, int],
    constants: dict[str, int | float],
) -> None:
    keys, values = stream.keys, stream.values
    assert isinstance(keys, CodedRows), "checked by `attend`"
    held = stream.tokens
    if not isinstance(held, Tensor):
        held = torch.full((), held, dtype=torch.int64, device=q.device)
    tables = [lloyd_max.codebook(part.bits, q.device) for part in (keys, values)]
    t, h, d = q.shape
    _stream[grid](
        q, keys.norm, keys.codes, tables[0], q if keys.signs is None else keys.signs, values.norm, values.codes,
        tables[1], *into, held, t * h, slot, **constants, STEPS=d.bit_length() - 1, KEY_BITS=keys.bits,
        BITS=values.bits, SIGNED=keys.signs is not None, WIDE=q.dtype == torch.float32, ROOT=d**-0.5,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip


def attend_scratch(tokens: int, heads: int, kv_heads: int, d: int, rank: int, item: int) -> int:
    """Bytes allocated in `attend` of up to so many tokens, however long the segments are.

    The result; a copy of the basis for products; and parts of the sums of as many queries as fill one product.
    """
    basis = kv_heads * d * rank * (4 if item == 4 else 2)
    queries = min(tokens, max(1, ROWS * kv_heads // heads))
    parts = (2 * PARTS + shard_middle.PROGRAMS) * queries * heads * (2 + d) * 4
    return tokens * heads * d * item + basis + parts
