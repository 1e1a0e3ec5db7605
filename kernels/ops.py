"""`Ops`: the set of kernels that a model runs on, chosen once and passed down.

REFERENCE is the equation in fp32: the oracle, slow and unbounded in memory. CPU computes the same in tiles whose memory
does not grow with the context, in PyTorch, on any device. Where an op's reference already works on one chunk of tokens
in a few passes, CPU names the reference itself: there is nothing to tile. TRITON is in `kernels.triton_ops`.

An op set is a value. To run a model with one op replaced (a fault, a random selection), pass
``CPU._replace(select=other)``; nothing is patched. An op that is made of others, as `read_streams`, is put together
anew when one of these is replaced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

from fathom.kernels import (
    attention,
    compress,
    differential,
    experts,
    gate,
    grouped,
    hyper,
    indexer,
    linear,
    norm,
    quantise,
    rope,
    shard,
    swiglu,
)
from fathom.kernels.compress.reference import Compress, Finish, Tail
from fathom.kernels.differential.reference import Noise, Own, Past
from fathom.kernels.experts.reference import Experts, ExpertsDown, ExpertsUp
from fathom.kernels.formats import rows
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Rounding, Rows, Slots, Stack, TokenRing, Weight
from fathom.kernels.gate.reference import Gate
from fathom.kernels.hyper.reference import ReadStreams
from fathom.kernels.indexer.reference import SelectFp8
from fathom.kernels.linear.reference import Linears, Product
from fathom.kernels.quantise.reference import RoundIndex
from fathom.kernels.rope.reference import NormRotate
from fathom.kernels.shard.reference import Middle, Stream


class Ops(Protocol):
    """The ops that a model calls; the contract of each stands in the `reference` of the folder named here."""

    name: str

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """`norm`."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`rope`."""
        ...

    def linear(self, x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
        """`linear`."""
        ...

    def grouped_linear(self, x: Tensor, weight: Weight, groups: int) -> Tensor:
        """`linear`."""
        ...

    def linears(self, x: Tensor, products: Sequence[Product], *, deployed: bool) -> list[Tensor]:
        """`linear`: of several matrices, whose input is rounded with `simulate_fp8`."""
        ...

    def linears_fp8(self, x: Tensor, products: Sequence[Product], *, deployed: bool) -> list[Tensor]:
        """`linear`: the same, summed as FP8 tensor cores sum codes, by a backend that has these; by others exactly."""
        ...

    def simulate_fp8(self, x: Tensor, group: int) -> Tensor:
        """`quantise`."""
        ...

    def simulate_fp4(self, x: Tensor, group: int) -> Tensor:
        """`quantise`."""
        ...

    def simulate_entries(self, x: Tensor, group: int) -> Tensor:
        """`quantise`, of V4.1."""
        ...

    def hadamard(self, x: Tensor) -> Tensor:
        """`quantise`."""
        ...

    def round_index(self, x: Tensor, group: int) -> Tensor:
        """`quantise`: `hadamard` and `simulate_fp4`."""
        ...

    def pack_fp8(self, x: Tensor, group: int) -> Tensor:
        """`quantise`: what ranks send each other."""
        ...

    def unpack_fp8(self, packed: Tensor, group: int, dtype: torch.dtype) -> Tensor:
        """`quantise`: what they have of it."""
        ...

    def norm_rotate(
        self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv_group: int
    ) -> Tensor:
        """`rope`: `rms_norm`, `rotate`, and where there is a group `simulate_fp8` of columns that are not rotated."""
        ...

    def pool(self, kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
        """`compress`: the equation of an entry, of windows of tokens."""
        ...

    def store(self, rows: Rows, start: int, x: Tensor) -> None:
        """`formats.rows.write`: rows of a cache, in the form in which it keeps them."""
        ...

    def compress(
        self,
        kv: Tensor,
        gate: Tensor,
        ring: TokenRing,
        first: int | Tensor,
        ratio: int,
        tail: Tail,
        finish: Finish,
    ) -> Tensor | None:
        """`compress`; where the position is on the device, by `compress_at_once`."""
        ...

    def compress_at_once(  # noqa: PLR0913, PLR0917 (the tail of a layer)
        self,
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
        """`compress`: the same in one launch."""
        ...

    def select(self, q: Tensor, head_weights: Tensor, keys: Rows, first: int | Tensor, ratio: int, k: int) -> Tensor:
        """`indexer`."""
        ...

    def select_fp8(
        self, q: Tensor, head_weights: Tensor, keys: Rows, first: int | Tensor, ratio: int, k: int
    ) -> Tensor:
        """`indexer`: `simulate_fp8` of the queries, and `select`."""
        ...

    def open_blocks(
        self, q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, size: int, count: int
    ) -> Tensor:
        """`indexer`, of V4.1."""
        ...

    def select_open(
        self, q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int, blocks: Tensor, size: int
    ) -> Tensor:
        """`indexer`, of V4.1."""
        ...

    def attend(
        self,
        q: Tensor,
        ring: Tensor,
        first: int | Tensor,
        window: int,
        entries: Rows | Slots | None,
        ratio: int,
        selected: Tensor | None,
        sink: Tensor,
    ) -> Tensor:
        """`attention`."""
        ...

    def hyper_weights(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`hyper`."""
        ...

    def head_weights(
        self, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float
    ) -> Tensor:
        """`hyper`."""
        ...

    def collapse(self, streams: Tensor, pre: Tensor) -> Tensor:
        """`hyper`."""
        ...

    def read_streams(  # noqa: PLR0913, PLR0917 (what its three ops take)
        self,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        iterations: int,
        eps: float,
        norm_eps: float,
        norm: Tensor,
        norm_out_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`hyper`: `hyper_weights`, `collapse` and `rms_norm`."""
        ...

    def expand(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """`hyper`."""
        ...

    def route(self, logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        """`gate`."""
        ...

    def route_weights(self, logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        """`gate`."""
        ...

    def gate(
        self, x: Tensor, weight: Weight, bias: Tensor | None, ids: Tensor | None, k: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """`gate`: `linear`, then `route` or `route_weights`."""
        ...

    def swiglu(self, gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
        """`swiglu`."""
        ...

    def experts(  # noqa: PLR0913 (its tensors, and how)
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w1: Stack,
        w3: Stack,
        w2: Stack,
        limit: float,
        *,
        deployed: bool,
        summed: bool = True,
        total: int = 0,
    ) -> Tensor:
        """`experts`."""
        ...

    def experts_fp8(  # noqa: PLR0913 (the same)
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w1: Stack,
        w3: Stack,
        w2: Stack,
        limit: float,
        *,
        deployed: bool,
        summed: bool = True,
        total: int = 0,
    ) -> Tensor:
        """`experts`: the same, as `linears_fp8` sums."""
        ...

    def sum_slots(self, y: Tensor, ids: Tensor) -> Tensor:
        """`experts`: the sum of what they gave unsummed."""
        ...

    def experts_up(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, limit: float, *, deployed: bool
    ) -> Tensor:
        """`experts`: the first half, before ranks exchange."""
        ...

    def experts_down(self, a: Tensor, ids: Tensor, w2: Stack, *, deployed: bool) -> Tensor:
        """`experts`: the second half."""
        ...

    # of the Llama family alone, which shares rms_norm, linear and swiglu with V4

    def rotate_halves(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`rope`."""
        ...

    def attend_grouped(self, q: Tensor, keys: Tensor, values: Tensor, first: int, window: int | None) -> Tensor:
        """`grouped`."""
        ...

    def attend_banks(self, q: Tensor, noise: Noise | None, past: Past, own: Own | None) -> Tensor:
        """Of CoDA: `differential`."""
        ...

    def attend_codes(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        middle: Middle | None,
        stream: Stream | None,
        signs: Tensor | None,
    ) -> Tensor:
        """Of Shard: `shard`."""
        ...

    def _replace(self, **ops: Any) -> "Ops":
        """The same set with other ops in place of some."""
        ...

    def _asdict(self) -> dict[str, Any]:
        """Name and ops, by their names."""
        ...


COMPOSED: Final = {  # of other ops
    "select_fp8": SelectFp8,
    "linears": Linears,
    "linears_fp8": Linears,
    "read_streams": ReadStreams,
    "round_index": RoundIndex,
    "compress": Compress,
    "norm_rotate": NormRotate,
    "gate": Gate,
    "experts": Experts,
    "experts_fp8": Experts,
    "experts_up": ExpertsUp,
    "experts_down": ExpertsDown,
}


class _Fields(NamedTuple):
    name: str
    rms_norm: Callable[..., Any]
    rotate: Callable[..., Any]
    linear: Callable[..., Any]
    grouped_linear: Callable[..., Any]
    linears: Callable[..., Any]
    linears_fp8: Callable[..., Any]
    simulate_fp8: Callable[..., Any]
    simulate_fp4: Callable[..., Any]
    simulate_entries: Callable[..., Any]
    hadamard: Callable[..., Any]
    round_index: Callable[..., Any]
    pack_fp8: Callable[..., Any]
    unpack_fp8: Callable[..., Any]
    norm_rotate: Callable[..., Any]
    pool: Callable[..., Any]
    store: Callable[..., Any]
    compress: Callable[..., Any]
    compress_at_once: Callable[..., Any]
    select: Callable[..., Any]
    select_fp8: Callable[..., Any]
    open_blocks: Callable[..., Any]
    select_open: Callable[..., Any]
    attend: Callable[..., Any]
    hyper_weights: Callable[..., Any]
    head_weights: Callable[..., Any]
    collapse: Callable[..., Any]
    read_streams: Callable[..., Any]
    expand: Callable[..., Any]
    route: Callable[..., Any]
    route_weights: Callable[..., Any]
    gate: Callable[..., Any]
    swiglu: Callable[..., Any]
    experts: Callable[..., Any]
    experts_fp8: Callable[..., Any]
    sum_slots: Callable[..., Any]
    experts_up: Callable[..., Any]
    experts_down: Callable[..., Any]
    rotate_halves: Callable[..., Any]
    attend_grouped: Callable[..., Any]
    attend_banks: Callable[..., Any]
    attend_codes: Callable[..., Any]


class OpSet(_Fields):
    """The values of `Ops`."""

    __slots__ = ()

    def _replace(self, **ops: Any) -> Self:
        new = super()._replace(**ops)
        anew = [name for name in COMPOSED if name not in ops and set(parts(name)) & set(ops)]
        made: dict[str, Any] = {name: _anew(name, getattr(self, name), new._asdict()) for name in anew}
        return super(OpSet, new)._replace(**made)


def parts(name: str) -> tuple[str, ...]:
    """Names of the ops that an op is made of."""
    return tuple(field.name for field in fields(COMPOSED[name]) if field.name in _Fields._fields)


def composed(name: str, ops: Mapping[str, Any]) -> Callable[..., Any]:
    """Make an op of others."""
    made: Callable[..., Any] = COMPOSED[name](*(ops[part] for part in parts(name)))
    return made


def _anew(name: str, op: Callable[..., Any], ops: Mapping[str, Any]) -> Callable[..., Any]:
    """`composed`; of an op that was, what it has beside its parts stays."""
    if not isinstance(op, COMPOSED[name]):
        return composed(name, ops)
    made: Callable[..., Any] = replace(cast("Any", op), **{part: ops[part] for part in parts(name)})
    return made


def rounding_by(ops: Ops, group: int) -> Ops:
    """The same set, in which inputs of linears and experts are rounded by so many columns; op by op if not by 128."""
    if group == LINEAR_GROUP:
        return ops
    kinds = {name: kind for name, kind in COMPOSED.items() if "group" in {field.name for field in fields(kind)}}
    made = {name: cast("Any", composed(name, ops._asdict())) for name in kinds}
    return ops._replace(**{name: replace(op, group=group) for name, op in made.items()})


def backend(op: Callable[..., Any]) -> str:
    """Which backend an op is of: "reference", "cpu" or "triton"; of one from elsewhere, its module."""
    if isinstance(op, Noted):
        return op.backend
    module = op.__module__
    if not module.startswith("fathom.kernels."):
        return module
    file = module.rpartition(".")[2]
    return "triton" if file.startswith("triton") else "cpu" if file.startswith("cpu") else "reference"


def reads_apart(ops: Ops) -> bool:
    """Whether the op `experts` reads matrices where they lie; Triton's wants them stacked."""
    return backend(ops.experts) != "triton"


def mass_unit(ops: Ops, dtype: torch.dtype) -> float:
    """By which share of itself `attend` may round each mass of the softmax before it multiplies keys of this dtype.

    Triton's rounds them to bf16 where keys are bf16, as tensor cores take both operands of a product in one dtype. All
    others keep them in fp32.
    """
    return 2.0**-8 if backend(ops.attend) == "triton" and dtype == torch.bfloat16 else 0.0


class Noted:
    """An op that notes when it runs: `ran` [its name] is its backend. It is equal to the op itself."""

    def __init__(self, name: str, op: Callable[..., Any], ran: dict[str, str]) -> None:
        self.name, self.ran = name, ran
        self.op: Callable[..., Any] = op.op if isinstance(op, Noted) else op
        self.backend = backend(self.op)

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Note it, and run the op."""
        self.ran[self.name] = self.backend
        return self.op(*args, **named)

    def __eq__(self, other: object) -> bool:
        return self.op == (other.op if isinstance(other, Noted) else other)

    def __hash__(self) -> int:
        return hash(self.op)


def noted(ops: Ops, ran: dict[str, str]) -> Ops:
    """The same ops, each of which notes in `ran` when it runs, and of which backend."""
    made: dict[str, Any] = {name: Noted(name, op, ran) for name, op in ops._asdict().items() if name != "name"}
    for name, kind in COMPOSED.items():
        if isinstance(getattr(ops, name), kind):  # its parts note themselves
            made[name] = _anew(name, getattr(ops, name), made)
    return cast("Ops", OpSet(ops.name, **made))


_REFERENCE = OpSet(
    name="reference",
    rms_norm=norm.reference.rms_norm,
    rotate=rope.reference.rotate,
    linear=linear.reference.linear,
    grouped_linear=linear.reference.grouped_linear,
    linears=linear.reference.linears,
    linears_fp8=linear.reference.linears,
    simulate_fp8=quantise.reference.simulate_fp8,
    simulate_fp4=quantise.reference.simulate_fp4,
    simulate_entries=quantise.reference.simulate_entries,
    hadamard=quantise.reference.hadamard,
    round_index=quantise.reference.round_index,
    pack_fp8=quantise.reference.pack_fp8,
    unpack_fp8=quantise.reference.unpack_fp8,
    norm_rotate=rope.reference.norm_rotate,
    pool=compress.reference.pool,
    store=rows.write,
    compress=compress.reference.compress,
    compress_at_once=compress.reference.compress_at_once,
    select=indexer.reference.select,
    select_fp8=SelectFp8(quantise.reference.simulate_fp8, indexer.reference.select),
    open_blocks=indexer.reference.open_blocks,
    select_open=indexer.reference.select_open,
    attend=attention.reference.attend,
    hyper_weights=hyper.reference.hyper_weights,
    head_weights=hyper.reference.head_weights,
    collapse=hyper.reference.collapse,
    read_streams=hyper.reference.read_streams,
    expand=hyper.reference.expand,
    route=gate.reference.route,
    route_weights=gate.reference.route_weights,
    gate=gate.reference.gate,
    swiglu=swiglu.reference.swiglu,
    experts=experts.reference.experts,
    experts_fp8=experts.reference.experts,
    sum_slots=experts.reference.sum_slots,
    experts_up=experts.reference.experts_up,
    experts_down=experts.reference.experts_down,
    rotate_halves=rope.reference.rotate_halves,
    attend_grouped=grouped.reference.attend,
    attend_banks=differential.cpu.attend,  # one implementation of CoDA, one of Shard: no reference run has them
    attend_codes=shard.cpu.attend,
)
REFERENCE = cast("Ops", _REFERENCE)

CPU = REFERENCE._replace(
    name="cpu",
    rms_norm=norm.cpu.rms_norm,
    rotate=rope.cpu.rotate,
    linear=linear.cpu.linear,
    grouped_linear=linear.cpu.grouped_linear,
    experts=experts.cpu.experts,
    experts_fp8=experts.cpu.experts,
    pool=compress.cpu.pool,
    select=indexer.cpu.select,
    open_blocks=indexer.cpu_candidates.open_blocks,
    select_open=indexer.cpu_candidates.select_open,
    attend=attention.cpu.attend,
    attend_grouped=grouped.cpu.attend,
    # The rest is bounded by the chunk in the reference too; these, norm and rope are here for time alone
    # (`python -m scripts.bench kernels --only activations`).
    simulate_fp8=quantise.cpu.simulate_fp8,
    pack_fp8=quantise.cpu.pack_fp8,
    unpack_fp8=quantise.cpu.unpack_fp8,
    simulate_fp4=quantise.cpu.simulate_fp4,
    hadamard=quantise.cpu.hadamard,
    round_index=quantise.cpu.round_index,
    norm_rotate=rope.cpu.norm_rotate,
    hyper_weights=hyper.cpu.hyper_weights,
    head_weights=hyper.cpu.head_weights,
    collapse=hyper.cpu.collapse,
    read_streams=hyper.cpu.read_streams,
    expand=hyper.cpu.expand,
    route=gate.cpu.route,
    route_weights=gate.cpu.route_weights,
    swiglu=swiglu.cpu.swiglu,
)
