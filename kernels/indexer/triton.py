"""The lightning indexer: scores of a tile of keys against all heads of a token are reduced where they are computed.

Keys are the rows of the product and heads its columns, so that a key's heads lie in one thread and its neighbours. A
tile of keys is loaded and decoded once, for every token of its program.

All keys of a call, and of all calls with the same heads, width and dtypes, are scored by products of one shape, summed
in one order: equal keys have equal scores wherever they lie, and a token's scores do not depend on the others.

`CodedRows` are scored as they are stored, by queries that a kernel of its own has rotated: in fp16 where they come in
bf16, over powers of two that their heads' weights get back.

`select_fp8` multiplies codes with codes. Of such products a Hopper's tensor cores keep fewer bits than fp32 has while
they add up the columns of a head, which is why nothing else takes that way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats import lloyd_max
from fathom.kernels.formats.stored import CodedRows, Fp4Keys, Fp8Keys, Rows
from fathom.kernels.formats.triton import E4M3_LARGEST, E4M3_SMALLEST, centroids, e2m1, e8m0, encoded, rotated_query
from fathom.kernels.formats.triton_rounding import UPCAST, widened
from fathom.kernels.indexer.topk import count_first_digits, first_counts, seen_by, top_k_into, top_k_scratch
from fathom.kernels.position import position
from fathom.kernels.target import blackwell

KEYS = 256  # keys per tile: two warpgroups of Hopper; a query of 64 heads x 128 is read from L2 for each tile
EXACT_KEYS = 32  # the same in fp32, which tensor cores do not multiply
TOKENS = 16  # tokens per program, at most
PROGRAMS = 1024  # programs that tokens are divided for: a few for each of 132 SMs or more
SCRATCH = 1 << 26  # scores that exist at a time: 256 MiB
ROTATED = 16  # rows of queries that a program rotates, or makes codes of
LEAST = 16  # columns of coded keys: what a product takes
_TENSOR, _FP8, _FP4, _CODED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def _keys(
    values, scales, table, row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Decoded keys [rows, BLOCK_D], 0 beyond column D; of FP8 and of codes what multiplies a row is left out."""
    line = row.to(tl.int64)[:, None]
    if FORM == _CODED:
        found = centroids(values, table, row, row >= 0, BLOCK_D, BITS)
    elif FORM == _FP4:
        byte, group = tl.arange(0, BLOCK_D // 2)[None, :], tl.arange(0, BLOCK_D // 32)[None, :]
        packed = tl.load(values + line * (D // 2) + byte, byte < D // 2, 0).to(tl.uint32)
        scale = e8m0(tl.load(scales + line * (D // 32) + group, group < D // 32, 0))
        both = tl.join(e2m1(packed & 15), e2m1(packed >> 4))  # the even column in the low nibble
        grouped = both.reshape(line.shape[0], BLOCK_D // 32, 32) * scale[:, :, None]
        found = grouped.reshape(line.shape[0], BLOCK_D)
    else:
        column = tl.arange(0, BLOCK_D)[None, :]
        if D == BLOCK_D:
            found = tl.load(values + line * D + column)
        else:
            found = tl.load(values + line * D + column, column < D, 0.0)
    return found.to(dtype)


@triton.jit(do_not_specialize=["start", "tokens", "entries", "least", "tokens_per_program"])
def _scores(
    q, weights, values, scales, table, out, counts, first, start, tokens, entries, stride, ratio, least,
    tokens_per_program,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    FORM: tl.constexpr, BITS: tl.constexpr, SEEN: tl.constexpr, COUNTED: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Score a tile of keys for some tokens; if SEEN, unless none of them sees any, or more than `least` keys.

    COUNTED: first digits of what a token sees are counted for `top_k`.
    """
    low, begin = tl.program_id(0) * KEYS, tl.program_id(1).to(tl.int64) * tokens_per_program
    end = tl.minimum(begin + tokens_per_program, tokens)
    high = entries
    if SEEN:
        high = seen_by(first, start + end - 1, ratio, entries)
        high = tl.where(high > least, high, 0)
    if low < high:
        entry, head, column = low + tl.arange(0, KEYS), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
        row = tl.minimum(entry, entries - 1)  # the last tile reads its last key again
        key = _keys(values, scales, table, row, D, BLOCK_D, FORM, BITS, dtype)
        real = (head[None, :] < HEADS) & (column[:, None] < D)
        for step in range((end - begin).to(tl.int32)):
            token = begin + step
            place, line = q + token * (HEADS * D) + head[None, :] * D + column[:, None], token * HEADS + head
            if BLOCK_H == HEADS and BLOCK_D == D:
                query, weight = tl.load(place), tl.load(weights + line)
            else:
                query, weight = tl.load(place, real, 0.0), tl.load(weights + line, head < HEADS, 0.0)
            dots = tl.dot(key, query.to(dtype), input_precision="ieee")
            weighed = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
            if BLOCK_H != HEADS:
                weighed = tl.where(head[None, :] < HEADS, weighed, 0.0)  # 0 times an infinite key is NaN
            score = tl.sum(weighed, 1)
            if FORM == _FP8:
                score *= tl.load(scales + row)  # a power of two, so it may as well come last
            if FORM == _CODED:  # a length is not below 0, and may come behind the ReLU
                score *= tl.load(scales + row).to(tl.float32) * (D**-0.5)
            tl.store(out + token * stride + entry, score, entry < entries)
            if COUNTED:
                count_first_digits(counts + token * 1024, score, entry < seen_by(first, start + token, ratio, entries))


@triton.jit(do_not_specialize=["n"])
def _rotate(
    q, weights, signs, out, out_weights, n,
    D: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, SIGNED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rotate rows of queries, and give the powers of two that they are divided by to the weights."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    inside = row < n
    at = row[:, None] * D + column[None, :]
    x, size = rotated_query(widened(tl.load(q + at, inside[:, None], 0.0), UPCAST), signs, ROWS, D, STEPS, SIGNED)
    tl.store(out + at, x.to(out.dtype.element_ty), inside[:, None])
    tl.store(out_weights + row, tl.load(weights + row, inside, 0.0) * size, inside)


@triton.jit(do_not_specialize=["n"])
def _code(
    q, weights, out, out_weights, n, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr
):
    """Make E4M3 of rows of queries, and give the powers of two that they are divided by to the weights."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    inside = (row < n)[:, None] & (column < D)[None, :]
    at = row[:, None] * D + column[None, :]
    x = widened(tl.load(q + at, inside, 0.0), UPCAST)
    codes, exponent = encoded(x, 1, E4M3_SMALLEST, E4M3_LARGEST, 3, 7, 7)
    tl.store(out + at, codes, inside)
    size = tl.reshape(e8m0(exponent), (ROWS,))
    tl.store(out_weights + row, tl.load(weights + row, row < n, 0.0) * size, row < n)


class _Planes(NamedTuple):
    """Keys as the kernel takes them; of what a form does not have, any tensor."""

    form: int
    values: Tensor
    scales: Tensor  # or the lengths of CodedRows
    signs: Tensor | None  # [d] of CodedRows, or none
    bits: int


def _planes(keys: Rows) -> _Planes:
    match keys:
        case Tensor():
            assert keys.dtype in {torch.bfloat16, torch.float32}, f"keys: {keys.dtype}, want bfloat16 or float32"
            keys = keys.contiguous()
            return _Planes(_TENSOR.value, keys, keys, None, 0)
        case Fp8Keys(values, scale):
            return _Planes(_FP8.value, values.contiguous(), scale.contiguous(), None, 0)
        case Fp4Keys(packed, scale):
            assert 2 * packed.shape[1] % 32 == 0, f"{2 * packed.shape[1]} columns are no multiple of 32"
            return _Planes(_FP4.value, packed.contiguous(), scale.contiguous().view(torch.uint8), None, 0)
        case CodedRows(norm, codes, bits, signs):
            if keys.shape[1] < LEAST:
                raise NotImplementedError(f"index keys in Triton: coded rows of {keys.shape[1]}, want {LEAST} at least")
            return _Planes(_CODED.value, codes.contiguous(), norm.contiguous(), signs, bits)
        case _:
            raise NotImplementedError(f"index keys stored as {type(keys).__name__} have no Triton kernel")


class _Queries(NamedTuple):
    """Queries as the keys are met."""

    values: Tensor  # [t, h, d], or codes of E4M3
    weights: Tensor  # [t, h] float32; of what was divided by a power of two, with that power

    def of(self, tokens: slice) -> "_Queries":
        """Those of some tokens."""
        return _Queries(self.values[tokens], self.weights[tokens])


def _met(q: Tensor, head_weights: Tensor, planes: _Planes) -> _Queries:
    """Queries and weights as the keys are met: rotated where these are coded."""
    assert head_weights.dtype == torch.float32, f"head_weights: {head_weights.dtype}, want float32"
    q, head_weights = q.contiguous(), head_weights.contiguous()
    if planes.form != _CODED.value or q.numel() == 0:
        return _Queries(q, head_weights)
    d, n = q.shape[2], head_weights.numel()
    rotated = torch.empty(q.shape, dtype=torch.float32 if q.dtype == torch.float32 else torch.float16, device=q.device)
    weights = torch.empty_like(head_weights)
    _rotate[(triton.cdiv(n, ROTATED),)](
        q, head_weights, q if planes.signs is None else planes.signs, rotated, weights, n, D=d,
        STEPS=d.bit_length() - 1, ROWS=ROTATED, SIGNED=planes.signs is not None, UPCAST=UPCAST,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return _Queries(rotated, weights)


def _score(
    out: Tensor, queries: _Queries, planes: _Planes, seen: tuple[Tensor, int, int, int] | None, counts: Tensor | None
) -> None:
    """Fill `out` [t, n], n no more than the keys, for queries of `_met`; `seen`: first, start, ratio, least.

    `counts` are those of `first_counts`, to be added to, or None.
    """
    q, weights = queries
    (t, heads, d), n = q.shape, out.shape[1]
    if t == 0 or n == 0:
        return
    coded, exact = planes.form == _CODED.value, torch.float32 in {q.dtype, planes.values.dtype}
    table = lloyd_max.rounded_codebook(planes.bits, q.dtype, q.device) if coded else planes.scales
    keys = EXACT_KEYS if exact else KEYS
    tiles = -(-n // keys)
    tokens_per_program = max(1, min(TOKENS, t * tiles // PROGRAMS))
    first, start, ratio, least = seen or (out, 0, 1, 0)
    operand = tl.float16 if coded else tl.float8e4nv if q.dtype == torch.float8_e4m3fn else tl.bfloat16
    constants = {
        "HEADS": heads, "D": d, "KEYS": keys, "FORM": planes.form, "BITS": planes.bits, "SEEN": seen is not None,
        "COUNTED": counts is not None,
        "BLOCK_H": max(16, triton.next_power_of_2(heads)),
        "BLOCK_D": d if coded else max(32, triton.next_power_of_2(d)),
        "dtype": tl.float32 if exact or (UPCAST and not coded) else operand,
        "num_warps": 4 if exact else 8, "num_stages": 3,
        # two programs to an SM: one multiplies while the other sums; Blackwell, whose sums lie elsewhere, would spill
        "maxnreg": None if exact or blackwell() else 128,
    }  # fmt: skip
    _scores[tiles, -(-t // tokens_per_program)](
        q, weights, planes.values, planes.scales, table, out, counts, first, start, t, n, out.stride(0), ratio, least,
        tokens_per_program, **constants, enable_fp_fusion=False,
    )  # fmt: skip


def index_scores(q: Tensor, head_weights: Tensor, keys: Rows) -> Tensor:
    """Score every entry for every token: `kernels.indexer.reference.index_scores`.

    Products of bf16 are exact; sums are those of the device's fp32. A product of which a side is fp32 is fp32. Of
    `CodedRows` and bf16 queries both sides are rounded to fp16.

    Raises
    ------
    NotImplementedError
        If the keys are neither a tensor nor `Fp8Keys` nor `Fp4Keys` nor `CodedRows` of 16 columns or more.

    """
    planes = _planes(keys)
    out = torch.empty(q.shape[0], keys.shape[0], device=q.device)
    _score(out, _met(q, head_weights, planes), planes, None, None)
    return out


def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int | Tensor, ratio: int, k: int) -> Tensor:
    """Pick the k best visible entries of each token: `kernels.indexer.reference.select`.

    `first` may be [] int64 on the device; `keys` may hold anything beyond what the last token sees. Scores of a tile of
    ``SCRATCH // n`` tokens exist at a time, 256 MiB for up to 2^26 entries (of more, one token's: 4 n bytes); counts of
    `top_k` take less than 2^25 bytes beside. Nothing is scored for tiles of tokens that see no more than k entries.

    A NaN score leaves open which entries its row selects; they are visible and distinct all the same.

    Raises
    ------
    NotImplementedError
        As `index_scores`.

    """
    planes = _planes(keys)
    return _select(_met(q, head_weights, planes), planes, keys.shape[0], first, ratio, k)


def select_fp8(q: Tensor, head_weights: Tensor, keys: Rows, first: int | Tensor, ratio: int, k: int) -> Tensor:
    """As `select`, by E4M3 queries times E4M3 keys: `kernels.indexer.reference.SelectFp8`.

    A head's sum over the columns is what tensor cores make of such products: on Hopper with fewer bits than fp32.

    Raises
    ------
    NotImplementedError
        If the keys are not `Fp8Keys`.

    """
    if not isinstance(keys, Fp8Keys):
        raise NotImplementedError(f"FP8 scores in Triton: index keys stored as {type(keys).__name__}, want Fp8Keys")
    assert head_weights.dtype == torch.float32, f"head_weights: {head_weights.dtype}, want float32"
    q, head_weights, (t, h, d) = q.contiguous(), head_weights.contiguous(), q.shape
    codes, weights = torch.empty(q.shape, dtype=torch.uint8, device=q.device), torch.empty_like(head_weights)
    if t > 0:
        _code[(triton.cdiv(t * h, ROTATED),)](
            q, head_weights, codes, weights, t * h, D=d, BLOCK_D=triton.next_power_of_2(d), ROWS=ROTATED,
            UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    queries = _Queries(codes.view(torch.float8_e4m3fn), weights)
    return _select(queries, _planes(keys), keys.shape[0], first, ratio, k)


def _select(queries: _Queries, planes: _Planes, n: int, first: int | Tensor, ratio: int, k: int) -> Tensor:
    t, device = len(queries.values), queries.values.device
    out = torch.empty(t, min(k, n), dtype=torch.int32, device=device)
    if out.numel() == 0:
        return out
    if isinstance(first, int):
        n = min(n, (first + t) // ratio)
    stride = max(16, -(-n // 16) * 16)  # rows are read 16 bytes at a time
    tokens = max(1, min(t, SCRATCH // stride))
    scratch = torch.empty(tokens, stride, device=device)
    at = position(first, device)
    for start in range(0, t, tokens):
        stop = min(start + tokens, t)
        scores, rows = scratch[: stop - start, :n], out[start:stop]
        counts = first_counts(stop - start, n, device)
        _score(scores, queries.of(slice(start, stop)), planes, (at, start, ratio, rows.shape[1]), counts)
        top_k_into(rows, scores, at, start, ratio, counts)
    return out


def select_scratch(
    tokens: int, heads: int, width: int, entries: int, k: int, form: str, item: int, device: torch.device, *,
    few_pass: bool,
) -> int:  # fmt: skip
    """Bytes allocated in `select` of up to so many tokens: the result, scores of a tile, and counts of `top_k`.

    Beside them, for coded keys, rotated queries and their weights.
    """
    del device, few_pass  # scores do not matter
    rotated = tokens * heads * (width * item + 4) if form == "coded" else 0
    stride = max(16, -(-entries // 16) * 16)
    scores = min(tokens * stride, max(SCRATCH, stride)) * 4
    return tokens * min(k, entries) * 4 + scores + top_k_scratch(tokens, entries) + rotated
