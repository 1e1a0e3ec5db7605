"""Shard's middle: a tile of keys is rebuilt, rotated and scored in registers; values are looked up as they are used.

A program has a run of tiles of tokens, and of each tile all KV heads or some of them: coefficients, which all heads
share, are unpacked once, and so are the cosines and sines of the tile's positions, which cost as much as the products
of one head. A head's basis comes from a copy of the int8 one that the call makes first, in which the scales of
coefficients and columns are folded in, over the largest of them, the two components of rotary pairs lie apart, and the
low nibbles' components come before the high ones': 16-bit operands, of no range that fp16 does not hold.

Running sums of a head lie in the program's own scratch from one tile to the next, in L2: registers do not hold those of
all heads. The form of these sums is `kernels.shard.triton`'s too.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton import unit
from fathom.kernels.shard.reference import Middle

LOG2E = math.log2(math.e)
SHIFT = 15.0  # masses are exp2(logit - peak + 15): 2^15 at most, and in fp16 they are lost below 2^-40 of the largest
PROGRAMS = 256  # about two for each multiprocessor of an H200 or B200
LEAST = 16  # of a dimension of a product on tensor cores


class Sums(NamedTuple):
    """Running softmax over a part of the keys, [slots, t * h] float32 each, logits in powers of two."""

    peaks: Tensor  # largest logit
    totals: Tensor  # sum of exp2(logit - peak + SHIFT)
    values: Tensor  # [slots, t * h, d], that times the value


def sums(slots: int, q: Tensor) -> Sums:
    """Allocate `slots` parts for queries [t, h, d], without content."""
    t, h, d = q.shape
    shapes = ((slots, t * h), (slots, t * h), (slots, t * h, d))
    return Sums(*(torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes))


@triton.jit
def _fold_basis(basis, basis_scale, scale, folded, largest, rank, RANK: tl.constexpr, HALF: tl.constexpr,
                INTERLEAVED: tl.constexpr):  # fmt: skip
    """Head g's columns [2, rank, HALF]: components of pairs apart, component 2 j in row j, 2 j + 1 in rank / 2 + j."""
    head, second = tl.program_id(0), tl.program_id(1)
    row, pair = tl.arange(0, RANK), tl.arange(0, HALF)
    inside = row < rank
    component = tl.where(row < rank // 2, 2 * row, 2 * row - rank + 1)
    factor = tl.load(basis_scale + component, inside, 0.0).to(tl.float32)
    factor *= tl.load(scale + component, inside, 0.0).to(tl.float32)
    most = tl.max(factor, 0)
    most = tl.where(most > 0, most, 1.0)
    column = 2 * pair + second if INTERLEAVED else pair + second * HALF
    place = (head * 2 * HALF + column).to(tl.int64)[None, :] * rank + component[:, None]
    wide = tl.load(basis + place, inside[:, None], 0).to(tl.float32) * (factor / most)[:, None]
    to = folded + ((head * 2 + second) * rank + row)[:, None] * HALF + pair[None, :]
    tl.store(to, wide.to(folded.dtype.element_ty), inside[:, None])
    if (head == 0) & (second == 0):
        tl.store(largest, most)


@triton.jit
def _component(basis, low, high, low_rest, high_rest, place, rest, rest_inside, BYTES: tl.constexpr,
               HALF: tl.constexpr, REST: tl.constexpr):  # fmt: skip
    """One component of all pairs of a head: coefficients times `basis`, [TILE, HALF] fp32."""
    pair = tl.arange(0, HALF)[None, :]
    out = tl.dot(low, tl.load(basis + place[:, None] * HALF + pair), input_precision="ieee")
    out = tl.dot(high, tl.load(basis + (BYTES + place)[:, None] * HALF + pair), out, input_precision="ieee")
    if REST:
        inside = rest_inside[:, None]
        out = tl.dot(low_rest, tl.load(basis + rest[:, None] * HALF + pair, inside, 0.0), out, input_precision="ieee")
        out = tl.dot(
            high_rest, tl.load(basis + (BYTES + rest)[:, None] * HALF + pair, inside, 0.0), out, input_precision="ieee"
        )
    return out


@triton.jit
def _centroids(words, place: tl.constexpr, WIDE: tl.constexpr):
    """Number `place` of the four of 16 bits in each word."""
    found = ((words >> (16 * place)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return found.to(tl.float32) if WIDE else found


@triton.jit
def _middle(q, codes, folded, largest, mean, value_codes, codebook, freqs, peaks, totals, sums,
            tokens, first, rows, slot, tiles, KV: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
            ROWS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr, MAIN: tl.constexpr,
            REST: tl.constexpr, MANY: tl.constexpr, INTERLEAVED: tl.constexpr, WIDE: tl.constexpr,
            SCALE: tl.constexpr, SHIFT: tl.constexpr):  # fmt: skip
    D: tl.constexpr = 2 * HALF
    operand = tl.float32 if WIDE else tl.float16
    split = tl.program_id(0).to(tl.int64)
    pair, quarter = tl.arange(0, HALF), tl.arange(0, D // 4)
    first_of = 2 * pair if INTERLEAVED else pair
    second_of = first_of + (1 if INTERLEAVED else HALF)
    row = tl.arange(0, ROWS)
    wanted = row < rows // KV
    place, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST if REST else 1)  # noqa: FURB110 -- constexprs
    rest_inside = rest < BYTES
    freq = tl.load(freqs + pair)
    most = tl.load(largest)
    for i in range(tiles):
        token = (split * tiles + i) * TILE + tl.arange(0, TILE)
        if (split * tiles + i) * TILE < tokens:
            inside = token < tokens
            angle = (first + token).to(tl.float32)[:, None] * freq[None, :]
            cos, sin = tl.cos(angle), tl.sin(angle)
            packed = tl.load(codes + token[:, None] * BYTES + place[None, :], inside[:, None], 0).to(tl.int32)
            low, high = ((packed & 15) - 8).to(operand), ((packed >> 4) - 8).to(operand)
            low_rest, high_rest = low, high
            if REST:
                packed = tl.load(
                    codes + token[:, None] * BYTES + rest[None, :], inside[:, None] & rest_inside[None, :], 0
                ).to(tl.int32)
                low_rest, high_rest = ((packed & 15) - 8).to(operand), ((packed >> 4) - 8).to(operand)
            for j in range(HEADS):
                head = tl.program_id(1) * HEADS + j
                # queries, each over the power of two below its largest, so that fp16 holds them
                query = row // GROUP * (KV * GROUP) + head * GROUP + row % GROUP  # of [t, h]
                at = q + (query * D)[None, :]
                a = tl.load(at + first_of[:, None], wanted[None, :], 0.0).to(tl.float32)
                b = tl.load(at + second_of[:, None], wanted[None, :], 0.0).to(tl.float32)
                size = unit(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 0))
                a, b = (a / size[None, :]).to(operand), (b / size[None, :]).to(operand)
                # keys, rebuilt and rotated
                basis = folded + head * (4 * BYTES * HALF)
                c = _component(basis, low, high, low_rest, high_rest, place, rest, rest_inside, BYTES, HALF, REST)
                basis += 2 * BYTES * HALF
                e = _component(basis, low, high, low_rest, high_rest, place, rest, rest_inside, BYTES, HALF, REST)
                c = c * most + tl.load(mean + head * D + first_of).to(tl.float32)[None, :]
                e = e * most + tl.load(mean + head * D + second_of).to(tl.float32)[None, :]
                logits = tl.dot((c * cos - e * sin).to(operand), a, input_precision="ieee")
                logits = tl.dot((c * sin + e * cos).to(operand), b, logits, input_precision="ieee")
                logits = tl.where(inside[:, None], logits * (size * SCALE)[None, :], -float("inf"))  # [TILE, ROWS]
                # the running softmax
                out = (slot + split) * rows + query
                inward = wanted & (i > 0) if MANY else wanted & False
                old = tl.load(peaks + out, inward, -float("inf"))
                peak = tl.maximum(old, tl.max(logits, 0))
                base = tl.where(peak == -float("inf"), 0.0, peak)
                mass = tl.exp2(logits - base[None, :] + SHIFT)
                shrink = tl.exp2(old - base)
                total = tl.load(totals + out, inward, 0.0) * shrink + tl.sum(mass, 0)
                mass = tl.trans(mass).to(operand)
                at = value_codes + token[:, None] * (KV * D // 4) + head * (D // 4) + quarter[None, :]
                words = tl.load(codebook + tl.load(at, inside[:, None], 0).to(tl.int32))  # [TILE, D / 4] int64
                to = sums + out[:, None] * D + 4 * quarter[None, :]
                keep, before = wanted[:, None], inward[:, None]
                sum0 = tl.load(to, before, 0.0) * shrink[:, None]
                sum1 = tl.load(to + 1, before, 0.0) * shrink[:, None]
                sum2 = tl.load(to + 2, before, 0.0) * shrink[:, None]
                sum3 = tl.load(to + 3, before, 0.0) * shrink[:, None]
                if MANY:
                    tl.debug_barrier()  # what is written next has been read
                tl.store(to, tl.dot(mass, _centroids(words, 0, WIDE), sum0, input_precision="ieee"), keep)
                tl.store(to + 1, tl.dot(mass, _centroids(words, 1, WIDE), sum1, input_precision="ieee"), keep)
                tl.store(to + 2, tl.dot(mass, _centroids(words, 2, WIDE), sum2, input_precision="ieee"), keep)
                tl.store(to + 3, tl.dot(mass, _centroids(words, 3, WIDE), sum3, input_precision="ieee"), keep)
                tl.store(peaks + out, peak, wanted)
                tl.store(totals + out, total, wanted)
                if MANY:
                    tl.debug_barrier()  # and can be read


def taken(middle: Middle, d: int) -> None:
    """Refuse a middle that the kernel does not read: NotImplementedError."""
    if middle.keys.bits.shape[0]:
        raise NotImplementedError("shard on a GPU: keys whose components have bits by group")
    if d < 2 * LEAST:
        raise NotImplementedError(f"shard on a GPU: a middle of heads of {d}, want {2 * LEAST} at least")


def splits(middle: Middle, kv: int) -> tuple[int, int, int, int]:
    """Programs side by side, the tiles of each, tokens of a tile, and KV heads in a program: from shapes alone."""
    tokens = middle.values.codes.shape[0]
    tile = 128 if tokens >= 128 * PROGRAMS // 2 else 64
    tiles = triton.cdiv(tokens, tile)
    heads = max((n for n in range(1, kv + 1) if kv % n == 0 and tiles * (kv // n) >= PROGRAMS), default=1)
    tiles_per_program = max(1, triton.cdiv(tiles, PROGRAMS))
    return triton.cdiv(tiles, tiles_per_program), tiles_per_program, tile, heads


def fold_basis(middle: Middle, kv: int, *, wide: bool) -> tuple[Tensor, Tensor]:
    """Basis [kv, 2, rank, d / 2] in the dtype of products, and the factor [1] float32 that it was divided by."""
    stored, half = middle.keys, middle.freqs.shape[0]
    rank = stored.basis.shape[1]
    dtype = torch.float32 if wide else torch.float16
    folded = torch.empty(kv, 2, rank, half, dtype=dtype, device=stored.basis.device)
    largest = torch.empty(1, dtype=torch.float32, device=stored.basis.device)
    constants = {"RANK": triton.next_power_of_2(rank), "HALF": half, "INTERLEAVED": middle.interleaved}
    _fold_basis[(kv, 2)](
        stored.basis.contiguous(), stored.basis_scale, stored.scale, folded, largest, rank,
        **constants, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return folded, largest


def score(q: Tensor, middle: Middle, basis: tuple[Tensor, Tensor], into: Sums, slot: int, *, wide: bool) -> None:
    """Write the middle's sums for queries [t, h, d] as `into`'s slots from `slot` on, values without `largest`."""
    t, h, d = q.shape
    kv = middle.values.largest.shape[0]
    side, tiles, tile, heads = splits(middle, kv)
    width = middle.keys.codes.shape[1]
    main = max(LEAST, 1 << (width.bit_length() - 1))
    rest = 0 if main >= width else max(LEAST, triton.next_power_of_2(width - main))
    if main > width:
        raise NotImplementedError(f"shard on a GPU: rank {2 * width}, want {2 * LEAST} at least")
    codebook = middle.values.codebook.contiguous().view(torch.int64)
    constants = {
        "KV": kv, "HEADS": heads, "GROUP": h // kv, "ROWS": max(LEAST, triton.next_power_of_2(t * h // kv)),
        "HALF": d // 2, "TILE": tile, "BYTES": width, "MAIN": main, "REST": rest, "MANY": tiles > 1,
        "INTERLEAVED": middle.interleaved, "WIDE": wide, "SCALE": d**-0.5 * LOG2E, "SHIFT": SHIFT,
    }  # fmt: skip
    _middle[(side, kv // heads)](
        q, middle.keys.codes.contiguous(), *basis, middle.keys.mean, middle.values.codes.contiguous(), codebook,
        middle.freqs, *into, middle.values.codes.shape[0], middle.first, t * h, slot, tiles,
        **constants, num_warps=tile // 16, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
