"""`Ops` made of the functions of `tests.deepseek_arithmetic` in float64, and two ways to look at a run of the model.

`EXACT` gives every tensor that an op returns its correctly rounded value, whatever the order of the sums behind it. A
model that runs on it shows its wiring alone: which op gets which tensor, in which dtype, rounded where.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Weight
from fathom.kernels.ops import COMPOSED, REFERENCE, Ops
from tests import deepseek_arithmetic as ds
from tests.deepseek_arithmetic import FP32, Choices

WIDE = torch.float64
CHOICES = Choices(FP32)


@functools.lru_cache(maxsize=256)  # by identity of the tensors; a prompt in calls of one token decodes each 300 times
def decoded(weight: Weight) -> Tensor:
    """[out, in] float64 of a weight in its stored form; not to be written to."""
    match weight:
        case Dense(data):
            return data.to(WIDE)
        case Fp8(data, scale) | Fp4(data, scale):
            values, scales = ds.stored_blocks(data, scale)
            block = 128 if isinstance(weight, Fp8) else 32
            return (values * scales.repeat_interleave(block, 1)[:, : values.shape[1]]).to(WIDE)
    raise AssertionError(type(weight))


def linear(x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
    return (x.to(WIDE) @ decoded(weight).T).to(torch.float32 if wide else x.dtype)


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    return torch.einsum("tgd,grd->tgr", x.to(WIDE), decoded(weight).unflatten(0, (groups, -1))).to(x.dtype)


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    if previous_kv is not None and previous_gate is not None:
        kv, gate = torch.cat((previous_kv, kv), 1), torch.cat((previous_gate, gate), 1)
    return ds.pool(kv, gate, WIDE)


def select(q: Tensor, head_weights: Tensor, keys: Tensor, first: int, ratio: int, k: int) -> Tensor:
    scores = ds.index_scores(q, head_weights, keys, CHOICES)
    return ds.ascending(ds.top_k(scores, k, ratio, first))


def attend(
    q: Tensor,
    ring: Tensor,
    first: int,
    window: int,
    entries: Tensor | None,
    ratio: int,
    selected: Tensor | None,
    sink: Tensor,
    *,
    choices: Choices = CHOICES,
) -> Tensor:
    position = torch.arange(first, first + len(q))[:, None]
    index = (position - window + 1).clamp_min(0) + torch.arange(window)
    index = torch.where(index > position, -1, index % len(ring))
    if entries is None:
        return ds.sparse_attn(q, ring, sink, index, choices)
    chosen = torch.arange(len(entries)).expand(len(q), -1) if selected is None else selected.long()
    chosen = torch.where(chosen >= (position + 1) // ratio, -1, chosen)
    index = torch.cat((index, torch.where(chosen < 0, -1, chosen + len(ring))), 1)
    return ds.sparse_attn(q, torch.cat((ring, entries)), sink, index, choices)


def hyper_weights(
    x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    config = {"hc_mult": x.shape[1], "hc_eps": eps, "hc_sinkhorn_iters": iterations}
    return ds.hc_split_sinkhorn(ds.hc_read(x, fn, norm_eps, WIDE), scale.to(WIDE), base.to(WIDE), config)


def head_weights(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    return (torch.sigmoid(ds.hc_read(x, fn, norm_eps, WIDE) * scale.to(WIDE) + base.to(WIDE)) + eps).float()


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    ids = ds.best_experts(logits, bias, k, WIDE)
    return ids, ds.gate_weights(logits, ids, scale, WIDE)


# The two simulations stay this runtime's own: rounding to a grid sums nothing, so there is no order to take out.
EXACT = REFERENCE._replace(
    name="exact",
    rms_norm=lambda x, weight, eps: ds.rms_norm(x, weight, eps, WIDE),
    rotate=lambda x, cos, sin: ds.rotate(x, cos, sin, WIDE),
    linear=linear,
    grouped_linear=grouped_linear,
    hadamard=lambda x: ds.rotate_activation(x, WIDE),
    pool=pool,
    select=select,
    attend=attend,
    hyper_weights=hyper_weights,
    head_weights=head_weights,
    collapse=lambda streams, pre: ds.hc_sum(streams, pre, WIDE),
    expand=lambda y, streams, post, comb: ds.hc_post(y, streams, post, comb, WIDE),
    route=route,
    route_weights=lambda logits, ids, scale: ds.gate_weights(logits, ids, scale, WIDE),
    swiglu=lambda gate, up, limit, weight: ds.swiglu(gate, up, limit, weight, WIDE),
)


def traced(ops: Ops, trace: dict[str, Tensor]) -> Ops:
    """The same ops, noting the tensors of one call of the model under the names of `deepseek_forward.Forward.trace`."""
    layer = 0

    def select(*args: Any) -> Tensor:
        trace[f"layers.{layer}.attn.indexer.keys"] = args[2].clone()
        return ops.select(*args)

    def attend(*args: Any) -> Tensor:
        q, ring, _, _, entries, _, selected, _ = args
        out = ops.attend(*args)
        seen = {"q": q, "kv": ring[: len(q)].clone(), "out": out, "entries": entries, "selected": selected}
        trace.update({f"layers.{layer}.attn.{name}": part.clone() for name, part in seen.items() if part is not None})
        return out

    def expand(*args: Any) -> Tensor:
        nonlocal layer
        out = ops.expand(*args)
        half = "hc_ffn" if f"layers.{layer}.hc_attn" in trace else "hc_attn"
        trace[f"layers.{layer}.{half}"] = out
        layer += half == "hc_ffn"
        return out

    return ops._replace(select=select, attend=attend, expand=expand)


def first_difference(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str | None:
    """The first tensor, in the order of computation, that is not bit-equal; None when all are."""
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    return next((name for name, tensor in expected.items() if not torch.equal(tensor, found[name])), None)


class Difference(NamedTuple):
    """How far an op's results were from the exact ones, over all its calls in a run."""

    largest: float = 0.0  # of |found - exact|, in units of what `allowed` grants
    numbers: int = 0  # that are BF16 or integers
    changed: int = 0  # of these, the ones that are not bit-equal

    def updated(self, found: Tensor, exact: Tensor, allowed: Tensor) -> "Difference":
        assert (found.dtype, found.shape) == (exact.dtype, exact.shape)
        assert not found.numel() or found.isfinite().all()
        off = (found.double() - exact.double()).abs()
        worst = float(torch.where(off == 0, 0, off / allowed).amax()) if off.numel() else 0.0
        narrow = found.dtype != torch.float32
        return Difference(
            max(self.largest, worst), self.numbers + narrow * off.numel(), self.changed + narrow * int((off > 0).sum())
        )


def shadowed(ops: Ops, allowed: Callable[[Tensor], Tensor], differences: dict[str, Difference]) -> Ops:
    """Ops that return what `EXACT` does and note how `ops` would have differed, given the very same arguments."""
    exact = EXACT._replace(
        simulate_fp8=lambda x, group: ds.in_place(ds.act_quant(x, group), x),
        simulate_fp4=lambda x, _: ds.in_place(ds.fp4_act_quant(x), x),
    )

    def shadow(name: str) -> Callable[..., Any]:
        def both(*args: Any, **how: Any) -> Any:
            found, expected = getattr(ops, name)(*args, **how), getattr(exact, name)(*args, **how)
            pairs = [(found, expected)] if isinstance(expected, Tensor) else list(zip(found, expected, strict=True))
            for one, other in pairs:
                differences[name] = differences.get(name, Difference()).updated(one, other, allowed(other))
            return expected

        return both

    own = set(ops._asdict()) - {"name", "store", *COMPOSED}  # what it writes is no result
    return ops._replace(**{name: shadow(name) for name in own})
