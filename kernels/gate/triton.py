"""Routing in one launch: a program scores a token's experts, takes the best one after the other, and weighs them.

Of a token alone the logits are of that launch too: a program has an expert's, and the last one to have it routes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Weight
from fathom.kernels.formats.triton_rounding import UPCAST
from fathom.kernels.gate.reference import Gate
from fathom.kernels.linear.triton import linear
from fathom.kernels.linear.weight_rows import lanes, row_products, rows_at_once, words
from fathom.kernels.linear.weight_tiles import arrived_last, counters

_LAST: tl.constexpr = tl.constexpr((1 << 31) - 1)  # of the places that a key has for an expert
_TAKEN: tl.constexpr = tl.constexpr(-(1 << 63))  # below the key of -inf


@triton.jit
def _scores(logit):
    """``sqrt(softplus(logit))``; of a small e, log(1 + e) is what the rounding of 1 + e is taken back from."""
    e = tl.exp(-tl.abs(logit))
    wide = 1.0 + e
    log = tl.where(wide == 1.0, e, tl.log(wide) * tl.div_rn(e, tl.where(wide == 1.0, 1.0, wide - 1.0)))
    positive = tl.where(logit < 0.0, 0.0, logit)  # a comparison, unlike a maximum, keeps NaN
    return tl.sqrt_rn(positive + log)


@triton.jit
def _routed(
    logits, bias, ids, weights, token, experts, k, scale,
    GIVEN: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Weigh the experts of a token: GIVEN ones, or the k of largest biased score, which are written too.

    Logits come from L2, where other programs' stores are.
    """
    slot = tl.arange(0, SLOTS)
    if GIVEN:
        chosen = tl.load(ids + token * k + slot, slot < k, 0)
    else:
        expert = tl.arange(0, EXPERTS)
        score = _scores(tl.load(logits + token * experts + expert, expert < experts, 0.0, cache_modifier=".cg"))
        biased = score + tl.load(bias + expert, expert < experts, 0.0) + 0.0  # -0 is 0
        bits = biased.to(tl.int32, bitcast=True)
        key = tl.where(biased == biased, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)  # in order; NaN comes first
        key = (key.to(tl.int64) << 32) | (_LAST - expert)  # of equal ones the lower
        key = tl.where(expert < experts, key, _TAKEN)
        chosen = tl.zeros([SLOTS], tl.int64)
        for turn in range(k):
            best = tl.max(key, 0)
            chosen = tl.where(slot == turn, _LAST - (best & _LAST), chosen)
            key = tl.where(key == best, _TAKEN, key)
        tl.store(ids + token * k + slot, chosen, slot < k)
    logit = tl.load(logits + token * experts + chosen, slot < k, 0.0, cache_modifier=".cg")
    score = tl.where(slot < k, _scores(logit), 0.0)
    total = tl.sum(score, 0) + tl.zeros([SLOTS], tl.float32)
    tl.store(weights + token * k + slot, tl.div_rn(scale * score, total), slot < k)


@triton.jit
def _route(
    logits, bias, ids, weights, experts, k, scale,
    GIVEN: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    _routed(logits, bias, ids, weights, token, experts, k, scale, GIVEN, EXPERTS, SLOTS)


@triton.jit
def _gate(
    x, data, logits, ids, weights, bias, counters, rows, columns, width, stride, k, scale,
    GIVEN: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr,
    LANES: tl.constexpr, STEPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Logits of a token alone, as `linear` has them, and by the last program its experts."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    found = row_products(
        x, columns, data, data, row, row < rows, width, width, stride, stride,
        FORM, ROUND=False, ROWS=ROWS, LANES=LANES, STEPS=STEPS, UPCAST=UPCAST,
    )  # fmt: skip
    tl.store(logits + row, found, row < rows)
    if arrived_last(counters, 0, tl.num_programs(0)):
        _routed(logits, bias, ids, weights, 0, rows, k, scale, GIVEN, EXPERTS, SLOTS)


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Pick and weigh experts: `kernels.gate.reference.route`."""
    assert k <= logits.shape[1] == bias.shape[0], f"{k} of {logits.shape[1]} experts, {bias.shape[0]} biases"
    ids = torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    return ids, _launch(logits, bias, ids, scale, given=False)


def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weigh given experts: `kernels.gate.reference.route_weights`."""
    return _launch(logits, logits, ids.contiguous(), scale, given=True)


def _launch(logits: Tensor, bias: Tensor, ids: Tensor, scale: float, *, given: bool) -> Tensor:
    (t, experts), k = logits.shape, ids.shape[1]
    assert logits.dtype == torch.float32, f"logits: {logits.dtype}, want float32"
    weights = torch.empty(t, k, dtype=torch.float32, device=logits.device)
    if weights.numel():
        _route[(t,)](
            logits.contiguous(), bias.contiguous(), ids, weights, experts, k, float(scale), GIVEN=given,
            EXPERTS=triton.next_power_of_2(experts), SLOTS=triton.next_power_of_2(k), num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return weights


_APART = Gate(linear, route, route_weights)  # of several tokens


def gate(
    x: Tensor, weight: Weight, bias: Tensor | None, ids: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Logits and routing: `kernels.gate.reference.Gate`; of a token alone in one launch."""
    of = words(weight) if x.shape[0] == 1 and isinstance(weight, Dense) else None
    if of is None:
        return _APART(x, weight, bias, ids, k, scale)
    assert (bias is None) != (ids is None), "experts are selected or given"
    (experts, columns), device, along = weight.shape, x.device, lanes(of)
    assert x.shape[1] == columns, f"x has {x.shape[1]} columns, the weight {columns}"
    given = ids is not None
    logits = torch.empty(1, experts, dtype=torch.float32, device=device)
    ids = torch.empty(1, k, dtype=torch.int64, device=device) if ids is None else ids.contiguous()
    weights = torch.empty(1, k, dtype=torch.float32, device=device)
    assert ids.shape == (1, k), f"ids {tuple(ids.shape)} of {k} experts"
    assert given or k <= experts == len(bias), f"{k} of {experts} experts"  # type: ignore[arg-type]
    width, _, stride, _ = of.strides
    at_once = rows_at_once(experts, 8, along)
    _gate[triton.cdiv(experts, at_once),](
        x.contiguous(), of.data, logits, ids, weights, logits if bias is None else bias.contiguous(), counters(device),
        experts, columns, width, stride, k, float(scale), GIVEN=given, EXPERTS=triton.next_power_of_2(experts),
        SLOTS=triton.next_power_of_2(k), FORM=of.form, ROWS=at_once, LANES=along.lanes, STEPS=along.steps,
        UPCAST=UPCAST, num_warps=along.warps, enable_fp_fusion=False,
    )  # fmt: skip
    return ids, weights
