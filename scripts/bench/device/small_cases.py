"""Cases of what moves activations: norm, rotation and rounding, SwiGLU, streams and mHC, the compressor's tail."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kernels.compress import reference as compress_reference
from kernels.compress import triton as compress
from kernels.formats import rows
from kernels.formats.stored import Rounding, Window
from kernels.hyper import reference as hyper_reference
from kernels.hyper import triton as hyper
from kernels.hyper import triton_streams as streams
from kernels.norm import reference as norm_reference
from kernels.norm import triton as norm
from kernels.quantise import reference as quantise_reference
from kernels.quantise import triton as activations
from kernels.rope import reference as rope_reference
from kernels.swiglu import reference as swiglu_reference
from kernels.swiglu import triton as swiglu
from scripts.bench.device import counts
from scripts.bench.device.case import Call, Case, Target, Tolerance
from scripts.bench.device.counts import BF16, FP32, Cost
from scripts.bench.device.draw import Draw
from scripts.bench.device.shapes import (
    EPS,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    LIMIT,
    LLAMA,
    MILLION,
    MODELS,
    PRO,
    RATIOS,
    ROPE,
    SINKHORN,
    STREAMS,
)

TOKENS = (1, 8192)
EXACT = Tolerance()
STEP = Tolerance(of_each=2**-7)  # both sides round to BF16 what is nearly equal: a step of it
TWO_STEPS = Tolerance(of_each=2**-6, of_rms=2**-10)  # rounded twice, and normed by a sum in another order
WEIGHTS = Tolerance(of_each=2**-14, of_rms=2**-14)  # fp32 sums of 28672 terms in another order, and 20 normalisations
EDGES = Tolerance(differing=2**-6)  # of narrow codes: a BF16 step before them moves those at an edge by a step


def alike(fused: Callable[..., Any], oracle: Callable[..., Any], given: tuple[Any, ...], tolerance: Tolerance) -> Call:
    """A call of an op whose oracle takes the same; of several results the largest error."""

    def error(ours: Any) -> float:
        expected = oracle(*given)
        pairs = [(ours, expected)] if isinstance(ours, Tensor) else list(zip(ours, expected, strict=True))
        return max(tolerance.error(a, b) for a, b in pairs)

    return Call(lambda: fused(*given), error)


def norms() -> Iterator[Case]:
    """RMSNorm of hidden rows and of the heads of queries."""
    for shape, t in itertools.product(MODELS, TOKENS):
        sizes = {"hidden": (t, shape.hidden), "heads": (t, shape.heads, HEAD_DIM)}
        for what, size in sizes.items():

            def build(draw: Draw, size: tuple[int, ...] = size, *, weighted: bool = what == "hidden") -> Call:
                weight = draw.uniform(size[-1]) if weighted else None
                return alike(norm.rms_norm, norm_reference.rms_norm, (draw.normal(*size), weight, EPS), STEP)

            cost = Cost(2 * BF16 * torch.Size(size).numel(), 0)
            label = f"{shape.name}, {what}, {t} tokens"
            yield Case("norm", label, cost, build, str(STEP), "reference", compiled=(shape, t) == (PRO, 1))


def roundings() -> Iterator[Case]:
    """Rotation, rounding and the Hadamard transform."""
    ours, theirs = activations, quantise_reference
    for t in TOKENS:
        sizes: dict[str, tuple[tuple[int, ...], Tolerance, Callable[..., Tensor], Callable[..., Tensor], Any]] = {
            "simulate_fp8": ((t, PRO.hidden), EXACT, ours.simulate_fp8, theirs.simulate_fp8, 128),
            "simulate_fp4": ((t, INDEX_HEADS, INDEX_DIM), EXACT, ours.simulate_fp4, theirs.simulate_fp4, 32),
            "hadamard": ((t, INDEX_HEADS, INDEX_DIM), STEP._replace(of_rms=2**-20), ours.hadamard, theirs.hadamard,
                None),
        }  # fmt: skip
        for name, (size, tolerance, fused, oracle, group) in sizes.items():

            def build(
                draw: Draw, size: Any = size, tol: Any = tolerance, ops: Any = (fused, oracle), group: Any = group
            ) -> Call:
                given = (draw.normal(*size), *(() if group is None else (group,)))
                return alike(ops[0], ops[1], given, tol)

            cost = Cost(2 * BF16 * torch.Size(size).numel(), 0)
            label = f"{PRO.name}, {name}, {t} tokens"
            yield Case("quantise", label, cost, build, str(tolerance), "reference", compiled=t == 1)
        yield from _rotations(t)


def _rotations(t: int) -> Iterator[Case]:
    given = {
        f"{PRO.name}, rotate": ((t, PRO.heads, HEAD_DIM), ROPE // 2, activations.rotate, rope_reference.rotate),
        "Llama-3.1-8B, rotate_halves": (
            (t, LLAMA.heads, LLAMA.head_dim), LLAMA.head_dim // 2, activations.rotate_halves,
            rope_reference.rotate_halves,
        ),
    }  # fmt: skip
    for name, (size, pairs, fused, oracle) in given.items():

        def build(draw: Draw, size: Any = size, pairs: int = pairs, ops: Any = (fused, oracle)) -> Call:
            angle = draw.uniform(size[0], pairs)
            return alike(ops[0], ops[1], (draw.normal(*size), angle.cos(), angle.sin()), EXACT)

        cost = Cost(2 * BF16 * torch.Size(size).numel() + 2 * FP32 * t * pairs, 0)
        yield Case("quantise", f"{name}, {t} tokens", cost, build, str(EXACT), "reference", compiled=t == 1)


def swiglus() -> Iterator[Case]:
    """The activation of the shared expert."""
    for shape, t in itertools.product(MODELS, TOKENS):

        def build(draw: Draw, size: tuple[int, int] = (t, shape.intermediate)) -> Call:
            given = (draw.normal(*size), draw.normal(*size), LIMIT, None)
            return alike(swiglu.swiglu, swiglu_reference.swiglu, given, STEP._replace(of_rms=2**-20))

        cost = Cost(3 * BF16 * t * shape.intermediate, 0)
        label, tolerance = f"{shape.name}, {t} tokens", str(STEP._replace(of_rms=2**-20))
        yield Case("swiglu", label, cost, build, tolerance, "reference", compiled=(shape, t) == (PRO, 1))


def hypers() -> Iterator[Case]:
    """Streams read and written apart from their weights; their weights; and `read_streams`: that and the norm."""
    for shape, t in itertools.product(MODELS, (1, 32, 8192)):
        d, fn = shape.hidden, (2 + STREAMS) * STREAMS
        target = Target(us=10.0) if t <= 32 else Target(of_bytes=0.7)
        label, first = f"{shape.name}, {t} tokens", (shape, t) == (PRO, 1)
        yield Case(
            "hyper", f"read, {label}", counts.hyper_read(d, t), _read(d, t),
            f"input {TWO_STEPS}; weights {WEIGHTS}", "reference", target, first,
        )  # fmt: skip
        moved = Cost(BF16 * t * STREAMS * d + FP32 * fn * STREAMS * d, 2 * t * fn * STREAMS * d)

        def weights(draw: Draw, d: int = d, t: int = t) -> Call:
            given = (draw.normal(t, STREAMS, d), *_parameters(draw, d), SINKHORN, EPS, EPS)
            return alike(hyper.hyper_weights, hyper_reference.hyper_weights, given, WEIGHTS)

        yield Case("hyper", f"hyper_weights, {label}", moved, weights, str(WEIGHTS), "reference", None, first)
        near = STEP._replace(of_rms=2**-10)
        for name, moved in {
            "collapse": Cost(BF16 * t * (STREAMS + 1) * d, 0),
            "expand": counts.hyper_write(d, t),
        }.items():

            def build(draw: Draw, d: int = d, t: int = t, name: str = name, near: Tolerance = near) -> Call:
                x, pre, comb = draw.normal(t, STREAMS, d), draw.uniform(t, STREAMS), draw.uniform(t, STREAMS, STREAMS)
                given = (x, pre) if name == "collapse" else (draw.normal(t, d), x, pre, comb)
                return alike(getattr(streams, name), getattr(hyper_reference, name), given, near)

            yield Case("streams", f"{name}, {label}", moved, build, str(near), "reference", None, first)


def _parameters(draw: Draw, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """`fn`, `scale` and `base` of a sublayer."""
    fn = (2 + STREAMS) * STREAMS
    weight = draw.normal(fn, STREAMS * d, dtype=torch.float32, scale=(STREAMS * d) ** -0.5)
    return weight, draw.uniform(3, low=0.3), draw.normal(fn, dtype=torch.float32, scale=0.5)


def _read(d: int, t: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        streams = draw.normal(t, STREAMS, d)
        given = (streams, *_parameters(draw, d), SINKHORN, EPS, EPS, draw.uniform(d, low=0.5), EPS)

        def error(ours: tuple[Tensor, ...]) -> float:
            near = (TWO_STEPS, WEIGHTS, WEIGHTS, WEIGHTS)
            expected = hyper_reference.read_streams(*given)
            return max(tol.error(a, b) for tol, a, b in zip(near, ours, expected, strict=True))

        return Call(lambda: hyper.read_streams(*given), error)

    return build


def compressors() -> Iterator[Case]:
    """The compressor's tail: a token that closes a window at 1M, and a chunk after 128K."""
    kinds: dict[str, tuple[int, int, int, Rounding, str]] = {
        "CSA entry": (2, HEAD_DIM, RATIOS["CSA"], "kv", "fp8"),
        "HCA entry": (1, HEAD_DIM, RATIOS["HCA"], "kv", "fp8"),
        "CSA key": (2, INDEX_DIM, RATIOS["CSA"], "index", "fp4"),
    }
    for (what, kind), t in itertools.product(kinds.items(), TOKENS):
        series, width, ratio, _, form = kind
        row = counts.ENTRY_BYTES[form] if width == HEAD_DIM else counts.KEY_BYTES[form]
        first = MILLION - 1 if t == 1 else MILLION >> 3
        yield Case(
            "compress", f"{what} ({form}), {t} tokens", counts.compressor_tail(t, series, width, row, ratio),
            _tail(kind, t, first), str(EDGES), "reference", Target(us=6.0) if t == 1 else Target(of_bytes=0.6), t == 1,
        )  # fmt: skip


def _tail(kind: tuple[int, int, int, Rounding, str], t: int, first: int) -> Callable[[Draw], Call]:
    series, width, ratio, rounding, form = kind

    def build(draw: Draw) -> Call:
        def fp32(*size: int) -> Tensor:
            return draw.normal(*size, dtype=torch.float32)

        kept = ratio if series == 2 else 0
        window = Window(fp32(ratio, series * width), fp32(ratio, series * width), fp32(kept, width), fp32(kept, width))
        n = (first + t) // ratio
        cache = draw.entries(form, n, width, ROPE) if width == HEAD_DIM else draw.keys(form, n, width)
        kv, gate, weight, freqs = fp32(t, series * width), fp32(t, series * width), draw.uniform(width), fp32(ROPE // 2)
        before, position = Window(*(part.clone() for part in window)), draw.position(first)
        rest = (weight, EPS, freqs, rounding)

        def run() -> None:
            compress.compress(kv, gate, window, position, *rest, cache, torch.bfloat16)

        def error(_: None) -> float:
            low = first // ratio
            ours = rows.read(cache, low, n).clone()
            compress_reference.compress(kv, gate, before, first, *rest, cache, torch.bfloat16)
            return EDGES.error(ours, rows.read(cache, low, n))

        return Call(run, error)

    return build


SMALL: dict[str, Callable[[], Iterator[Case]]] = {
    "norm": norms,
    "quantise": roundings,
    "swiglu": swiglus,
    "hyper": lambda: (case for case in hypers() if case.part == "hyper"),
    "streams": lambda: (case for case in hypers() if case.part == "streams"),
    "compress": compressors,
}
