"""The routed experts of a few tokens, all of them at once: gates and ups in loops over rows, then downs.

Matrices are read where they are: of a mapped checkpoint in its files. The bits are those of one expert after the other.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import aligned, array, compiled, each, loop, note_read, watched
from fathom.kernels.experts.reference import Experts, of_pairs
from fathom.kernels.formats.cpu import arrays, lay_out, placed
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Apart, Fp4, Fp8, Stack, layout, member, members, places
from fathom.kernels.lanes import bfloat16, first_of, load_some, splat, store_some
from fathom.kernels.linear.cpu import KINDS, four_rows, linear, padded, pieces_of
from fathom.kernels.quantise.cpu import E4M3, round_row, simulate_fp8
from fathom.kernels.swiglu.cpu import activate_row, swiglu

FEW = 8  # tokens, as many as a draft and its token are: of V4's experts hardly one is of two of them, and read twice
several: Final = Experts(linear, swiglu, simulate_fp8)  # of more tokens
_INT, _F32, _PLACES = types.int64, types.float32[::1], (types.int64[::1], types.float32[::1])


def experts(
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
    """Sum of the weighted outputs of a token's experts: `kernels.experts.reference.Experts`."""
    del total
    if not summed:
        return of_pairs(experts, x, ids, weights, w1, w3, w2, limit, deployed=deployed)
    (t, hidden), k, (inner, _) = x.shape, ids.shape[1], w1.shape
    up, gate, down = (member(w, 0) for w in (w1, w3, w2))
    assert type(up) is type(gate), f"w1 is {type(up).__name__}, w3 {type(gate).__name__}"
    if t > FEW or type(up) is not type(down) or not _of_one_form(w1, w3, w2) or layout(up) != layout(gate):
        return several(x, ids, weights, w1, w3, w2, limit, deployed=deployed)
    chosen = [member(w, e) for w in (w1, w3, w2) for e in ids.flatten().tolist()]
    if not chosen:
        return torch.zeros(t, hidden)
    like = pieces_of(x, chosen[0])
    if any(pieces_of(x, matrix) is not like for matrix in chosen):
        return several(x, ids, weights, w1, w3, w2, limit, deployed=deployed)
    group = LINEAR_GROUP if deployed and isinstance(up, Fp8 | Fp4) else 0
    assert not group or (hidden % group == 0 and inner % group == 0), (
        f"{hidden} and {inner} columns, want groups of 128"
    )
    ordered, slots = ids.sort(dim=1)
    out = torch.empty(t, hidden)
    if watched():
        note_read(*chosen)
    _experts(
        arrays(up), arrays(down), *_places(w1), *_places(w3), *_places(w2), array(ordered.contiguous()),
        array(weights.gather(1, slots).contiguous()), array(x.float().contiguous()), t, k, hidden, inner,
        limit, group, x.dtype == torch.bfloat16, array(out), like,
    )  # fmt: skip
    return out


def _of_one_form(*stacks: Stack) -> bool:
    """Whether the matrices of each are: a loop takes all of them for what the first one is."""
    return all(not isinstance(stacked, Apart) or stacked.alike for stacked in stacks)


def _places(stacked: Stack) -> tuple[Any, Any]:
    """Addresses, flat, and factors of all matrices."""
    if isinstance(stacked, Apart):
        addresses, factors = stacked.places
    else:
        addresses, factors = places([member(stacked, expert) for expert in range(members(stacked))])
    return array(addresses), array(factors)


@loop
def _rounded(x, rows, columns, group, narrow, out):
    """What a linear takes of rows of x: in bfloat16 where `narrow`, then in E4M3 where there is a group."""
    for i in range(0, rows * columns, 16):
        there = rows * columns - i
        numbers = load_some(x, i, there)
        store_some(out, i, bfloat16(numbers) if narrow else numbers, there)
    if group:
        for row in range(rows):
            round_row(out, row * columns, columns, group, E4M3, out, row * columns)


@loop
def _four(weight, addresses, factors, expert, row, last, columns, x, at, narrow, out):
    """Four rows of an expert's matrix, up to the last, times a vector, as a linear returns them, to `out`."""
    matrix, scale = placed(weight, addresses[2 * expert], addresses[2 * expert + 1]), factors[expert]
    out[0], out[1], out[2], out[3] = four_rows(matrix, row, last, columns, x, at)
    for i in range(4):
        out[i] = first_of(bfloat16(splat(out[i] * scale))) if narrow else out[i] * scale


@loop
def _gate_and_up(low, high, weight, at1, by1, at3, by3, chosen, k, rows, columns, x, narrow, gate, up):
    """Fours of rows, of every pair of a token and an expert."""
    fours, found = (rows + 3) // 4, np.empty((2, 4), np.float32)
    for item in range(low, high):
        pair, row = item // fours, item % fours * 4
        expert, at, stop = chosen[pair], pair // k * padded(columns), min(row + 4, rows)
        _four(weight, at1, by1, expert, row, rows - 1, columns, x, at, narrow, found[0])
        _four(weight, at3, by3, expert, row, rows - 1, columns, x, at, narrow, found[1])
        for r in range(row, stop):
            gate[pair * rows + r], up[pair * rows + r] = found[0, r - row], found[1, r - row]


@loop
def _activate(low, high, weight, gate, up, weights, columns, limit, group, narrow, out, laid):
    for pair in range(low, high):
        at = pair * columns
        activate_row(gate, up, at, columns, limit, weights[pair], out)
        _rounded(out[at : at + columns], 1, columns, group, narrow, out[at : at + columns])
        lay_out(weight, out, at, columns, laid, pair * padded(columns))


@loop
def _down(low, high, weight, at2, by2, chosen, tokens, k, rows, columns, x, narrow, out):
    """Fours of rows, of every token the sum over its experts."""
    found, total = np.empty(4, np.float32), np.empty(4, np.float32)
    for row in range(low * 4, min(high * 4, rows), 4):
        for token in range(tokens):
            total[:] = np.float32(0)
            for pair in range(token * k, token * k + k):
                expert = chosen[pair]
                _four(weight, at2, by2, expert, row, rows - 1, columns, x, pair * padded(columns), narrow, found)
                total += found
            for r in range(row, min(row + 4, rows)):
                out[token * rows + r] = total[r - row]


@compiled(
    *(
        (form, form, *_PLACES, *_PLACES, *_PLACES, types.int64[::1], _F32, _F32, _INT, _INT, _INT, _INT,
         types.float64, _INT, types.boolean, _F32, kind)
        for form, kind in KINDS
    )
)  # fmt: skip
def _experts(
    up1, down1, at1, by1, at3, by3, at2, by2, chosen, weights, x, tokens, k, hidden, inner, limit, group, narrow,
    out, like,
):  # fmt: skip
    """All at once: gates and ups, what is activated of them, and the sum of downs; `chosen` ascends in each token."""
    pairs, fours = tokens * k, (inner + 3) // 4
    given, laid = np.empty(tokens * hidden, np.float32), aligned(tokens * padded(hidden), like)
    _rounded(x, tokens, hidden, group, narrow, given)
    for token in range(tokens):
        lay_out(up1, given, token * hidden, hidden, laid, token * padded(hidden))
    gate, up = np.empty(pairs * inner, np.float32), np.empty(pairs * inner, np.float32)
    active, ordered = np.empty(pairs * inner, np.float32), aligned(pairs * padded(inner), like)
    each(_gate_and_up, pairs * fours, (up1, at1, by1, at3, by3, chosen, k, inner, hidden, laid, narrow, gate, up))
    each(_activate, pairs, (down1, gate, up, weights, inner, limit, group, narrow, active, ordered))
    each(
        _down,
        (hidden + 3) // 4,
        (down1, at2, by2, chosen, tokens, k, hidden, inner, ordered, narrow, out),
    )
