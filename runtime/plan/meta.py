"""A model over weights, ops and ranks of torch's meta device."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fathom.kernels.formats.groups import FP4_BLOCK, FP8_BLOCK, NVFP4_BLOCK
from fathom.kernels.formats.stored import (
    BasisRows, CodedRows, Dense, Fp4, Fp4Keys, Fp8, NvFp4, Slots, Stack, Weight, member, members,
)
from fathom.kernels.ops import COMPOSED, Ops, OpSet, backend, composed, reads_apart
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.tensor_mapping import ROUNDED, Form
from fathom.kernels.tripwires.reference import CHECKED
from fathom.model.ranks.ranks import KEPT, AxisShard, Coming, Group, Ranks, Route
from fathom.runtime.plan.alive import Alive
from fathom.runtime.plan.shapes import empty
from fathom.runtime.sharding import ShardingPlan

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PLAIN: Final = {
    Form.BF16: torch.bfloat16, Form.F16: torch.float16, Form.F32: torch.float32, Form.I64: torch.int64, Form.I32: torch.int32,
}


def weight(form: Form, rows: int, columns: int) -> Weight:
    """A matrix in a stored form."""
    match form:
        case Form.FP8 | Form.FP8_F32:
            blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
            return Fp8(empty(rows, columns, dtype=E4M3), empty(*blocks, dtype=E8M0 if form is Form.FP8 else torch.float32))
        case Form.FP4:
            return Fp4(empty(rows, columns // 2, dtype=torch.int8), empty(rows, columns // FP4_BLOCK, dtype=E8M0))
        case Form.NVFP4:
            scale = empty(rows, columns // NVFP4_BLOCK, dtype=E4M3)
            return NvFp4(empty(rows, columns // 2, dtype=torch.uint8), scale, empty())
    return Dense(empty(rows, columns, dtype=_PLAIN[form]))


def form_of(stored: Weight) -> Form:
    """The form of a matrix that `weight` made."""
    match stored:
        case Fp8(_, scale):
            return Form.FP8 if scale.dtype == E8M0 else Form.FP8_F32
        case Fp4():
            return Form.FP4
        case NvFp4():
            return Form.NVFP4
    return next(form for form, dtype in _PLAIN.items() if dtype == stored.data.dtype)


class MetaWeights:
    """The parameters of a checkpoint, as `model.checkpoint.weights.Weights` hands them out, without bytes.

    `layers`: which of the checkpoint's stand for the layers of the model, one after the other.
    """

    def __init__(self, census: Census, held: Callable[[str, int], AxisShard], layers: Sequence[int]) -> None:
        self.census, self.held, self.layers = census, held, layers

    def matrix(self, name: str) -> Weight:
        """One matrix."""
        name = self._of_layer(name)
        rows, columns = self.census.demanded[name].shape
        return weight(self.census.mappings[name].form, self.held(name, rows).size, columns)

    def matrices(self, names: Sequence[str], *, together: bool) -> list[Weight]:
        """Several of one shape, those of one form as one."""
        del together
        made: dict[Form, Weight] = {}
        for name in names:
            if (form := self.census.mappings[self._of_layer(name)].form) not in made:
                made[form] = self.matrix(name)
        return [made[self.census.mappings[self._of_layer(name)].form] for name in names]

    def operand(self, name: str) -> Tensor:
        """Any other parameter, as stored."""
        name = self._of_layer(name)
        rows, *others = self.census.demanded[name].shape
        return empty(self.held(name, rows).size, *others, dtype=_PLAIN[self.census.mappings[name].form])

    vector = operand

    def table(self, name: str) -> Tensor:
        """A table of experts."""
        return self.operand(name).long()

    def forms(self, names: Iterable[str]) -> set[Form]:
        """The forms of these matrices."""
        return {self.census.mappings[self._of_layer(name)].form for name in names}

    def coded(self, names: Iterable[str]) -> bool:
        """Whether inputs of all of these may be rounded to FP8."""
        return self.forms(names) <= set(ROUNDED)

    def _of_layer(self, name: str) -> str:
        before, layers, rest = name.partition("layers.")
        if not layers:
            return name
        number, _, rest = rest.partition(".")
        return f"{before}layers.{self.layers[int(number)]}.{rest}"


@dataclass
class Values:
    """What values decide of a call: where tokens go, and how scores are spread."""

    k: int  # experts of a token
    experts: int  # on all ranks
    here: int  # of them on this rank
    tokens: int = 1  # of the call
    even: bool = False  # whether tokens spread evenly over experts; else all go to one expert, or to this rank's
    few_pass: bool = False  # whether few entries pass the indexer's comparisons; else all do

    def of_one(self, pairs: int) -> int:
        """Of so many pairs of a token and an expert, those of the expert that has most."""
        found = min(self.tokens, -(-self.tokens * self.k // self.experts)) if self.even else self.tokens
        return min(pairs, found)

    def pairs(self, tokens: int) -> int:
        """Pairs of so many tokens and an expert on this rank."""
        return -(-tokens * self.k * self.here // self.experts) if self.even else tokens * min(self.k, self.here)

    def reached(self, tokens: int) -> int:
        """Of so many tokens, those that have an expert on this rank."""
        return min(tokens, self.pairs(tokens))


class MetaRanks(Ranks):
    """A rank that exchanges shapes; `times`: for how many layers each of the model's stands."""

    def __init__(
        self, rank: int, sharding: ShardingPlan, tokens: str, values: Values, alive: Alive, times: Sequence[int],
        *, gloo: bool,
    ) -> None:
        processes: Any = None if sharding.size == 1 else self
        super().__init__(Group(rank, sharding.size, processes), sharding.ranks[rank], tokens)
        self.values, self.alive, self.times, self._apart = values, alive, times, True
        self.gloo = gloo  # whose gathers lay out what comes once more
        self._kept: list[list[Tensor]] = [[], []]  # what is compared next, and what was the last time

    def record(self, site: str, layer: int | None, tensor: Tensor) -> None:
        """Keep a tensor until it is compared; of a short call those of all layers are."""
        del site
        if self.size > 1:
            like = self.times[layer] - 1 if layer is not None and self.values.tokens <= KEPT else 0
            self._kept[0] += [tensor, *(torch.empty_like(tensor) for _ in range(like))]

    def verify(self, *, wait: bool = True) -> None:
        """Compare what was kept; without `wait` it lives until the next time."""
        words = max((tensor.nbytes // 4 for tensor in self._kept[0]), default=0)
        self.alive.take(4 * 8 * min(CHECKED, words))  # of 64 bits: words, their places, factors and products
        self._kept = [[], [] if wait else self._kept[0]]

    def moved(self, site: str, layer: int, table: int, rows: Tensor, route: Route) -> Coming:
        """As `Ranks` by a collective."""
        own, row = rows.view(torch.uint8), 4
        if site == "experts.dispatch":
            sent, coming = len(own) * min(self.size, self.values.k), self.values.reached(route.into)
        else:
            sent, coming = self.values.pairs(len(own) // self.values.k), route.into
        given = torch.cat((own.new_empty(sent, row), own.new_empty(sent, own.shape[1])), dim=1)
        got = own.new_empty(coming, given.shape[1])

        def arrived(given: Tensor = given) -> Tensor:
            out = given.new_zeros(route.into, got.shape[1] - row)
            return out.view(rows.dtype)

        return arrived

    def _gathered(self, own: Tensor) -> Tensor:
        every = own.new_empty(self.size, len(own))
        self.alive.take(every.nbytes if self.gloo else 0)
        return every



def scratch_of(op: Callable[..., Any]) -> Callable[..., int] | None:
    """What says beside a compiled op how many bytes it takes, the result included; None: no more than that."""
    found: Callable[..., int] | None = getattr(sys.modules[op.__module__], f"{op.__name__}_scratch", None)
    return found


class MetaOps:
    """The ops of a set, without bytes: each makes what it makes, and tells what it takes beside that.

    What is a few passes of torch, or made of other ops, runs itself. Of an op that is compiled, the function beside it
    says what it takes: under its name and `_scratch`, the result included. Where there is none it is the result.
    """

    def __init__(self, alive: Alive, values: Values, device: torch.device) -> None:
        self.alive, self.values, self.device = alive, values, device

    def of(self, ops: Ops) -> OpSet:
        """The same set."""
        given = ops._asdict()
        made = {name: op if name == "name" or backend(op) == "reference" else self._op(name, op) for name, op in given.items()}
        made["store"] = self._op("store", ops.store)
        apart = ("experts", "experts_fp8") if reads_apart(ops) else ()
        for name in COMPOSED:
            if name in apart or name not in _RESULTS or backend(given[name]) == "reference":
                made[name] = composed(name, made)
        return OpSet(**made)

    def _op(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        result, sizes = _RESULTS.get(name, _none), _SIZES.get(name)
        scratch = sizes and scratch_of(op)

        def run(*args: Any, **named: Any) -> Any:
            if scratch:
                self.alive.take(scratch(*sizes(*args, **named), **self._how(name, named)))
            return result(*args, **named)

        return run

    def _how(self, name: str, named: dict[str, Any]) -> dict[str, Any]:
        """What sizes of tensors do not say."""
        how = {"device": self.device} if name in ("linear", "grouped_linear", "select") else {}
        if name == "select":
            how["few_pass"] = self.values.few_pass
        return how | {key: value for key, value in named.items() if key in ("wide", "deployed", "summed")}


def _none(*_: Any, **__: Any) -> None:
    """An op that returns nothing, or whose result is another's of this table."""


def _alike(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _first(x: Tensor, *_: Any) -> Tensor:
    """As the first of its streams."""
    return x.new_empty(len(x), x.shape[2])


def _weights(streams: Tensor, *_: Any) -> tuple[Tensor, ...]:
    t, s, _ = streams.shape
    return empty(t, s), empty(t, s), empty(t, s, s)


def _of_experts(x: Tensor, ids: Tensor, *_: Any, summed: bool = True, **__: Any) -> Tensor:
    return empty(*x.shape) if summed else x.new_empty(*ids.shape, x.shape[1])


# What ops make that do not run here.
_RESULTS: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(
        ("rms_norm", "rotate", "norm_rotate", "rotate_halves", "simulate_fp8", "simulate_fp4", "hadamard", "round_index",
         "swiglu", "attend", "attend_grouped", "attend_banks", "attend_codes"), _alike,
    ),
    "linear": lambda x, w, *, wide=False: x.new_empty(len(x), w.shape[0], dtype=torch.float32 if wide else x.dtype),
    "grouped_linear": lambda x, w, groups: x.new_empty(len(x), groups, w.shape[0] // groups),
    "pack_fp8": lambda x, group: empty(len(x), x.shape[1] + x.shape[1] // group, dtype=torch.uint8),
    "unpack_fp8": lambda x, group, dtype: empty(len(x), x.shape[1] * group // (group + 1), dtype=dtype),
    "pool": lambda kv, *_: empty(len(kv), kv.shape[2]),
    "select": lambda q, _, keys, first, ratio, k: empty(len(q), min(k, keys.shape[0]), dtype=torch.int32),
    "hyper_weights": _weights,
    "head_weights": lambda streams, *_: empty(*streams.shape[:2]),
    "collapse": _first,
    "read_streams": lambda streams, *_: (_first(streams), *_weights(streams)),
    "expand": lambda y, streams, *_: _alike(streams),
    "route": lambda logits, bias, k, scale: (empty(len(logits), k, dtype=torch.int64), empty(len(logits), k)),
    "route_weights": lambda logits, ids, scale: empty(*ids.shape),
    "experts": _of_experts,
    "experts_fp8": _of_experts,
    "experts_up": lambda x, ids, weights, w1, *_, **__: x.new_empty(*ids.shape, w1.shape[0]),
    "experts_down": lambda a, ids, w2, **__: empty(len(a), w2.shape[0]),
    "sum_slots": lambda y, _: empty(len(y), y.shape[2]),
}


def _stored_as(rows: Any) -> str:
    """The name that scratch functions have for the form of a cache's rows."""
    rows = rows.rows if isinstance(rows, Slots) else rows
    if rows is None or isinstance(rows, Tensor):
        return "dtype"
    return {CodedRows: "coded", BasisRows: "based", Fp4Keys: "fp4"}.get(type(rows), "fp8")


def _of_matrix(x: Tensor, w: Weight, *groups: int) -> tuple[Any, ...]:
    return len(x), *w.shape, *groups, form_of(w).name, x.itemsize


def _of_stack(x: Tensor, ids: Tensor, stack: Stack, hidden: int, inner: int) -> tuple[Any, ...]:
    return *ids.shape, members(stack), hidden, inner, form_of(member(stack, 0)).name, x.itemsize


def _of_attended(q: Tensor, ring: Tensor, first: int, window: int, entries: Any, ratio: int, chosen: Any, sink: Tensor) -> tuple[Any, ...]:
    n, selected = 0 if entries is None else entries.shape[0], 0 if chosen is None else chosen.shape[1]
    return *q.shape, window, n, selected, _stored_as(entries), q.itemsize


# What the scratch functions are given, of what ops are given.
_SIZES: Final[dict[str, Callable[..., tuple[Any, ...]]]] = {
    "linear": lambda x, w, **_: _of_matrix(x, w),
    "grouped_linear": _of_matrix,
    "store": lambda rows, start, x: (len(x), x.shape[1], _stored_as(rows), x.itemsize),
    "pack_fp8": lambda x, group: (x.numel(), group, x.itemsize),
    "unpack_fp8": lambda x, group, dtype: (x.numel() * group // (group + 1), group, dtype.itemsize),
    "select": lambda q, _, keys, first, ratio, k: (*q.shape, keys.shape[0], k, _stored_as(keys), q.itemsize),
    "attend": _of_attended,
    **dict.fromkeys(("hyper_weights", "read_streams"), lambda streams, *_: (*streams.shape, streams.itemsize)),
    "experts": lambda x, ids, weights, w1, *_, **__: _of_stack(x, ids, w1, x.shape[1], w1.shape[0]),
    "experts_up": lambda x, ids, weights, w1, *_, **__: _of_stack(x, ids, w1, x.shape[1], w1.shape[0]),
    "experts_down": lambda a, ids, w2, **__: _of_stack(a, ids, w2, w2.shape[0], w2.shape[1]),
    "attend_grouped": lambda q, keys, values, first, window: (*q.shape[:2], keys.shape[0], q.shape[2], first + len(q), q.itemsize),
}
