"""`Ops`: the set of kernels that a model runs on, chosen once and passed down.

REFERENCE is the equation in fp32: the oracle, slow and unbounded in memory. BLOCKED computes the same in tiles whose
memory does not grow with the context. Where an op's reference already works on one chunk of tokens in a few passes,
BLOCKED names the reference itself: there is nothing to tile.

FUSED, in Triton, is `kernels.fused.ops`'.

An op set is a value. To run a model with one op replaced (a fault, a random selection), pass
``BLOCKED._replace(select=other)``; nothing is patched.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from kernels import blocked, reference
from kernels.blocked.differential import Noise, Own, Past
from kernels.blocked.shard import Middle, Stream
from kernels.formats import Rows, Slots, Weight


class Ops(NamedTuple):
    """One callable per op; the contract of each stands in `kernels.reference`, in the module named here."""

    name: str
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor]  # norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]  # rope
    linear: Callable[[Tensor, Weight], Tensor]  # linear
    grouped_linear: Callable[[Tensor, Weight, int], Tensor]  # linear
    simulate_fp8: Callable[[Tensor, int], Tensor]  # quantise
    simulate_fp4: Callable[[Tensor, int], Tensor]  # quantise
    hadamard: Callable[[Tensor], Tensor]  # quantise
    pool: Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]  # pool
    select: Callable[[Tensor, Tensor, Rows, int, int, int], Tensor]  # indexer
    attend: Callable[[Tensor, Tensor, int, int, Rows | Slots | None, int, Tensor | None, Tensor], Tensor]  # attention
    hyper_weights: Callable[[Tensor, Tensor, Tensor, Tensor, int, float, float], tuple[Tensor, Tensor, Tensor]]  # hyper
    head_weights: Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Tensor]  # hyper
    collapse: Callable[[Tensor, Tensor], Tensor]  # hyper
    expand: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # hyper
    route: Callable[[Tensor, Tensor, int, float], tuple[Tensor, Tensor]]  # gate
    route_weights: Callable[[Tensor, Tensor, float], Tensor]  # gate
    swiglu: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]  # swiglu
    # of the Llama family alone, which shares rms_norm, linear and swiglu with V4
    rotate_halves: Callable[[Tensor, Tensor, Tensor], Tensor]  # rope
    attend_grouped: Callable[[Tensor, Tensor, Tensor, int, int | None], Tensor]  # gqa
    attend_banks: Callable[[Tensor, Noise | None, Past, Own | None], Tensor]  # of CoDA: kernels.blocked.differential
    attend_codes: Callable[[Tensor, Tensor, Tensor, Middle | None, Stream | None, Tensor | None], Tensor]  # of Shard


def room(op: Callable[..., Any]) -> str:
    """Which room an op comes from: "reference", "blocked" or "fused"; of one from elsewhere, its module."""
    module = op.__module__
    return module.split(".")[1] if module.startswith("kernels.") else module


class Noted:
    """An op that notes when it runs: `ran` [its name] is the room it comes from. It is equal to the op itself."""

    def __init__(self, name: str, op: Callable[..., Any], ran: dict[str, str]) -> None:
        self.name, self.ran = name, ran
        self.op: Callable[..., Any] = op.op if isinstance(op, Noted) else op

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Note it, and run the op."""
        self.ran[self.name] = room(self.op)
        return self.op(*args, **named)

    def __eq__(self, other: object) -> bool:
        return self.op == (other.op if isinstance(other, Noted) else other)

    def __hash__(self) -> int:
        return hash(self.op)


def noted(ops: Ops, ran: dict[str, str]) -> Ops:
    """The same ops, each of which notes in `ran` when it runs, and from which room."""
    return Ops(ops.name, *(Noted(name, op, ran) for name, op in ops._asdict().items() if name != "name"))


REFERENCE = Ops(
    name="reference",
    rms_norm=reference.norm.rms_norm,
    rotate=reference.rope.rotate,
    linear=reference.linear.linear,
    grouped_linear=reference.linear.grouped_linear,
    simulate_fp8=reference.quantise.simulate_fp8,
    simulate_fp4=reference.quantise.simulate_fp4,
    hadamard=reference.quantise.hadamard,
    pool=reference.pool.pool,
    select=reference.indexer.select,
    attend=reference.attention.attend,
    hyper_weights=reference.hyper.hyper_weights,
    head_weights=reference.hyper.head_weights,
    collapse=reference.hyper.collapse,
    expand=reference.hyper.expand,
    route=reference.gate.route,
    route_weights=reference.gate.route_weights,
    swiglu=reference.swiglu.swiglu,
    rotate_halves=reference.rope.rotate_halves,
    attend_grouped=reference.gqa.attend,
    attend_banks=blocked.differential.attend,  # one implementation of CoDA, one of Shard: no reference run has them
    attend_codes=blocked.shard.attend,
)

BLOCKED = REFERENCE._replace(
    name="blocked",
    rms_norm=blocked.norm.rms_norm,
    rotate=blocked.rope.rotate,
    linear=blocked.linear.linear,
    grouped_linear=blocked.linear.grouped_linear,
    select=blocked.indexer.select,
    attend=blocked.attention.attend,
    attend_grouped=blocked.gqa.attend,
    # The rest is bounded by the chunk in the reference too; these, norm and rope are here for time alone
    # (`python -m scripts.bench kernels --only activations`).
    simulate_fp8=blocked.quantise.simulate_fp8,
    simulate_fp4=blocked.quantise.simulate_fp4,
    hyper_weights=blocked.hyper.hyper_weights,
    head_weights=blocked.hyper.head_weights,
    collapse=blocked.hyper.collapse,
    expand=blocked.hyper.expand,
    swiglu=blocked.swiglu.swiglu,
)
