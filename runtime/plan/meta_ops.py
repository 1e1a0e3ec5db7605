"""Ops on torch's meta device: each makes what it makes, and tells what it takes beside that."""

import sys
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor

from fathom.kernels.formats.stored import BasisRows, CodedRows, Fp4Keys, Slots, Stack, Weight, member, members
from fathom.kernels.ops import COMPOSED, Ops, OpSet, backend, composed, reads_apart
from fathom.runtime.plan.alive import Alive
from fathom.runtime.plan.meta_ranks import Values
from fathom.runtime.plan.meta_weights import form_of
from fathom.runtime.plan.shapes import empty


def scratch_of(op: Callable[..., Any]) -> Callable[..., int] | None:
    """What says beside a compiled op how many bytes it takes, the result included; None: no more than that."""
    found: Callable[..., int] | None = getattr(sys.modules[op.__module__], f"{_name(op)}_scratch", None)
    return found


def _name(op: Callable[..., Any]) -> str:
    return str(getattr(op, "__name__", ""))  # one that is made of others has none


def on_meta(ops: Ops, alive: Alive, values: Values) -> Ops:
    """The same set without bytes.

    What is a few passes of torch, or made of other ops, runs itself. Of an op that is compiled, `_RESULTS` says what it
    makes, and the function beside it what it takes, under its name and `_scratch`.
    """
    made: dict[str, Any] = {"name": ops.name}
    for name, op in ops._asdict().items():
        if name != "name":
            runs = backend(op) == "reference" and name != "store"
            made[name] = op if runs else _told(name, op, alive, values)
    apart = ("experts", "experts_fp8") if reads_apart(ops) else ()  # one expert after the other
    for name in COMPOSED:
        if name in apart or name not in _RESULTS or backend(getattr(ops, name)) == "reference":
            made[name] = composed(name, made)
    return cast("Ops", OpSet(**made))


def _told(name: str, op: Callable[..., Any], alive: Alive, values: Values) -> Callable[..., Any]:
    result: Callable[..., Any] = _RESULTS.get(name, _nothing)
    scratch = scratch_of(op)
    if scratch is None or name not in _SIZES:
        return result
    sizes = _SIZES[name]

    def run(*args: Any, **named: Any) -> Any:
        how = {key: value for key, value in named.items() if key in ("wide", "deployed", "summed")}
        if name in ("linear", "grouped_linear", "select"):
            how["device"] = values.device
        if name == "select":
            how["few_pass"] = values.few_pass
        alive.take(scratch(*sizes(*args), **how))
        return result(*args, **named)

    return run


def _nothing(*_: Any, **__: Any) -> None:
    """What `store` returns."""


def _alike(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(x)


def _first(x: Tensor, *_: Any) -> Tensor:
    """As the first of its streams."""
    return x.new_empty(len(x), x.shape[2])


def _weights(streams: Tensor, *_: Any) -> tuple[Tensor, ...]:
    t, s = streams.shape[:2]
    return empty(t, s), empty(t, s), empty(t, s, s)


def _of_experts(x: Tensor, ids: Tensor, *_: Any, summed: bool = True, **__: Any) -> Tensor:
    return empty(*x.shape) if summed else x.new_empty(*ids.shape, x.shape[1])


def _blocks(keys: Any, first: int, ratio: int, size: int, count: int) -> int:
    """Blocks that `open_blocks` gives a token."""
    del first, ratio
    blocks: int = -(-keys.shape[0] // size)
    return min(count, blocks)


# What ops make that do not run here.
_RESULTS: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(
        (
            *("rms_norm", "rotate", "norm_rotate", "rotate_halves", "swiglu", "hadamard", "round_index"),
            *("simulate_fp8", "simulate_fp4", "attend", "attend_grouped", "attend_banks", "attend_codes"),
        ),
        _alike,
    ),
    "linear": lambda x, w, wide=False: x.new_empty(len(x), w.shape[0], dtype=torch.float32 if wide else x.dtype),
    "grouped_linear": lambda x, w, groups: x.new_empty(len(x), groups, w.shape[0] // groups),
    "pack_fp8": lambda x, group: empty(len(x), x.shape[1] + x.shape[1] // group, dtype=torch.uint8),
    "unpack_fp8": lambda x, group, dtype: empty(len(x), x.shape[1] * group // (group + 1), dtype=dtype),
    "pool": lambda kv, *_: empty(len(kv), kv.shape[2]),
    "select": lambda q, _, keys, *more: empty(len(q), min(more[2], keys.shape[0]), dtype=torch.int32),
    "open_blocks": lambda q, _, keys, *more: empty(len(q), _blocks(keys, *more), dtype=torch.int32),
    "select_open": lambda q, _, keys, *more: empty(len(q), min(more[2], keys.shape[0]), dtype=torch.int32),
    "hyper_weights": _weights,
    "head_weights": lambda streams, *_: empty(*streams.shape[:2]),
    "collapse": _first,
    "read_streams": lambda streams, *_: (_first(streams), *_weights(streams)),
    "expand": lambda _, streams, *__: _alike(streams),
    "route": lambda logits, _, k, __: (empty(len(logits), k, dtype=torch.int64), empty(len(logits), k)),
    "route_weights": lambda _, ids, __: empty(*ids.shape),
    "experts": _of_experts,
    "experts_fp8": _of_experts,
    "experts_up": lambda x, ids, _, w1, *__, **___: x.new_empty(*ids.shape, w1.shape[0]),
    "experts_down": lambda a, _, w2, **__: empty(len(a), w2.shape[0]),
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


def _of_attended(q: Tensor, *given: Any) -> tuple[Any, ...]:
    _, _, window, entries, _, chosen, _ = given
    n, selected = 0 if entries is None else entries.shape[0], 0 if chosen is None else chosen.shape[1]
    return *q.shape, window, n, selected, _stored_as(entries), q.itemsize


def _of_heads(q: Tensor, keys: Tensor) -> tuple[int, ...]:
    return len(q), q.shape[1], keys.shape[0], q.shape[2]


# What the scratch functions are given, of what ops are given.
_SIZES: Final[dict[str, Callable[..., tuple[Any, ...]]]] = {
    "linear": _of_matrix,
    "grouped_linear": _of_matrix,
    "store": lambda rows, _, x: (*x.shape, _stored_as(rows)),
    "pack_fp8": lambda x, group: (x.numel(), group, x.itemsize),
    "unpack_fp8": lambda x, group, dtype: (x.numel() * group // (group + 1), group, dtype.itemsize),
    "select": lambda q, _, keys, *more: (*q.shape, keys.shape[0], more[2], _stored_as(keys), q.itemsize),
    "open_blocks": lambda q, _, keys, *more: (*q.shape, keys.shape[0], *more[2:]),
    "select_open": lambda q, _, keys, *more: (
        *(*q.shape, keys.shape[0], more[2], more[3].shape[1], more[4]),
        q.itemsize if _stored_as(keys) == "dtype" else 5,  # decoded, beside what is stored
    ),
    "attend": _of_attended,
    **dict.fromkeys(("hyper_weights", "read_streams"), lambda streams, *_: (*streams.shape, streams.itemsize)),
    "experts": lambda x, ids, _, w1, *__: _of_stack(x, ids, w1, x.shape[1], w1.shape[0]),
    "experts_up": lambda x, ids, _, w1, *__: _of_stack(x, ids, w1, x.shape[1], w1.shape[0]),
    "experts_down": lambda a, ids, w2: _of_stack(a, ids, w2, *w2.shape),
    "attend_grouped": lambda q, keys, _, first, __: (*_of_heads(q, keys), first + len(q), q.itemsize),
}
