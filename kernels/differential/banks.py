"""CoDA's banks: tokens that leave the ring enter the exact and the summary bank one after the other, on the device.

It is the rule of a step (`ExactBank.insert_one` and `SummaryBank.absorb_one` of `model.variants.coda_banks`), n times.
Each token is compared with banks that the one before may have changed: a serial scan. And it is routed by the mean of
its cosines over all KV heads: one program has them all, because heads apart would have to wait for each other with
every token. Nothing is decided on the host, so a step of decode can be captured in a CUDA graph; what grows with the
logarithm of the position is a table that the host made.

The rule of a block, by which prefill offers the most important of many tokens at once, is not here.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton_rounding import UPCAST, rounded

NUMBERS = 1 << 15  # of a bank's rows in registers at a time
COUNTS = (
    "evictions", "exact_hits", "exact_inserts", "exact_overwrites", "exact_gated_out", "exact_frustrated",
    "exact_expansions", "summary_updates", "summary_inserts", "summary_frustrated", "summary_expansions",
)  # fmt: skip


class Bank(NamedTuple):
    """One bank, changed in place."""

    rows: Tensor  # [2, K, m, D] keys and values, a view
    used: Tensor  # [m] bool
    inverse: Tensor  # [K, m] float32, of the norms of what is compared: values, or the summary's keys
    start: int  # slots in use from the start


class Banks(NamedTuple):
    """Both banks and what is counted, changed in place."""

    exact: Bank
    summary: Bank
    last_used: Tensor  # [m] int64, position of the last token that entered an exact slot or was a hit
    active: Tensor  # [2] int64, slots in use: the first ones
    counts: Tensor  # [11] int64: `COUNTS`


class Rules(NamedTuple):
    """`model.variants.coda_settings.CodaSettings`, by the same names, as far as the rule of a step asks for it."""

    gate_exact: float
    gate_summary: float
    hit: float
    novelty: float
    refresh_on_hit: bool
    overwrite_on_insert: bool
    lru_touch_between: bool
    published_counts: bool
    growth_horizon: int
    by_value: bool  # the summary bank compares values; else keys, in the dims that it keeps
    blend: Tensor  # [D] float32, by which the summary bank's keys are multiplied: 0 in dims that it does not keep
    eta: Tensor  # [K] float32, how far a summary slot moves


@triton.jit
def _cosines(x, x_head, scale, rows, row_head, row_slot, inverse, size, K: tl.constexpr, M: tl.constexpr,
             D: tl.constexpr, BESIDE: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Cosine of a token [K, D] with each slot, mean over KV heads: [M] fp32; of all dims, or where `scale` is > 0."""
    slot, column = tl.arange(0, M), tl.arange(0, D)
    inside = slot < size
    mean = tl.zeros((M,), tl.float32)
    for low in range(0, K, BESIDE):
        head = (low + tl.arange(0, BESIDE)).to(tl.int64)
        real = head < K
        unit = tl.load(x + head[:, None] * x_head + column[None, :], real[:, None], 0.0).to(tl.float32)
        if not WHOLE:
            unit = tl.where((tl.load(scale + column) > 0)[None, :], unit, 0.0)
        norm = tl.sqrt(tl.sum(unit * unit, 1))
        unit = unit / tl.where(norm < 1e-6, 1e-6, norm)[:, None]
        at = rows + head[:, None, None] * row_head + slot[None, :, None] * row_slot + column[None, None, :]
        both = real[:, None] & inside[None, :]
        held = tl.load(at, both[:, :, None], 0.0).to(tl.float32)
        lengths = tl.load(inverse + head[:, None] * size + slot[None, :], both, 0.0)
        mean += tl.sum(tl.sum(held * unit[:, None, :], 2) * lengths, 0)
    return mean / K


@triton.jit
def _inverse_norm(x):
    """Of rows [K, D] fp32."""
    norm = tl.sqrt(tl.sum(x * x, 1))
    return 1.0 / tl.where(norm < 1e-6, 1e-6, norm)


@triton.jit
def _between(old, new, rate):
    """`torch.lerp`."""
    return tl.where(rate < 0.5, old + rate * (new - old), new - (new - old) * (1 - rate))


@triton.jit
def _flag(x):
    """1 or 0, int32: the interpreter makes a block of a condition's operands' dtype of a scalar condition."""
    return tl.where(x, 1, 0)


@triton.jit
def _free(used, slot, active):
    """How many active slots hold nothing; which hold something: [M]."""
    held = tl.load(used + slot, slot < active, 1) != 0
    return tl.sum((~held).to(tl.int32), 0), held


@triton.jit
def _grown(active, pressure, growth, more, now, start, MORE: tl.constexpr):
    """By how many slots the bank grows: `model.variants.coda_banks.Bank._grow`."""
    step = tl.arange(0, MORE)
    reached = tl.load(growth + step, step < more, 2**62) <= now
    room = start + tl.sum(reached.to(tl.int64), 0) - active
    return tl.maximum(tl.minimum(room, pressure), 0)


@triton.jit
def _scan(ring, gates, first_at, now_at, exact, exact_used, exact_inverse, last_used, summary, summary_used,
          summary_inverse, active_at, counts, blend, eta, exact_growth, summary_growth, n, window, ring_part, ring_head,
          ring_slot, exact_part, exact_head, exact_slot, summary_part, summary_head, summary_slot, exact_start,
          summary_start, gate_exact, gate_summary, hit_from, novel_below, E: tl.constexpr, S: tl.constexpr,
          EM: tl.constexpr, SM: tl.constexpr, EG: tl.constexpr, SG: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr,
          D: tl.constexpr, EXACT_BESIDE: tl.constexpr, SUMMARY_BESIDE: tl.constexpr, REFRESH: tl.constexpr,
          OVERWRITE: tl.constexpr, BETWEEN: tl.constexpr, PUBLISHED: tl.constexpr, BY_VALUE: tl.constexpr,
          UPCAST: tl.constexpr):  # fmt: skip
    which, column = tl.arange(0, 16), tl.arange(0, D)
    head = tl.arange(0, HEADS).to(tl.int64)
    real = (head < K)[:, None]
    exact_slots, summary_slots = tl.arange(0, EM), tl.arange(0, SM)
    first, now = tl.load(first_at), tl.load(now_at)
    exact_active, summary_active = tl.load(active_at), tl.load(active_at + 1)
    count = tl.where(which == 0, n, 0).to(tl.int64)
    for i in range(n):
        at = (first + i) % window
        gate = tl.load(gates + at)
        token = ring + at * ring_slot
        place = head[:, None] * ring_head + column[None, :]
        key, value = tl.load(token + place, real, 0.0), tl.load(token + ring_part + place, real, 0.0)
        if E:
            keep = gate >= gate_exact
            cosine = _cosines(token + ring_part, ring_head, blend, exact + exact_part, exact_head, exact_slot,
                              exact_inverse, E, K, EM, D, EXACT_BESIDE, WHOLE=True)  # fmt: skip
            free, held = _free(exact_used, exact_slots, exact_active)
            searched = (exact_slots < exact_active) & held
            cosine = tl.where(searched, cosine, -1e9)
            number = tl.sum((cosine != cosine).to(tl.int32), 0) == 0  # a cosine that is no number decides nothing
            best = tl.max(tl.where(cosine == cosine, cosine, -1e9), 0)
            hit = (best >= hit_from) & number
            new = keep & (best < novel_below) & number
            slot = tl.argmax(cosine, 0)
            age = tl.load(last_used + exact_slots, exact_slots < exact_active, 2**62)
            vacant = (exact_slots < exact_active) & (held == 0)
            entry = tl.where(free > 0, tl.argmax(vacant.to(tl.int32), 0), tl.argmin(age, 0))
            slot = tl.where(new, entry, slot).to(tl.int64)
            used_again = new | (keep & (best >= novel_below) & number if BETWEEN else keep & hit)
            overwrite = new | (keep & hit) if REFRESH else new
            pressure = tl.where(new & (free == 0), 1, 0)
            tl.debug_barrier()  # all of the bank has been read
            tl.store(last_used + slot, first + i, used_again)
            to = exact + slot * exact_slot + head[:, None] * exact_head + column[None, :]
            written = tl.where(real, _flag(overwrite), 0) != 0
            tl.store(to, key, written)
            tl.store(to + exact_part, value, written)
            tl.store(exact_used + slot, 1, overwrite)
            tl.store(exact_inverse + head * E + slot, _inverse_norm(value.to(tl.float32)),
                     tl.where(head < K, _flag(overwrite), 0) != 0)  # fmt: skip
            grown = _grown(exact_active, pressure, exact_growth, E - exact_start, now + i, exact_start, EG)
            exact_active += grown
            count += tl.where(which == 1, _flag(hit if PUBLISHED else keep & hit), 0)
            count += tl.where(which == 2, _flag(new), 0) + tl.where(which == 3, _flag(overwrite), 0)
            count += tl.where(which == 4, 1 - _flag(keep), 0)
            count += tl.where(which == 5, 0 if PUBLISHED else pressure, 0) + tl.where(which == 6, grown, 0)
        if S:
            absorbed = (gate >= gate_summary) & (gate > 0)
            cosine = _cosines(token + (ring_part if BY_VALUE else 0), ring_head, blend,
                              summary + (summary_part if BY_VALUE else 0), summary_head, summary_slot,
                              summary_inverse, S, K, SM, D, SUMMARY_BESIDE, WHOLE=BY_VALUE)  # fmt: skip
            # what is no number is the most, as torch has it
            cosine = tl.where(cosine == cosine, cosine, float("inf"))
            slot = tl.argmax(tl.where(summary_slots < summary_active, cosine, -float("inf")), 0).to(tl.int64)
            fresh = tl.load(summary_used + slot) == 0
            fraction = tl.where(gate < 1e-6, gate / 1e-6, 1.0)
            rate = (tl.load(eta + head, head < K, 0.0) * gate)[:, None]
            to = summary + slot * summary_slot + head[:, None] * summary_head + column[None, :]
            mean_key = key.to(tl.float32) * tl.load(blend + column)[None, :] * fraction
            mean_value = value.to(tl.float32) * fraction
            old_key = tl.load(to, real, 0.0).to(tl.float32)
            old_value = tl.load(to + summary_part, real, 0.0).to(tl.float32)
            new_key, new_value = _between(old_key, mean_key, rate), _between(old_value, mean_value, rate)
            if OVERWRITE:
                new_key = tl.where(fresh, mean_key, new_key)
                new_value = tl.where(fresh, mean_value, new_value)
            new_key = rounded(new_key, summary.dtype.element_ty, UPCAST)
            new_value = rounded(new_value, summary.dtype.element_ty, UPCAST)
            compared = (new_value if BY_VALUE else new_key).to(tl.float32)
            tl.debug_barrier()
            written = tl.where(real, _flag(absorbed), 0) != 0
            tl.store(to, new_key, written)
            tl.store(to + summary_part, new_value, written)
            tl.store(summary_used + slot, 1, absorbed)
            tl.store(summary_inverse + head * S + slot, _inverse_norm(compared),
                     tl.where(head < K, _flag(absorbed), 0) != 0)  # fmt: skip
            tl.debug_barrier()
            free, _ = _free(summary_used, summary_slots, summary_active)
            pressure = tl.where(absorbed & (free == 0), 1, 0)
            grown = _grown(summary_active, pressure, summary_growth, S - summary_start, now + i, summary_start, SG)
            summary_active += grown
            count += tl.where(which == 7, _flag(absorbed), 0)
            if OVERWRITE:
                count += tl.where(which == 8, _flag(absorbed & fresh), 0)
            count += tl.where(which == 9, pressure, 0) + tl.where(which == 10, grown, 0)
        tl.debug_barrier()  # the next token finds what this one changed
    tl.store(active_at, exact_active)
    tl.store(active_at + 1, summary_active)
    tl.store(counts + which, tl.load(counts + which, which < 11, 0) + count, which < 11)


@lru_cache
def growth(start: int, size: int, horizon: int, device: torch.device) -> Tensor:
    """Tokens seen from which on a bank may have 1, 2, .. slots more than `start`: [max(1, size - start)] int64."""

    def more(now: int) -> int:
        ratio = min(1.0, math.log(1 + now) / math.log(1 + horizon)) if horizon > 0 else 1.0
        return int((size - start) * ratio)

    found = []
    for wanted in range(1, size - start + 1):
        low, high = 0, max(0, horizon)  # at the horizon there are all
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if more(middle) >= wanted else (middle + 1, high)
        found.append(low)
    return torch.tensor(found or [0], device=device)


def evict(
    banks: Banks, rules: Rules, ring: Tensor, gates: Tensor, first: int | Tensor, now: int | Tensor, n: int
) -> None:
    """Offer `n` tokens of the ring to both banks, one after the other, each by the rule of a step.

    What is decided is what `model.variants.coda.CodaCache` decides on the host, unless a cosine is as near to a
    threshold or to another as sums in another order differ, 2^-20. NotImplementedError for banks that keep normalised
    copies.

    Parameters
    ----------
    banks
        Changed in place.
    rules
        What the cache is set to.
    ring
        [2, K, W, D] keys and values in the dtype of the banks: position p stands in slot p % W.
    gates
        [W] float32, of its tokens.
    first
        Position of the first of the tokens; or [] int64 on the device.
    now
        Tokens seen before the first is offered, one more for each next; or [] int64 on the device.
    n
        Tokens, 0 to W.

    """
    _, kv, window, d = ring.shape
    for bank in banks[:2]:
        if bank.inverse.ndim != 2:
            raise NotImplementedError("CoDA on a GPU: banks with normalised copies in place of inverse norms")
        assert bank.rows.dtype == ring.dtype, f"bank of {bank.rows.dtype}, ring of {ring.dtype}"
        assert bank.inverse.is_contiguous()
    if d & (d - 1):
        raise NotImplementedError(f"CoDA on a GPU: heads of {d}, want a power of two")
    assert 0 <= n <= window, f"{n} tokens of a ring of {window}"
    assert ring.stride(3) == banks.exact.rows.stride(3) == banks.summary.rows.stride(3) == 1
    places = [
        x if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=ring.device) for x in (first, now)
    ]
    exact, summary = banks.exact, banks.summary
    sizes = [bank.rows.shape[2] for bank in (exact, summary)]
    wide = [triton.next_power_of_2(max(1, size)) for size in sizes]
    tables = [
        growth(bank.start, size, rules.growth_horizon, ring.device)
        for bank, size in zip((exact, summary), sizes, strict=True)
    ]
    heads = triton.next_power_of_2(kv)
    beside = [max(1, min(heads, NUMBERS // (m * d))) for m in wide]
    _scan[(1,)](
        ring, gates, *places, exact.rows, exact.used.view(torch.uint8), exact.inverse, banks.last_used, summary.rows,
        summary.used.view(torch.uint8), summary.inverse, banks.active, banks.counts, rules.blend, rules.eta, *tables,
        n, window, *ring.stride()[:3], *exact.rows.stride()[:3], *summary.rows.stride()[:3], exact.start, summary.start,
        rules.gate_exact, rules.gate_summary, rules.hit, rules.novelty, E=sizes[0], S=sizes[1], EM=wide[0], SM=wide[1],
        EG=triton.next_power_of_2(tables[0].shape[0]), SG=triton.next_power_of_2(tables[1].shape[0]), K=kv, HEADS=heads,
        D=d, EXACT_BESIDE=beside[0], SUMMARY_BESIDE=beside[1], REFRESH=rules.refresh_on_hit,
        OVERWRITE=rules.overwrite_on_insert, BETWEEN=rules.lru_touch_between, PUBLISHED=rules.published_counts,
        BY_VALUE=rules.by_value, UPCAST=UPCAST, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
