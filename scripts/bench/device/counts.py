"""Bytes and FLOPs of a case, by formula: what must be read and written once, and the products of its equation.

A multiplication with its addition is two FLOPs. What is not a matrix product (softmax, norms, decoding) is not counted.
"""

from typing import NamedTuple

from scripts.bench.device.shapes import (
    CHOSEN,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    RATIOS,
    STREAMS,
    V4,
    WINDOW,
)

BF16, FP32 = 2, 4
KEY_BYTES = {"bf16": 2 * INDEX_DIM, "fp8": INDEX_DIM + 4, "fp4": INDEX_DIM // 2 + INDEX_DIM // 32}
ENTRY_BYTES = {"bf16": 2 * HEAD_DIM, "fp8": 584}  # 448 E4M3, 64 BF16, 7 scales, 1 of padding
DEVICES = {  # by a part of the device's name: bytes a second read, and FLOPs a second in BF16
    "H200": (4.3e12, 790e12),  # measured on one
    "H100 80GB HBM3": (3.35e12, 790e12),
    "B200": (8e12, 2250e12),  # nominal
}


class Cost(NamedTuple):
    """What a case takes at least."""

    bytes: int
    flops: int

    def __add__(self, other: object) -> "Cost":
        """Of two cases that follow each other."""
        assert isinstance(other, Cost)
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def floor_us(self, roof: tuple[float, float]) -> float:
        """Microseconds that no kernel can stay below: of its bytes or of its FLOPs, whichever takes longer."""
        return 1e6 * max(self.bytes / roof[0], self.flops / roof[1])


def roof(device: str) -> tuple[float, float] | None:
    """Bytes and BF16 FLOPs a second of a device by its name, as torch gives it; None for one that is not listed."""
    return next((limits for name, limits in DEVICES.items() if name in device), None)


def weight_bytes(form: str, out: int, columns: int) -> int:
    """Bytes of a matrix as stored, scales included: "bf16", "fp32", "fp8" (per 128 x 128), "fp4" (per 32 columns)."""
    match form:
        case "bf16":
            return BF16 * out * columns
        case "fp32":
            return FP32 * out * columns
        case "fp8":
            return out * columns + -(-out // 128) * -(-columns // 128)
        case "fp4":
            return out * columns // 2 + out * columns // 32
    raise AssertionError(f"form {form!r}")


def linear(form: str, out: int, columns: int, t: int, groups: int = 1) -> Cost:
    """``x @ W^T`` of [out, columns], or of `groups` of rows, each with columns of its own; activations in BF16."""
    return Cost(weight_bytes(form, out, columns) + BF16 * t * (groups * columns + out), 2 * t * out * columns)


def experts(shape: V4, t: int, experts_read: int) -> Cost:
    """Routed FP4 experts for t tokens of six each, of which so many experts are read; the sum is fp32."""
    weights = experts_read * 3 * weight_bytes("fp4", shape.intermediate, shape.hidden)
    return Cost(weights + t * shape.hidden * (BF16 + FP32), 6 * t * CHOSEN * shape.hidden * shape.intermediate)


def chosen_experts(held: int, t: int) -> int:
    """How many of the experts t tokens choose among them where each chooses six and all are equally likely."""
    return round(held * (1 - (1 - CHOSEN / held) ** t))


def index_scores(form: str, n: int, t: int, *, stored: bool) -> Cost:
    """Scores of n keys by t tokens; `stored`: written as fp32, else reduced to a selection that is not counted."""
    read = KEY_BYTES[form] * n + t * INDEX_HEADS * (BF16 * INDEX_DIM + FP32)
    return Cost(read + (FP32 * t * n if stored else 0), 2 * t * n * INDEX_HEADS * INDEX_DIM)


def top_k(n: int, t: int, k: int) -> Cost:
    """The k best of n fp32 scores of each of t tokens: read once."""
    return Cost(FP32 * t * (n + k), 0)


def attention(heads: int, t: int, entries: int, read: int, form: str) -> Cost:
    """Attention of t tokens to their windows and to `entries` each; `read`: entries that are read at least, of all."""
    keys = WINDOW + entries
    window = BF16 * HEAD_DIM * (WINDOW + t - 1)
    rows = 2 * BF16 * t * heads * HEAD_DIM
    return Cost(ENTRY_BYTES[form] * read + window + rows, 4 * t * heads * keys * HEAD_DIM)


def hyper_read(hidden: int, t: int) -> Cost:
    """The streams read for a sublayer, its input written."""
    fn = (2 + STREAMS) * STREAMS
    moved = BF16 * t * hidden * (STREAMS + 1)
    return Cost(moved + FP32 * fn * STREAMS * hidden, 2 * t * fn * STREAMS * hidden)


def hyper_write(hidden: int, t: int) -> Cost:
    """A sublayer's output and the streams read, the new streams written."""
    return Cost(BF16 * t * (2 * STREAMS + 1) * hidden, 0)


def compressor_tail(t: int, series: int, width: int, row: int, ratio: int) -> Cost:
    """Pool, norm, rotate, round and store what the projections gave in fp32; an entry of `row` bytes for each window.

    A token that closes no window is read and kept, and one that does reads what was kept.
    """
    kept = 2 * FP32 * series * width * (ratio if t < ratio else 0)
    return Cost(2 * FP32 * t * series * width + kept + row * max(1, t // ratio), 0)


def layer(shape: V4, kind: str, context: int, t: int) -> dict[str, Cost]:
    """The parts of a layer for t tokens after `context`: FP8 and FP4 weights, FP8 entries, FP4 index keys."""
    hidden, series = shape.hidden, 2 if kind == "CSA" else 1
    inner, low = shape.heads * HEAD_DIM, shape.o_groups * shape.o_lora
    n = (context + t) // RATIOS[kind]
    seen = min(shape.index_topk, n) if kind == "CSA" else n
    read = min(n, t * seen)
    parts = {
        "query": linear("fp8", shape.q_lora, hidden, t) + linear("fp8", inner, shape.q_lora, t),
        "KV": linear("fp8", HEAD_DIM, hidden, t),
        "compressor": linear("bf16", 2 * series * HEAD_DIM, hidden, t),
        "attention": attention(shape.heads, t, seen, read, "fp8"),
        "output": linear("fp8", low, inner // shape.o_groups, t, shape.o_groups) + linear("fp8", hidden, low, t),
        "router": linear("bf16", shape.held, hidden, t),
        "experts": experts(shape, t, chosen_experts(shape.held, t)),
        "shared expert": Cost(
            3 * weight_bytes("fp8", shape.intermediate, hidden), 6 * t * hidden * shape.intermediate
        ),
        "mHC": hyper_read(hidden, t) + hyper_read(hidden, t) + hyper_write(hidden, t) + hyper_write(hidden, t),
    }  # fmt: skip
    if kind == "CSA":
        wide = INDEX_HEADS * INDEX_DIM
        parts["index projections"] = (
            linear("fp8", wide, shape.q_lora, t)
            + linear("bf16", INDEX_HEADS, hidden, t)
            + linear("bf16", 4 * INDEX_DIM, hidden, t)
        )
        parts["index scores"] = index_scores("fp4", n, t, stored=False)
        parts["top-k"] = top_k(n, t, seen)
    return parts


def shard_middle(n: int, heads: int, kv_heads: int, head_dim: int, rank: int) -> Cost:
    """Decode over n tokens in Shard's 4-bit form: keys rebuilt for each KV head, then scores and sums of a query."""
    row = rank // 2 + kv_heads * head_dim // 4
    basis = kv_heads * head_dim * rank
    return Cost(n * row + basis, n * (2 * basis + 4 * heads * head_dim))


def shard_stream(n: int, kv_heads: int, head_dim: int, bits: int, value_bits: int, heads: int) -> Cost:
    """Decode over n tokens of Shard's stream."""
    rows = n * kv_heads * (head_dim * (bits + value_bits) // 8 + 2 * BF16)
    return Cost(rows, 4 * n * heads * head_dim)


def differential(t: int, slots: int, heads: int, kv_heads: int, head_dim: int, *, own: bool) -> Cost:
    """Two attentions of t tokens to all slots and, where there are any, to their own and earlier keys of the block."""
    rows = slots + (t if own else 0)
    moved = BF16 * 2 * (rows * kv_heads * head_dim + t * heads * head_dim)
    keys = t * slots + (t * (t + 1) // 2 if own else 0)
    return Cost(moved, 2 * 4 * keys * heads * head_dim)


def evictions(n: int, kv_heads: int, head_dim: int, exact: int, summary: int) -> Cost:
    """Offer n tokens to both banks: values of one and keys of the other are read for each, as a serial scan does."""
    return Cost(
        n * BF16 * kv_heads * head_dim * (exact + summary + 2 + 4), 2 * n * kv_heads * head_dim * (exact + summary)
    )
