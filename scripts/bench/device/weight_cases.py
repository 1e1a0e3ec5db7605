"""Cases whose bytes are weights: linears and routed experts."""

import itertools
from collections.abc import Callable, Iterator

from kernels.experts import reference as experts_reference
from kernels.experts import triton as experts
from kernels.formats.stored import Fp4
from kernels.linear import reference as linear_reference
from kernels.linear import triton as linear
from scripts.bench.device import counts
from scripts.bench.device.case import Call, Case, Target, Tolerance
from scripts.bench.device.draw import Draw
from scripts.bench.device.shapes import CHOSEN, FLASH, HEAD_DIM, LIMIT, MODELS, PRO, V4
from scripts.bench.device.small_cases import alike

# A BF16 step of each side, and sums of up to 28672 products in another order: 64 ulp of fp32 of the sum of their sizes,
# which for normal numbers is 0.64 times the root of their number times the rms of the sums
PRODUCT = Tolerance(of_each=2**-7, of_rms=2**-11)
# Between the products of an expert stand numbers rounded to E4M3 in groups of 128: at the edge of a step they go either
# way, 2^-4 of themselves, and at the edge of a scale a whole group goes with them
ROUNDED = Tolerance(of_each=2**-7, of_rms=2**-4)


def linears() -> Iterator[Case]:
    """The linears of a layer that are not experts, and of the shared expert, for one token, 32 and 8192."""
    for shape, t in itertools.product(MODELS, (1, 32, 8192)):
        inner, low = shape.heads * HEAD_DIM, shape.o_groups * shape.o_lora
        given = {
            "wq_a": ("fp8", shape.q_lora, shape.hidden, 1),
            "wq_b": ("fp8", inner, shape.q_lora, 1),
            "wkv": ("fp8", HEAD_DIM, shape.hidden, 1),
            "compressor": ("bf16", 2 * HEAD_DIM, shape.hidden, 1),
            "wo_a, in groups": ("fp8", low, inner // shape.o_groups, shape.o_groups),
            "wo_b": ("fp8", shape.hidden, low, 1),
            "shared w1": ("fp8", shape.intermediate, shape.hidden, 1),
        }
        for name, (form, out, columns, groups) in given.items():
            yield Case(
                "linear", f"{shape.name}, {name} ({form}), {t} tokens", counts.linear(form, out, columns, t, groups),
                _linear(form, out, columns, t, groups), str(PRODUCT), "reference",
                compiled=(shape, t) == (FLASH, 1) and name in {"wq_a", "compressor"},
            )  # fmt: skip


def _linear(form: str, out: int, columns: int, t: int, groups: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        weight = draw.weight(form, out, columns)
        if groups == 1:
            return alike(linear.linear, linear_reference.linear, (draw.normal(t, columns), weight), PRODUCT)
        given = (draw.normal(t, groups, columns), weight, groups)
        return alike(linear.grouped_linear, linear_reference.grouped_linear, given, PRODUCT)

    return build


def routed() -> Iterator[Case]:
    """FP4 experts: an EP-8 rank of Pro with its share of eight ranks' tokens, and all of Flash."""
    for shape, t in itertools.product(MODELS, (1, 8, 32, 512, 8192)):
        read = counts.chosen_experts(shape.held, t)
        target = Target(of_bytes=0.45) if t <= 512 else Target(of_flops=0.5)
        yield Case(
            "experts", f"{shape.name}, {shape.held} experts, {t} tokens", counts.experts(shape, t, read),
            _experts(shape, t), str(ROUNDED), "reference" if t <= 512 else "reference, last 64 tokens", target,
            compiled=(shape, t) == (PRO, 1),
        )  # fmt: skip


def _experts(shape: V4, t: int) -> Callable[[Draw], Call]:
    def build(draw: Draw) -> Call:
        wide, narrow = (shape.held, shape.intermediate, shape.hidden), (shape.held, shape.hidden, shape.intermediate)
        w1, w3, w2 = (draw.weight("fp4", *size) for size in (wide, wide, narrow))
        assert isinstance(w1, Fp4)
        x, ids = draw.normal(t, shape.hidden), draw.experts_of(t, CHOSEN, shape.held)
        weights = draw.uniform(t, CHOSEN)
        last = slice(max(0, t - 64), t) if t > 512 else slice(0, t)

        def error(ours: object) -> float:
            given = (x[last], ids[last], weights[last], w1, w3, w2, LIMIT, 0)
            return ROUNDED.error(ours[last], experts_reference.experts(*given, deployed=True))  # type: ignore[index]

        return Call(lambda: experts.experts(x, ids, weights, w1, w3, w2, LIMIT, 0, deployed=True), error)

    return build


WEIGHT: dict[str, Callable[[], Iterator[Case]]] = {"linear": linears, "experts": routed}
