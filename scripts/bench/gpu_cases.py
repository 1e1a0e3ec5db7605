"""The cases of `gpu`: every op with a Triton kernel at the dimensions of V4-Flash, V4-Pro and Llama-3.1-8B.

A case is an op, its inputs as they are drawn, what its result may be off, and what it costs at least: the bytes that
must be read and written once, and the FLOPs of its matrix products, a multiplication with its addition being two.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.differential import banks
from fathom.kernels.differential import cpu as differential_cpu
from fathom.kernels.differential import triton as differential
from fathom.kernels.formats import coded_rows, rows
from fathom.kernels.formats.stored import (
    CodebookValues,
    CodedRows,
    Dense,
    EigenKeys,
    Fp4,
    Fp4Keys,
    Fp8,
    Fp8Entries,
    Fp8Keys,
    Rows,
    TokenRing,
    Weight,
)  # fmt: skip
from fathom.kernels.indexer import reference as indexer_reference
from fathom.kernels.indexer import topk
from fathom.kernels.indexer import triton as indexer
from fathom.kernels.linear.reference import ByPosition, Product
from fathom.kernels.ops import REFERENCE, Ops
from fathom.kernels.rope.reference import frequencies
from fathom.kernels.shard import cpu as shard_cpu
from fathom.kernels.shard import reference as shard_reference
from fathom.kernels.shard import triton as shard
from fathom.kernels.tripwires import triton as tripwires
from fathom.kernels.triton_ops import TRITON
from fathom.model.cache.gqa import all_heads
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_settings import CodaSettings
from fathom.runtime.plan.gpus import GPUS
from fathom.runtime.plan.weights import stored_bytes
from fathom.scripts.make.values import E2M1_MEAN_SQUARE, E4M3_DEVIATION

# --- the models, as published


class V4(NamedTuple):
    """One published model; the fields are named as in `ModelConfig`."""

    name: str
    hidden: int
    heads: int
    q_lora: int
    o_groups: int
    o_lora: int
    index_topk: int
    experts: int
    intermediate: int
    routed_scaling: float


FLASH: Final = V4("V4-Flash", 4096, 64, 1024, 8, 1024, 512, 256, 2048, 1.5)
PRO: Final = V4("V4-Pro", 7168, 128, 1536, 16, 1024, 1024, 384, 3072, 2.5)
MODELS: Final = (FLASH, PRO)
HEAD_DIM, ROPE, WINDOW, STREAMS, CHOSEN = 512, 64, 128, 4, 6  # what the two agree in
INDEX_HEADS, INDEX_DIM = 64, 128
SINKHORN, EPS, LIMIT = 20, 1e-6, 10.0
RANKS: Final = 8  # that Pro is cut over where a case is of one
RATIOS: Final = {"CSA": 4, "HCA": 128}
CSA, HCA = RATIOS.values()
# Llama-3.1-8B's attention, with the sizes of Shard and CoDA that the project runs it with
HEADS, KV, D, RANK = 32, 8, 128, 192  # RANK of Shard's basis
RING, EXACT, SUMMARY = SLOTS = (256, 64, 64)  # of CoDA
EXACT_KEYS: Final = 68  # keys at both ends of Shard's context that are kept as they are
MILLION: Final = 1 << 20
VOCABULARY: Final = 129280
CONTEXTS: Final = {"4K": 4096, "128K": 131072, "1M": MILLION}
CHUNK: Final = 8192  # tokens of a prefill
CHECKED: Final = 4  # tokens of it that are compared, where comparing takes long

# --- what a case costs at least

BF16, FP32 = 2, 4
KEY_BYTES: Final = {"bf16": 2 * INDEX_DIM, "fp8": INDEX_DIM + 4, "fp4": INDEX_DIM // 2 + INDEX_DIM // 32}
CODE_BITS: Final = 6  # of `--kv shard`
ENTRY_BYTES: Final = {
    "bf16": 2 * HEAD_DIM,
    "fp8": 584,  # 448 E4M3, 64 BF16, 7 scales, 1 of padding
    "codes": HEAD_DIM * CODE_BITS // 8 + 2,
}


def _bandwidth(gpu: str) -> float:
    found = GPUS[gpu].rates
    assert found is not None, f"nobody told the bandwidth of {gpu}"
    return found.bandwidth


ROOFS: Final = {  # by a part of the device's name: bytes a second read, and FLOPs a second in BF16
    "H200": (_bandwidth("h200"), 790e12),  # measured on one
    "H100 80GB HBM3": (_bandwidth("h100"), 790e12),
    "B200": (_bandwidth("b200"), 2250e12),  # nominal
}
ASKED_OF: Final = "H200"


class Cost(NamedTuple):
    """What a case takes at least."""

    bytes: int
    flops: int

    def floor_us(self, roof: tuple[float, float]) -> float:
        """Microseconds that no kernel can stay below: of its bytes or of its FLOPs, whichever takes longer."""
        return 1e6 * max(self.bytes / roof[0], self.flops / roof[1])

    def at(self, *, of_bytes: float = 0.0, of_flops: float = 0.0) -> float:
        """Microseconds on an H200 at a share of the rate of bytes, or of FLOPs."""
        bytes_s, flops_s = ROOFS[ASKED_OF]
        return 1e6 * (self.flops / (of_flops * flops_s) if of_flops else self.bytes / (of_bytes * bytes_s))


def moved(*size: int, times: int = 2) -> Cost:
    """BF16 numbers of this shape, so many times read or written."""
    return Cost(times * BF16 * torch.Size(size).numel(), 0)


def weight_bytes(form: str, out: int, columns: int) -> int:
    """Bytes of a matrix as stored: "bf16", or with scales "fp8" (per 128 x 128) or "fp4" (per 32 columns)."""
    return stored_bytes(Form[form.upper()], (out, columns))


def linear_cost(form: str, out: int, columns: int, t: int, groups: int = 1) -> Cost:
    """``x @ W^T`` of [out, columns], or of `groups` of rows, each with columns of its own; activations in BF16."""
    return Cost(weight_bytes(form, out, columns) + BF16 * t * (groups * columns + out), 2 * t * out * columns)


def experts_cost(shape: V4, t: int) -> Cost:
    """Routed FP4 experts for t tokens of six each, all equally likely; the sum is fp32."""
    weights = _experts_read(shape, t) * 3 * weight_bytes("fp4", shape.intermediate, shape.hidden)
    return Cost(weights + t * shape.hidden * (BF16 + FP32), 6 * t * CHOSEN * shape.hidden * shape.intermediate)


def halves_costs(shape: V4, t: int, ranks: int) -> tuple[Cost, Cost]:
    """The same of a rank's rows: up to its columns of what w2 is given, and down to its columns of the sum."""
    read, inner, out = _experts_read(shape, t), shape.intermediate // ranks, shape.hidden // ranks
    up = read * 2 * weight_bytes("fp4", inner, shape.hidden) + BF16 * t * (shape.hidden + CHOSEN * inner)
    down = read * weight_bytes("fp4", out, shape.intermediate) + t * (BF16 * CHOSEN * shape.intermediate + FP32 * out)
    return Cost(up, 4 * t * CHOSEN * shape.hidden * inner), Cost(down, 2 * t * CHOSEN * out * shape.intermediate)


def _experts_read(shape: V4, t: int) -> int:
    """How many experts some of t tokens go to."""
    return round(shape.experts * (1 - (1 - CHOSEN / shape.experts) ** t))


def scores_cost(form: str, n: int, t: int, *, stored: bool) -> Cost:
    """Scores of n keys by t tokens; `stored`: written as fp32, else reduced to a selection that is not counted."""
    read = KEY_BYTES[form] * n + t * INDEX_HEADS * (BF16 * INDEX_DIM + FP32)
    return Cost(read + (FP32 * t * n if stored else 0), 2 * t * n * INDEX_HEADS * INDEX_DIM)


def attention_cost(heads: int, t: int, entries: int, read: int, form: str) -> Cost:
    """Attention of t tokens to their windows and to `entries` each; `read`: entries that are read at least, of all."""
    window, given = BF16 * HEAD_DIM * (WINDOW + t - 1), 2 * BF16 * t * heads * HEAD_DIM
    return Cost(ENTRY_BYTES[form] * read + window + given, 4 * t * heads * (WINDOW + entries) * HEAD_DIM)


def hyper_costs(hidden: int, t: int) -> dict[str, Cost]:
    """By op: what it reads and writes of streams, and the weights of their mixing."""
    x, fn = BF16 * t * hidden, (2 + STREAMS) * STREAMS * STREAMS * hidden
    return {
        "read_streams": Cost(x * (STREAMS + 1) + FP32 * fn, 2 * t * fn),
        "hyper_weights": Cost(x * STREAMS + FP32 * fn, 2 * t * fn),
        "collapse": Cost(x * (STREAMS + 1), 0),
        "expand": Cost(x * (2 * STREAMS + 1), 0),
    }


def layer_costs(shape: V4, kind: str, context: int, t: int) -> dict[str, Cost]:
    """The parts of a layer for t tokens after `context`: FP8 and FP4 weights, FP8 entries, FP4 index keys."""
    hidden, n = shape.hidden, (context + t) // RATIOS[kind] if kind in RATIOS else 0
    inner, low = shape.heads * HEAD_DIM, shape.o_groups * shape.o_lora
    seen = min(shape.index_topk, n) if kind == "CSA" else n
    hyper = {op: hyper_costs(hidden, t)[op] for op in ("read_streams", "expand")}
    parts = {
        "query, down": linear_cost("fp8", shape.q_lora, hidden, t),
        "query, up": linear_cost("fp8", inner, shape.q_lora, t),
        "KV": linear_cost("fp8", HEAD_DIM, hidden, t),
        "attention": attention_cost(shape.heads, t, seen, min(n, t * seen), "fp8"),
        "output, in groups": linear_cost("fp8", low, inner // shape.o_groups, t, shape.o_groups),
        "output": linear_cost("fp8", hidden, low, t),
        "router": linear_cost("bf16", shape.experts, hidden, t),
        "experts": experts_cost(shape, t),
        "shared expert": Cost(
            3 * weight_bytes("fp8", shape.intermediate, hidden), 6 * t * hidden * shape.intermediate
        ),
        **{f"mHC, {op} for {half}": cost for half in ("attention", "experts") for op, cost in hyper.items()},
    }  # fmt: skip
    if kind in RATIOS:
        parts["compressor"] = linear_cost("bf16", (4 if kind == "CSA" else 2) * HEAD_DIM, hidden, t)
    if kind == "CSA":
        parts |= {
            "index queries": linear_cost("fp8", INDEX_HEADS * INDEX_DIM, shape.q_lora, t),
            "index weights": linear_cost("bf16", INDEX_HEADS, hidden, t),
            "index compressor": linear_cost("bf16", 4 * INDEX_DIM, hidden, t),
            "index scores": scores_cost("fp4", n, t, stored=False),
            "top-k": Cost(FP32 * t * (n + seen), 0),
        }
    return parts


# --- inputs

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LARGEST: Final = 416.0  # of the E4M3 values, as `scripts.make.values` draws them


class Draw:
    """Where the tensors of a case come from; `values`: whether they are drawn, or left as they are allocated."""

    def __init__(self, device: torch.device, seed: int, *, values: bool = True) -> None:
        self.device, self.values = device, values
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Normal numbers."""
        if not self.values:
            return torch.empty(shape, dtype=dtype, device=self.device)
        out = torch.empty(shape, dtype=torch.float32 if dtype == E4M3 else dtype, device=self.device)
        out.normal_(0.0, scale, generator=self.generator)
        return out.clamp_(-LARGEST, LARGEST).to(E4M3) if dtype == E4M3 else out

    def uniform(self, *shape: int, low: float = 0.0) -> Tensor:
        """fp32 numbers from `low` to 1."""
        out = torch.empty(shape, device=self.device)
        return out.uniform_(low, 1.0, generator=self.generator) if self.values else out

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        """uint8 from `low` to below `high`, all values equally likely."""
        out = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return out.random_(low, high, generator=self.generator) if self.values else out

    def tokens(self, count: int, vocabulary: int) -> Tensor:
        """Ids of tokens, [count] int64, all equally likely: of fewer different ones some experts get many, most few."""
        return torch.empty(count, dtype=torch.int64, device=self.device).random_(vocabulary, generator=self.generator)

    def scales(self, *shape: int, power: int) -> Tensor:
        """E8M0 scales: half of them 2^power, half the next."""
        return self.bytes(*shape, low=127 + power, high=129 + power).view(E8M0)

    def weight(self, form: str, *shape: int) -> Weight:
        """A matrix [out, in], or stacked ones [e, out, in], of about unit gain: "bf16", "fp8" or "fp4"."""
        *lead, out, columns = shape
        if form == "bf16":
            return Dense(self.normal(*shape, scale=columns**-0.5))
        size = E4M3_DEVIATION if form == "fp8" else E2M1_MEAN_SQUARE**0.5
        power = int(torch.tensor(columns**-0.5 / size).log2().floor())  # the power of two below the scale
        if form == "fp8":
            scale = self.scales(*lead, -(-out // 128), -(-columns // 128), power=power)
            return Fp8(self.normal(*shape, dtype=E4M3, scale=size), scale)
        packed = self.bytes(*lead, out, columns // 2).view(torch.int8)
        return Fp4(packed, self.scales(*lead, out, columns // 32, power=power))

    def rows(self, form: str, n: int, d: int) -> Rows:
        """Compressed entries (of `HEAD_DIM`) or index keys of about unit size.

        "bf16", "fp8"; of keys "fp4"; of entries "codes", which are rotated and all equally likely.
        """
        if form == "bf16":
            return self.normal(n, d)
        if form == "codes":
            norm = self.uniform(n, low=0.5).mul((d / 2.7) ** 0.5).half()  # 2.7 is the mean square of the centroids
            signs = coded_rows.random_signs(d, 0, self.device)
            return CodedRows(norm, self.bytes(n, d * CODE_BITS // 8), CODE_BITS, signs)
        if form == "fp4":
            return Fp4Keys(self.bytes(n, d // 2), self.scales(n, d // 32, power=-2))
        if d == HEAD_DIM:
            scale = self.scales(*rows.fp8_entries(n, d, ROPE, self.device).scale.shape, power=-7)
            return Fp8Entries(self.normal(n, d - ROPE, dtype=E4M3, scale=E4M3_DEVIATION), self.normal(n, ROPE), scale)
        scale = rows.fp8_keys(n, d, self.device).scale.fill_(2.0**-7)
        return Fp8Keys(self.normal(n, d, dtype=E4M3, scale=E4M3_DEVIATION), scale)

    def experts_of(self, t: int, k: int, experts: int) -> Tensor:
        """Ids of k distinct experts for each token, all equally likely: [t, k] int64."""
        if not self.values:
            return torch.empty(t, k, dtype=torch.int64, device=self.device)
        return self.uniform(t, experts).argsort(1)[:, :k].contiguous()

    def chosen(self, t: int, k: int, n: int) -> Tensor:
        """K distinct entries of n for each token, one of each run of ``n // k``, in ascending order: [t, k] int32."""
        inside = (self.uniform(t, k) * (n // k)).to(torch.int32)
        return torch.arange(k, device=self.device, dtype=torch.int32) * (n // k) + inside

    def position(self, n: int) -> Tensor:
        """A position as a captured step has it: [] int64 on the device."""
        return torch.full((), n, dtype=torch.int64, device=self.device)


class _Drawn:
    """`of.normal(3, 4)` is what draws it from a `Draw`: inputs as data, made when a case is run."""

    def __getattr__(self, name: str) -> Callable[..., Callable[[Draw], Any]]:
        return lambda *size, **more: lambda draw: getattr(draw, name)(*size, **more)


of: Final = _Drawn()
fp32: Final = partial(of.normal, dtype=torch.float32)

# --- what is right


class Tolerance(NamedTuple):
    """What may lie between a result and the expected one; `error` is in units of it, so up to 1 is right."""

    of_each: float = 0.0  # of the expected number's size
    of_rms: float = 0.0  # of the root mean square of all expected numbers
    differing: float | None = None  # or: the share of numbers that may differ, by however much

    def __str__(self) -> str:
        """As the page says it."""
        if self.differing is not None:
            return f"{self.differing:.2g} of all differ"
        parts = ((self.of_each, "of each"), (self.of_rms, "of the rms"))
        return " + ".join(f"{size:.2g} {what}" for size, what in parts if size) or "bit for bit"

    def error(self, ours: Tensor, expected: Tensor) -> float:
        """Largest difference, in units of what may be; infinite where one side alone is no finite number."""
        a, b = ours.float(), expected.float()
        if a.shape != b.shape or bool((a.isfinite() != b.isfinite()).any()):
            return float("inf")
        a, b = (x.nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
        off = (a - b).abs()
        if self.differing is not None:
            return float((off > 0).float().mean()) / self.differing
        if not self.of_each and not self.of_rms:
            return float("inf") if bool(off.any()) else 0.0
        allowed = self.of_each * b.abs() + self.of_rms * b.square().mean().sqrt()
        return float((off / allowed.clamp_min(torch.finfo(torch.float32).tiny)).max())


BITS: Final = Tolerance()
STEP: Final = Tolerance(of_each=2**-7)  # both sides round to BF16 what is nearly equal: a step of it
NEAR_STEP: Final = STEP._replace(of_rms=2**-20)
TWO_STEPS: Final = Tolerance(of_each=2**-6, of_rms=2**-10)  # rounded twice, and normed by a sum in another order
WEIGHTS: Final = Tolerance(
    of_each=2**-14, of_rms=2**-14
)  # fp32 sums of 28672 terms in another order, 20 normalisations
EDGES: Final = Tolerance(differing=2**-6)  # of narrow codes: a BF16 step before them moves those at an edge by a step
# A BF16 step of each side, and sums of up to 28672 products in another order: 64 ulp of fp32 of the sum of their sizes,
# which for normal numbers is 0.64 times the root of their number times the rms of the sums
PRODUCT: Final = Tolerance(of_each=2**-7, of_rms=2**-11)
# Beside that, Hopper's FP8 tensor cores cut each of the 33 numbers that they add at once to 12 bits or more below the
# largest, of 128 products of normal numbers below 32 times their rms: by up to u = 16 2^-12 of it, to either side, so
# with a variance of u^2 / 3. A sum of n of them is 6 sqrt(33 / 32 n / 3) u off at most, of an rms of sqrt(n): 2^-6
FP8_SUMS: Final = Tolerance(of_each=2**-7, of_rms=2**-6)
# Between the products of an expert stand numbers rounded to E4M3 in groups of 128: at the edge of a step they go either
# way, 2^-4 of themselves, and at the edge of a scale a whole group goes with them
ROUNDED: Final = Tolerance(of_each=2**-7, of_rms=2**-4)
# 64 ulp of fp32 of the sum of 64 x 128 products' sizes, 60 times a score
SCORES: Final = Tolerance(of_each=2**-12, of_rms=2**-11)
# A selected entry may score below the k-th by this share of the row's largest score: the two are as good as equal
PICKED: Final = 2**-12
# The same by FP8 products, of whose sums a Hopper keeps some 14 bits: 2^-13 of a sum for each of four steps, where what
# is left of it is an eighth
PICKED_FP8: Final = 2**-8
# Masses are rounded to BF16 before they multiply keys: half a step of it, 2^-9, of the mean size of keys; and a step of
# the result each. `KEYS` is in the numbers of the keys, which are of unit size
KEYS: Final = 2**-9
# Operands of fp16 are off by 2^-12 of themselves, so logits of up to 8 by 2^-8; queries, keys and results of BF16 each
# bring half a step of their own. Of CoDA the noise query is rounded to BF16, and masses before they multiply values;
# the norm divides by what is left
LOGITS: Final = Tolerance(of_each=2**-6, of_rms=2**-5)
MOVED: Final = Tolerance(of_each=2**-6, of_rms=2**-10)  # a BF16 average may round the other way

Given = list[Any]  # the inputs of a call


class Case(NamedTuple):
    """One row of the table."""

    part: str  # the Triton file of `kernels` that is measured
    label: str
    cost: Cost
    op: str | tuple[Callable[..., Any], Callable[..., Any]]  # of `Ops`, held against the reference's; or these two
    inputs: tuple[Any, ...]  # of the op; what a `Draw` makes, or constants
    right: Tolerance | tuple[Tolerance, ...]  # of the result, or of each tensor of it
    us: float | None = None  # what is asked of it on an H200, at most
    compiled: bool = False  # whether it stands for its kernels where they are only compiled
    error: Callable[[Any, Given, Given], float] | None = None  # of a result, its inputs, and those drawn anew; or:
    told: str = ""  # what may be off, in the words of the page, and from what, where `error` says how far
    options: dict[str, Any] = {}  # noqa: RUF012 -- of the op

    def build(self, draw: Draw, ops: Ops = TRITON) -> Callable[[], tuple[Any, Given]]:
        """Return a call on inputs of its own, which gives its result and them."""
        given = self.given(draw)
        op = partial(getattr(ops, self.op) if isinstance(self.op, str) else self.op[0], *given, **self.options)
        return lambda: (op(), given)

    def given(self, draw: Draw) -> Given:
        """Inputs."""
        return [part(draw) if callable(part) else part for part in self.inputs]

    def off(self, ours: Any, given: Given, draw: Draw) -> float:
        """How far a result is off, in units of what may be; `draw` is as the one that the inputs came from."""
        fresh = self.given(draw)  # ops may write into theirs
        if self.error is not None:
            return self.error(ours, given, fresh)
        oracle = getattr(REFERENCE, self.op) if isinstance(self.op, str) else self.op[1]
        expected = oracle(*fresh, **self.options)
        if isinstance(self.right, Tolerance):
            return self.right.error(ours, expected)
        return max(bound.error(a, b) for bound, a, b in zip(self.right, ours, expected, strict=True))

    @property
    def bound(self) -> str:
        """What may be off, and from what."""
        bounds = [self.right] if isinstance(self.right, Tolerance) else dict.fromkeys(self.right)
        return self.told or f"{'; '.join(map(str, bounds))}, from reference"


# --- what moves activations


def activations() -> Iterator[Case]:
    """RMSNorm; rotation, rounding and the Hadamard transform; the activation of the shared expert."""
    for shape, t in product(MODELS, (1, CHUNK)):
        for what, size in {"hidden": (t, shape.hidden), "heads": (t, shape.heads, HEAD_DIM)}.items():
            weight, label = of.uniform(size[-1]) if what == "hidden" else None, f"{shape.name}, {what}, {t} tokens"
            given = (of.normal(*size), weight, EPS)
            yield Case("norm", label, moved(*size), "rms_norm", given, STEP, compiled=(shape, t) == (PRO, 1))
    for t in (1, CHUNK):
        for model, op, size, right, rest in (
            ("V4-Pro", "simulate_fp8", (t, PRO.hidden), BITS, (128,)),
            ("V4-Pro", "simulate_fp4", (t, INDEX_HEADS, INDEX_DIM), BITS, (32,)),
            ("V4-Pro", "hadamard", (t, INDEX_HEADS, INDEX_DIM), NEAR_STEP, ()),
            ("V4-Pro", "rotate", (t, PRO.heads, HEAD_DIM), BITS, 2 * (of.uniform(t, ROPE // 2),)),
            ("V4-Pro", "norm_rotate", (t, PRO.heads, HEAD_DIM), STEP, (None, EPS, *2 * (of.uniform(t, ROPE // 2),), 0)),
            ("Llama-3.1-8B", "rotate_halves", (t, HEADS, D), BITS, 2 * (of.uniform(t, D // 2),)),
        ):
            angles = 2 * FP32 * t * {"rotate": ROPE // 2, "norm_rotate": ROPE // 2, "rotate_halves": D // 2}.get(op, 0)
            cost, given = Cost(moved(*size).bytes + angles, 0), (of.normal(*size), *rest)
            told = f"{STEP}, and of both products of a sum, from reference"
            how = (_norm_rotate_off, told) if op == "norm_rotate" else ()
            yield Case("quantise", f"{model}, {op}, {t} tokens", cost, op, given, right, None, t == 1, *how)
    for shape, t in product(MODELS, (1, CHUNK)):
        gate, up = 2 * (of.normal(t, shape.intermediate),)
        cost, label, first = moved(t, shape.intermediate, times=3), f"{shape.name}, {t} tokens", (shape, t) == (PRO, 1)
        yield Case("swiglu", label, cost, "swiglu", (gate, up, LIMIT, None), NEAR_STEP, compiled=first)


def _norm_rotate_off(ours: Tensor, _: Given, fresh: Given) -> float:
    """Of a number that was rotated, a cos - b sin, a and b may each be a BF16 step off before they nearly cancel."""
    x, weight, eps, cos, sin, _ = fresh
    normed = REFERENCE.rms_norm(x, weight, eps)
    expected = REFERENCE.rotate(normed, cos, sin).float()
    allowed, half = expected.abs(), cos.shape[-1]
    a, b = normed[..., -2 * half :].float().abs().unflatten(-1, (half, 2)).unbind(-1)
    c, s = cos.abs()[:, None], sin.abs()[:, None]
    allowed[..., -2 * half :] += torch.stack((a * c + b * s, a * s + b * c), -1).flatten(-2)
    off = (ours.float() - expected).abs() / (STEP.of_each * allowed).clamp_min(torch.finfo(torch.float32).tiny)
    return float(off.nan_to_num(float("inf"), float("inf")).max())


def gates() -> Iterator[Case]:
    """Routing by score of one token, and what a captured call measures of it."""
    for shape in MODELS:
        size, scale = shape.experts, shape.routed_scaling
        given = fp32(1, size), fp32(size, scale=0.1), CHOSEN, scale
        cost, label, first = Cost(2 * FP32 * size + 12 * CHOSEN, 0), f"{shape.name}, one token", shape == PRO
        yield Case("gate", label, cost, "route", given, (BITS, WEIGHTS), compiled=first)
        x, weight = of.normal(1, shape.hidden), of.weight("bf16", size, shape.hidden)
        product, label = linear_cost("bf16", size, shape.hidden, 1), f"{label}, with its logits"
        routed = x, weight, fp32(size, scale=0.1), None, CHOSEN, scale
        yield Case("gate", label, product, "gate", routed, (BITS, WEIGHTS), compiled=first)
        label = f"{shape.name}, one token"
        ids, cost = of.experts_of(1, CHOSEN, size), Cost(12 * CHOSEN, 0)
        watched = ids, of.uniform(1, CHOSEN), scale, size
        label = f"experts of a token, {label}"
        yield Case("tripwires", label, cost, (_routing, _routing_equation), watched, NEAR_STEP, compiled=first)


def _routing(ids: Tensor, weights: Tensor, scale: float, experts: int) -> Tensor:
    """How far the weights are off, in the low half of the second cell; no weights are off by less than nothing."""
    cells = torch.full((2,), tripwires.NOTHING, device=ids.device)
    tripwires.measure([tripwires.routing(ids, weights, scale, experts, -1.0)], cells, 0)
    return cells[1:].view(torch.int32)[:1].view(torch.float32)


def _routing_equation(ids: Tensor, weights: Tensor, scale: float, experts: int) -> Tensor:
    del ids, experts
    return (weights.sum(1) - scale).abs()


def hypers() -> Iterator[Case]:
    """Streams read and written apart from their weights; their weights; and `read_streams`: that and the norm."""
    fn, near = (2 + STREAMS) * STREAMS, STEP._replace(of_rms=2**-10)
    for shape, t in product(MODELS, (1, 32, CHUNK)):
        d, costs = shape.hidden, hyper_costs(shape.hidden, t)
        x, pre = of.normal(t, STREAMS, d), of.uniform(t, STREAMS)
        mix = (fp32(fn, STREAMS * d, scale=(STREAMS * d) ** -0.5), of.uniform(3, low=0.3), fp32(fn, scale=0.5))
        weights = (x, *mix, SINKHORN, EPS, EPS)
        asked = 10.0 if t <= 32 else costs["read_streams"].at(of_bytes=0.7)
        for part, op, given, right, us in (
            ("hyper", "read_streams", (*weights, of.uniform(d, low=0.5), EPS), (TWO_STEPS, *3 * (WEIGHTS,)), asked),
            ("hyper", "hyper_weights", weights, 3 * (WEIGHTS,), None),
            ("streams", "collapse", (x, pre), near, None),
            ("streams", "expand", (of.normal(t, d), x, pre, of.uniform(t, STREAMS, STREAMS)), near, None),
        ):
            yield Case(part, f"{op}, {shape.name}, {t} tokens", costs[op], op, given, right, us, (shape, t) == (PRO, 1))


def compressors() -> Iterator[Case]:
    """The compressor's tail (pool, norm, rotate, round, store): a token that closes a window at 1M, a chunk at 128K."""
    kinds = (
        ("CSA entry", 2, HEAD_DIM, CSA, "kv", "fp8"),
        ("HCA entry", 1, HEAD_DIM, HCA, "kv", "fp8"),
        ("CSA key", 2, INDEX_DIM, CSA, "index", "fp4"),
    )
    for (what, series, width, ratio, rounding, form), t in product(kinds, (1, CHUNK)):
        first, wide = MILLION - 1 if t == 1 else MILLION >> 3, series * width
        kept = 2 * FP32 * wide * (ratio if t < ratio else 0)  # a token that closes no window is read and kept
        row = ENTRY_BYTES[form] if width == HEAD_DIM else KEY_BYTES[form]
        cost = Cost(2 * FP32 * t * wide + kept + row * max(1, t // ratio), 0)
        cache = of.rows(form, (first + t) // ratio, width)
        given = (
            fp32(t, wide), fp32(t, wide), partial(_tokens, series, width, ratio), of.position(first), ratio,
            of.uniform(width), EPS, fp32(ROPE // 2), rounding, cache, torch.bfloat16,
        )  # fmt: skip
        yield Case(
            "compress", f"{what} ({form}), {t} tokens", cost, "compress_at_once", given, EDGES,
            6.0 if t == 1 else cost.at(of_bytes=0.6), t == 1, partial(_entries_off, ratio),
        )  # fmt: skip


def _tokens(series: int, width: int, ratio: int, draw: Draw) -> TokenRing:
    return TokenRing(*(draw.normal(series * ratio, series * width, dtype=torch.float32) for _ in range(2)))


def _entries_off(ratio: int, _: object, given: Given, fresh: Given) -> float:
    first = fresh[3] = int(fresh[3])
    REFERENCE.compress_at_once(*fresh)
    span = (first // ratio, (first + len(fresh[0])) // ratio)
    return EDGES.error(rows.read(given[9], *span), rows.read(fresh[9], *span))


# --- what reads weights


def linears() -> Iterator[Case]:
    """The linears of a layer that are not experts, and of the shared expert, for one token, 32 and 8192."""
    for shape, t in product(MODELS, (1, 32, CHUNK)):
        inner, low = shape.heads * HEAD_DIM, shape.o_groups * shape.o_lora
        for name, form, out, columns, groups in (
            ("wq_a", "fp8", shape.q_lora, shape.hidden, 0),
            ("wq_b", "fp8", inner, shape.q_lora, 0),
            ("wkv", "fp8", HEAD_DIM, shape.hidden, 0),
            ("compressor", "bf16", 2 * HEAD_DIM, shape.hidden, 0),
            ("gate", "bf16", shape.experts, shape.hidden, 0),
            *([("head", "bf16", VOCABULARY, shape.hidden, 0)] if t == 1 else ()),
            ("wo_a, in groups", "fp8", low, inner // shape.o_groups, shape.o_groups),
            ("wo_b", "fp8", shape.hidden, low, 0),
            ("shared w1", "fp8", shape.intermediate, shape.hidden, 0),
        ):
            x = of.normal(t, groups, columns) if groups else of.normal(t, columns)
            given = (x, of.weight(form, out, columns), *((groups,) if groups else ()))
            op, label = "grouped_linear" if groups else "linear", f"{shape.name}, {name} ({form}), {t} tokens"
            cost, first = linear_cost(form, out, columns, t, groups or 1), (shape, t) == (FLASH, 1)
            compiled = first and name in {"wq_a", "compressor"}
            options = {"wide": True} if form == "bf16" else {}  # as the model multiplies them
            yield Case("linear", label, cost, op, given, PRODUCT, compiled=compiled, options=options)


def linears_of_codes() -> Iterator[Case]:
    """The FP8 linears of a layer whose input is rounded, by products of codes: of a prompt's tokens, 512 and 8192."""
    for shape, t in product(MODELS, (512, CHUNK)):
        low = shape.o_groups * shape.o_lora
        for name, out, columns in (
            ("wq_a", shape.q_lora, shape.hidden),
            ("wq_b", shape.heads * HEAD_DIM, shape.q_lora),
            ("wkv", HEAD_DIM, shape.hidden),
            ("wo_b", shape.hidden, low),
            ("shared w1", shape.intermediate, shape.hidden),
        ):
            given = of.normal(t, columns), partial(_products, columns, [("fp8", out, None)])
            label, first = f"{shape.name}, {name} (fp8), {t} tokens", (shape, t) == (FLASH, 512)
            yield Case(
                "codes", label, linear_cost("fp8", out, columns, t), "linears_fp8", given, (FP8_SUMS,),
                compiled=first and name == "wq_a", options={"deployed": True},
            )  # fmt: skip


def projections() -> Iterator[Case]:
    """What a CSA layer reads off its input for one token, in one op."""
    for shape in MODELS:
        sizes = [
            *[("fp8", shape.q_lora, None), ("fp8", HEAD_DIM, None), ("bf16", INDEX_HEADS, None)],
            *[("bf16", 2 * width, wide) for width in (HEAD_DIM, INDEX_DIM) for wide in (False, True)],
        ]
        costs = [linear_cost(form, out, shape.hidden, 1) for form, out, _ in sizes]
        given = of.normal(1, shape.hidden), partial(_products, shape.hidden, sizes)
        cost, label = Cost(*map(sum, zip(*costs, strict=True))), f"linears, {shape.name}, CSA, 1 tokens"
        right, options = tuple(PRODUCT for _ in sizes), {"deployed": True}
        yield Case("linear", label, cost, "linears", given, right, compiled=shape == PRO, options=options)


def _products(hidden: int, sizes: list[tuple[str, int, bool | None]], draw: Draw) -> list[Product]:
    """Of these forms and rows; what a compressor pools is wide, and to its gates a position's bias is added."""
    made = []
    for form, out, biased in sizes:
        bias = ByPosition(draw.normal(4, out, dtype=torch.float32), 3) if biased else None
        made.append(Product(draw.weight(form, out, hidden), biased is not None, bias))
    return made


def routed() -> Iterator[Case]:
    """FP4 experts: all rows of Flash, and those of Pro that one of eight ranks has, in both halves."""
    for t in (1, 8, 32, 512, CHUNK):
        for shape, ranks in ((FLASH, 1), (PRO, RANKS)):
            e, hidden, inner = shape.experts, shape.hidden, shape.intermediate
            ids, weights, x = of.experts_of(t, CHOSEN, e), of.uniform(t, CHOSEN), of.normal(t, hidden)
            up, down = of.weight("fp4", e, inner // ranks, hidden), of.weight("fp4", e, hidden // ranks, inner)
            ops: dict[str, tuple[tuple[Any, ...], int, Cost]]
            if ranks == 1:
                ops = {"experts": ((x, ids, weights, up, up, down, LIMIT), 3, experts_cost(shape, t))}
            else:
                costs = halves_costs(shape, t, ranks)
                ops = {
                    "experts_up": ((x, ids, weights, up, up, LIMIT), 3, costs[0]),
                    "experts_down": ((of.normal(t, CHOSEN, inner), ids, down), 2, costs[1]),
                }
            for op, (given, of_tokens, cost) in ops.items():
                checked, name = 64 if t > 512 else t, shape.name if ranks == 1 else f"{shape.name}, a rank of {ranks}"
                yield Case(
                    "experts", f"{op}, {name}, {e} experts, {t} tokens", cost, op, given, ROUNDED,
                    cost.at(of_bytes=0.45) if t <= 512 else cost.at(of_flops=0.5), t == 1,
                    partial(_experts_off, op, of_tokens, checked), f"{ROUNDED}, from reference, last {checked} tokens",
                    {"deployed": True},
                )  # fmt: skip


def routed_of_codes() -> Iterator[Case]:
    """The same of a prompt's tokens, all rows of Flash, on FP8 tensor cores."""
    for t in (512, CHUNK):
        e, hidden, inner, checked = FLASH.experts, FLASH.hidden, FLASH.intermediate, min(t, 64)
        ids, weights, x = of.experts_of(t, CHOSEN, e), of.uniform(t, CHOSEN), of.normal(t, hidden)
        up, down = of.weight("fp4", e, inner, hidden), of.weight("fp4", e, hidden, inner)
        yield Case(
            "expert_codes", f"{FLASH.name}, {e} experts, {t} tokens", experts_cost(FLASH, t), "experts_fp8",
            (x, ids, weights, up, up, down, LIMIT), ROUNDED, compiled=t == 512,
            error=partial(_experts_off, "experts_fp8", 3, checked),
            told=f"{ROUNDED}, from reference, last {checked} tokens", options={"deployed": True},
        )  # fmt: skip


def _experts_off(op: str, of_tokens: int, last: int, ours: Tensor, _: Given, fresh: Given) -> float:
    """The first so many arguments are of tokens, of which the last are compared."""
    tokens = [part[-last:] for part in fresh[:of_tokens]]
    return ROUNDED.error(ours[-last:], getattr(REFERENCE, op)(*tokens, *fresh[of_tokens:], deployed=True))


# --- what reads the context


def indexers() -> Iterator[Case]:
    """Scores of a decoded token; selections of a token and of a chunk; and top-k of scores that are there already."""

    def index(form: str, n: int, t: int) -> tuple[Any, ...]:
        return of.normal(t, INDEX_HEADS, INDEX_DIM), fp32(t, INDEX_HEADS), of.rows(form, n // CSA, INDEX_DIM)

    ops = (indexer.index_scores, indexer_reference.index_scores)
    for form, (context, n) in product(KEY_BYTES, CONTEXTS.items()):
        label, cost = f"scores, {form} keys, one token at {context}", scores_cost(form, n // CSA, 1, stored=True)
        yield Case("indexer", label, cost, ops, index(form, n, 1), SCORES, 20.0)
    for shape, form, t, (context, n) in product(MODELS, KEY_BYTES, (1, CHUNK), CONTEXTS.items()):
        if t > n:
            continue
        cost, given = scores_cost(form, n // CSA, t, stored=False), (of.position(n - t), CSA, shape.index_topk)
        yield Case(
            "indexer", f"select, {shape.name}, {form} keys, {t} tokens at {context}", cost, "select",
            (*index(form, n, t), *given), BITS, 55.0 if t == 1 else cost.at(of_flops=1.0),
            (shape, t, context, form) == (PRO, 1, "1M", "fp4"), _selection_off,
            f"{PICKED:.2g} of the row's largest score, from reference, last {min(t, CHECKED)} tokens",
        )  # fmt: skip
    n = MILLION // CSA
    for shape, t in product(MODELS, (1, CHUNK)):
        cost, given = scores_cost("fp8", n, t, stored=False), (of.position(MILLION - t), CSA, shape.index_topk)
        yield Case(
            "indexer", f"select by FP8 scores, {shape.name}, {t} tokens at 1M", cost, "select_fp8",
            (*index("fp8", MILLION, t), *given), BITS, compiled=(shape, t) == (PRO, 1), error=_fp8_selection_off,
            told=f"{PICKED_FP8:.2g} of the row's largest score, from reference, last {min(t, CHECKED)} tokens",
        )  # fmt: skip
    for shape, t in product(MODELS, (1, 32, 512)):
        k, label = shape.index_topk, f"{shape.index_topk} of {n}, {t} rows"
        cost, us, first = Cost(FP32 * t * (n + k), 0), {1: 35.0, 32: 60.0}.get(t), (shape, t) == (PRO, 1)
        best, ranked = (topk.top_k, torch.topk), (fp32(t, n), of.position(n * CSA), CSA, k)  # every row sees all
        yield Case("topk", label, cost, best, ranked, BITS, us, first, _top_k_off, "the same scores, as torch.topk")


def _selection_off(ours: Tensor, _: Given, fresh: Given) -> float:
    q, weights, keys, position, ratio, _k = fresh
    last = min(len(q), CHECKED)
    scores = indexer_reference.index_scores(q[-last:], weights[-last:], keys)
    return picked_off(scores, ours[-last:], int(position) + len(q) - last, ratio)


def _fp8_selection_off(ours: Tensor, given: Given, fresh: Given) -> float:
    q, *rest = fresh
    rounded = REFERENCE.simulate_fp8(q, q.shape[-1])
    return _selection_off(ours, given, [rounded, *rest]) * PICKED / PICKED_FP8


def picked_off(scores: Tensor, picked: Tensor, first: int, ratio: int) -> float:
    """How far below the k-th best score the worst selected entry lies, in units of `PICKED`; inf: not a selection.

    `scores` [t, n] are the reference's, `picked` [t, k] of tokens ``first ..``: distinct visible entries in ascending
    order, and -1 behind them where fewer are visible than k.
    """
    worst = 0.0
    for i, (row, found) in enumerate(zip(scores, picked.long(), strict=True)):
        seen = min((first + i + 1) // ratio, row.shape[0])
        wanted = min(seen, found.shape[0])
        kept, rest = found[:wanted], found[wanted:]
        ordered = bool((kept[1:] > kept[:-1]).all()) and bool((rest == -1).all())
        if not ordered or bool(((kept < 0) | (kept >= seen)).any()):
            return float("inf")
        if wanted:
            visible = row[:seen]
            least = visible.topk(wanted).values[-1]
            worst = max(worst, float((least - visible[kept].min()) / visible.abs().max().clamp_min(1e-30)) / PICKED)
    return worst


def _top_k_off(ours: Tensor, _: Given, fresh: Given) -> float:
    found = fresh[0].gather(1, ours.long()).sort(1).values
    return BITS.error(found, fresh[0].topk(fresh[3], dim=1).values.sort(1).values)


def attentions() -> Iterator[Case]:
    """One token and a chunk: the window alone, selected entries, all entries."""
    kinds = (("SWA", "4K"), ("CSA", "1M"), ("HCA", "4K"), ("HCA", "128K"), ("HCA", "1M"))
    for shape, t, (kind, context), form in product(MODELS, (1, CHUNK), kinds, ("fp8", "bf16", "codes")):
        if kind == "SWA" and form != "fp8":  # it reads no entries
            continue
        if form == "codes" and (shape is PRO or (kind, context) not in {("CSA", "1M"), ("HCA", "128K")}):
            continue
        end, ratio = max(CONTEXTS[context], t), RATIOS.get(kind, 0)
        n = end // ratio if ratio else 0
        seen = shape.index_topk if kind == "CSA" else n
        cost = attention_cost(shape.heads, t, seen, min(n, t * seen), form)
        entries = of.rows(form, n, HEAD_DIM) if ratio else None
        selected = of.chosen(t, shape.index_topk, (end - t) // ratio) if kind == "CSA" else None
        q, ring = of.normal(t, shape.heads, HEAD_DIM), of.normal(WINDOW + t - 1, HEAD_DIM)
        given = (q, ring, of.position(end - t), WINDOW, entries, ratio, selected, fp32(shape.heads))
        label = f"{kind}{f', {form} entries' if ratio else ''}, {shape.name}, {t} tokens at {context}"
        us = None if kind == "SWA" or form == "codes" else 15.0 if t == 1 else cost.at(of_flops=0.5)
        first = (shape, t, kind, context, form) == (FLASH, 1, "CSA", "1M", "fp8")
        told = f"{STEP} + {KEYS:.2g} of a key's size, from reference, last {min(t, CHECKED)} tokens"
        yield Case("attention", label, cost, "attend", given, STEP, us, first, _attention_off, told)


def _attention_off(ours: Tensor, _: Given, fresh: Given) -> float:
    q, ring, position, window, entries, ratio, selected, sink = fresh
    last = min(len(q), CHECKED)
    picks, first = None if selected is None else selected[-last:], int(position) + len(q) - last
    expected = REFERENCE.attend(q[-last:], ring, first, window, entries, ratio, picks, sink).float()
    size = 1.0 if entries is None else float(rows.read(entries, 0, min(4096, (first + last) // ratio)).abs().mean())
    off = (ours[-last:].float() - expected).abs() / (STEP.of_each * expected.abs() + KEYS * max(1.0, size))
    return float(off.nan_to_num(float("inf"), float("inf")).max())


# --- Llama-3.1-8B: Shard's attention, CoDA's differential attention, and the scan of what CoDA's ring lets go


def variants() -> Iterator[Case]:
    """Decode over a prompt in Shard's form, and over its stream of 8-bit keys and 4-bit values; CoDA's attention."""
    exact, basis = of.normal(EXACT_KEYS, KV, D), KV * D * RANK
    for n in (8192, 131072):
        # keys are rebuilt for each KV head; then scores and sums of a query
        middle = Cost(n * (RANK // 2 + KV * D // 4) + basis, n * (2 * basis + 4 * HEADS * D))
        stream = Cost(n * KV * (D * (8 + 4) // 8 + 2 * BF16), 4 * n * HEADS * D)
        for what, cost, us, form in (
            ("prompt, rank 192", middle, middle.at(of_flops=0.4), (partial(_middle, n), None)),
            ("stream, 8 + 4 bits", stream, stream.at(of_bytes=0.6), (None, partial(_stream, n))),
        ):
            given, ops = (of.normal(1, HEADS, D), exact, exact, *form, None), (shard.attend, shard_cpu.attend)
            told = f"{LOGITS}, from cpu, in fp32"
            label, first = f"{what}, one token at {n}", n == 8192
            yield Case("shard", label, cost, ops, given, LOGITS, us, first, _shard_off, told)
    slots = sum(SLOTS)
    for t, asked in ((1, 8.0), (512, None)):  # a decoded token; a block, with its own and earlier keys of the block
        own, keys = (0, t * slots) if t == 1 else (t, t * slots + t * (t + 1) // 2)
        cost = Cost(2 * BF16 * ((slots + own) * KV * D + t * HEADS * D), 2 * 4 * keys * HEADS * D)
        block = partial(_own, t) if own else None
        given = (of.normal(t, HEADS, D), partial(_noise, t), of.uniform(D, low=0.5), EPS, partial(_past, slots), block)
        both = (differential.differential_attend, differential_cpu.differential_attend)
        label = f"{t} token{'s' if own else ''} to {slots} slots"
        yield Case("differential", label, cost, both, given, LOGITS, asked, not own, told=f"{LOGITS}, from cpu")
    for n in (1, 64):  # tokens that leave the ring, offered to both banks one after the other, as a serial scan does
        cost = Cost(n * BF16 * KV * D * (EXACT + SUMMARY + 2 + 4), 2 * n * KV * D * (EXACT + SUMMARY))
        told = f"decisions alike; rows {MOVED}, from model.variants.coda, step by step"
        scan = (partial(_scan, n), _scan)
        yield Case("banks", f"{n} evicted", cost, scan, (_ring,), MOVED, 8.0 * n, n == 1, partial(_scan_off, n), told)


def _middle(n: int, draw: Draw) -> shard.Middle:
    half = torch.float16
    basis = draw.bytes(KV * D, RANK).view(torch.int8).clamp_(-127, 127)
    fine, coarse = (draw.uniform(RANK, low=0.1).mul(size).to(half) for size in (0.002, 0.2))
    none = torch.zeros(0, dtype=torch.int8)
    stored = EigenKeys(draw.bytes(n, RANK // 2), basis, fine, coarse, draw.normal(KV * D, dtype=half), none)
    codebook, largest = draw.normal(256, 4, dtype=half, scale=0.5), draw.uniform(KV, D, low=0.5).to(half)
    values = CodebookValues(draw.bytes(n, KV * D // 4), codebook, largest)
    return shard.Middle(stored, values, EXACT_KEYS // 2, frequencies(D, 5e5).to(draw.device), interleaved=False)


def _stream(n: int, draw: Draw) -> shard.Stream:
    def coded(bits: int) -> CodedRows:
        norm = draw.uniform(n * KV, low=0.5).mul(D**0.5).to(torch.float16)
        return CodedRows(norm, draw.bytes(n * KV, D * bits // 8), bits, None)

    return shard.Stream(coded(8), coded(4), draw.position(n))


def _shard_off(ours: Tensor, _: Given, fresh: Given) -> float:
    q, keys, values, middle, stream, _none = fresh
    streamed = None if stream is None else shard_reference.Stream(stream.keys, stream.values, int(stream.tokens))
    return LOGITS.error(ours, shard_cpu.attend(q.float(), keys.float(), values.float(), middle, streamed, None))


def _noise(t: int, draw: Draw) -> differential.Noise:
    theta = draw.normal(HEADS, D // 2, dtype=torch.float32)
    return differential.Noise(draw.uniform(t, HEADS), theta.cos(), theta.sin())


def _past(slots: int, draw: Draw) -> differential.Past:
    keys, values = draw.normal(2, KV, slots, D)
    return differential.Past(keys, values, None)


def _own(t: int, draw: Draw) -> differential.Own:
    keys, values = draw.normal(2, t, KV, D)
    return differential.Own(keys, values, RING)


def _ring(draw: Draw) -> tuple[CodaCache, CodaCache, tuple[Any, ...]]:
    """A cache that has seen a few hundred tokens of some clusters; a copy, and its banks and ring for the kernel."""
    settings = CodaSettings(window=RING, exact=EXACT, summary=SUMMARY, rope="half")
    eta = torch.full((KV,), 0.5, device=draw.device)  # logit of how far a summary slot moves
    cache = CodaCache(settings, all_heads(KV), D, eta, torch.bfloat16, draw.device, seed=0)
    if draw.values:
        pool = draw.normal(24, 2, KV, D)
        for i in range(RING + 48):
            k, v = pool[i * 7 % 24] + draw.normal(2, KV, D, scale=0.3 + i % 3)
            cache.write(k[None], v[None], draw.uniform(1))
    own = copy.deepcopy(cache)
    exact, summary = (
        banks.Bank(bank.rows, bank.used, bank.targets.data, bank.start) for bank in (own.exact, own.summary)
    )
    active, counts = (own.tensors(own.position)[name].to(draw.device) for name in ("active", "counts"))
    held = banks.Banks(exact, summary, own.exact.last_used, active, counts)
    rules: dict[str, Any] = {"by_value": own.summary.by_value, "blend": own.summary.blend, "eta": own.summary.eta}
    rules |= {name: getattr(settings, name) for name in set(banks.Rules._fields) - rules.keys()}
    ring = torch.stack((own.keys[:, :RING], own.values[:, :RING]))
    places = (draw.position(max(0, cache.position - RING)), draw.position(cache.position))
    return cache, own, (held, banks.Rules(**rules), ring, own.gates, *places)


def _scan(n: int, ring: Any) -> None:
    held, rules, rows, gates, first, now = ring[2]
    banks.evict(held, rules, rows, gates, first, now, n)


def _scan_off(n: int, _: None, given: Given, fresh: Given) -> float:
    (_cache, own, (held, *_rest)), (cache, *_copies) = given[0], fresh[0]
    first = max(0, cache.position - RING)
    for i in range(n):
        cache.evict(first + i, 1)
        cache.position += 1
    expected = cache.tensors(cache.position)
    alike = all(torch.equal(getattr(held, name).cpu(), expected[name].cpu()) for name in ("active", "counts"))
    if not alike or not torch.equal(own.exact.used, cache.exact.used):
        return float("inf")
    rows_of = ((held[0], cache.exact), (held[1], cache.summary))
    return max(MOVED.error(ours.rows, bank.rows) for ours, bank in rows_of)


FAMILIES: Final = (
    activations,
    gates,
    hypers,
    compressors,
    linears,
    linears_of_codes,
    projections,
    routed,
    routed_of_codes,
    indexers,
    attentions,
    variants,
)


def cases(parts: Sequence[str]) -> list[Case]:
    """All cases of these parts; `layers` has none, see `scripts.bench.gpu`."""
    return [case for family in FAMILIES for case in family() if case.part in parts]
