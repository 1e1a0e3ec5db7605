"""The basis in which a layer's entries are stored, fitted to some of them; and whether it pays.

At the same bytes an entry may be rotated and coded as a whole (`kernels.formats.coded_rows`), or its nope dims in a
basis, with bits where their variance is (`kernels.formats.basis_rows`). The basis takes bytes too, `nope^2` and a
little more for the whole layer: so many fewer are left for each entry of a context, and below some context for none.

What each loses is predicted, and measured. Entries have tails: what a grid loses of a component is what it does lose of
coefficients, with the scale that suits them best, and not what it would of a normal distribution. And the variances of
entries that a basis was fitted to are not those of others: it has found directions in their chance. Therefore mean and
basis come from the first half of the entries; the losses of components at any bits, and so scales, bits and the
prediction, from the next quarter; and what is measured from the last.

A basis is good at what is common, a rotation treats all entries alike, and tokens attend to what is rare. So what
attention loses is measured too, with the layer's own queries. Where tokens attend to every entry before them (HCA), to
those of the last quarter alone; where they select (CSA), to what they selected, wherever it lies: few of it would be
left, and what is rare is what a fit to half of it knows least. A basis is used where it loses less by prediction and by
both measurements.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats import basis_rows, coded_rows, eigenbasis, lloyd_max
from fathom.kernels.formats.eigenbasis import DP_BITS, DROPPED, measured_distortion
from fathom.kernels.formats.stored import EigenKeys

GROUP: Final = 64  # components that have bits in common, or fewer where the width would not make FEWEST groups
FEWEST: Final = 4
SMALLEST: Final = 4  # components of a group, so that 2, 4, 6 and 8 bits fill bytes
GAIN_BYTES: Final = 2
ROPE_BITS: Final = (2, 3, 4, 6, 8)
SCALES: Final = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)  # tried, in deviations of a component
FIT: Final = 2  # entries for each nope dim, at the least, that mean and basis are fitted to
NO_BYTES: Final = "no bytes are left beside the basis"


class Sample(NamedTuple):
    """What a layer made of a text."""

    entries: Tensor  # [n, d] float32, in their order
    queries: Tensor  # [m, h, d] float32, of some tokens near the end
    seen: Tensor  # [m, n] bool: which entries each token attends to


class Loss(NamedTuple):
    """Squared error over squared length."""

    predicted: float  # of entries
    measured: float  # of entries
    attention: float  # measured, of what attention to them gives


class Fitted(NamedTuple):
    """What became of one layer's entries."""

    rotated: Loss
    based: Loss | None  # of the best basis; None where no bytes are left for one, or entries are too few
    fit: EigenKeys | None  # that basis, without rows
    rope_bits: int
    bits: tuple[int, ...]  # of each group
    row_bytes: int  # of an entry in the basis
    why_none: str = ""  # there is no basis

    @property
    def pays(self) -> bool:
        """Whether the basis loses less, in every respect."""
        return self.based is not None and all(a < b for a, b in zip(self.based, self.rotated, strict=True))


class Allocation(NamedTuple):
    """Bits at which a basis predicts the least distortion."""

    bits: list[int]  # of each group of components
    rope_bits: int
    squared_error: float  # per entry


class Components(NamedTuple):
    """What scales suit the components of a basis, and what is lost then, at each of `DP_BITS`."""

    scale: dict[int, Tensor]  # [p] float32, as float16 holds it
    error: dict[int, Tensor]  # [p] float64, mean square


def group_of(width: int) -> int:
    """Components in a group: 64, or the largest smaller power of two of which `width` has at least 4; 0 for none."""
    group = GROUP
    while group >= SMALLEST and (width % group or width // group < FEWEST):
        group //= 2
    return group if group >= SMALLEST else 0


def least_entries(width: int) -> int:
    """Entries of `width` nope dims without which nothing is fitted: half of them are to be `FIT` times the dims.

    A covariance of fewer rows than that is more of these rows than of the layer; of fewer than `width`, it is singular.
    """
    return 2 * FIT * width


def shared_bytes(width: int) -> int:
    """Bytes of a basis of `width` columns: int8, mean and two scales in float16, bits of groups."""
    return width * width + 3 * 2 * width + width // group_of(width)


def rotated_bytes(width: int, bits: int) -> int:
    """Bytes of an entry that is rotated and coded as a whole."""
    return lloyd_max.packed_bytes(width, bits) + 2


def fit(sample: Sample, rope: int, bits: int, context: int) -> Fitted:
    """Fit a basis to the entries of one layer, for the bytes that they take when rotated, and hold it against that.

    Parameters
    ----------
    sample
        The entries as they are made, and queries.
    rope
        Columns at the end of a row that carry a position.
    bits
        Of a value of a rotated row.
    context
        In entries: those that share the basis, so that its bytes are theirs.

    """
    x = sample.entries
    d, nope, n = x.shape[1], x.shape[1] - rope, len(x)
    first, second, third = x[: n // 2], x[n // 2 : n - n // 4], x[n - n // 4 :]
    judge = partial(_loss, sample, len(third))
    rotated = judge(_rotated(x, bits), lloyd_max.distortion(bits))
    none = Fitted(rotated, None, None, 0, (), 0)
    if not group_of(nope):
        return none._replace(why_none=f"{nope} nope dims make no groups")
    if n < (wanted := least_entries(nope)):
        return none._replace(why_none=f"too few entries: {n}, wants {wanted}")
    if context < 1:
        return none._replace(why_none=NO_BYTES)
    keys = _basis(first[:, :nope])
    components = _components(keys, second[:, :nope])
    left = rotated_bytes(d, bits) - shared_bytes(nope) / context
    best = allocate(components.error, _energy(second[:, nope:]), rope, left)
    if best is None:
        return none._replace(why_none=NO_BYTES)
    bits_of_component = torch.tensor(best.bits).repeat_interleave(group_of(nope))
    for level, scale in components.scale.items():
        keys.scale.copy_(torch.where(bits_of_component == level, scale, keys.scale.float()))
    keys.bits.copy_(torch.tensor(best.bits, dtype=torch.int8))
    code_bytes = sum(best.bits) * group_of(nope) // 8
    keys = keys._replace(codes=torch.zeros(0, code_bytes, dtype=torch.uint8))
    based = judge(_based(x, keys, best.rope_bits), best.squared_error / _energy(second))
    row_bytes = code_bytes + GAIN_BYTES + rotated_bytes(rope, best.rope_bits)
    return Fitted(rotated, based, keys, best.rope_bits, tuple(best.bits), row_bytes)


def allocate(error: Mapping[int, Tensor], rope_energy: float, rope: int, row_bytes: float) -> Allocation | None:
    """Divide the bytes of a row so that the distortion predicted is least; None where they are too few for any.

    To decide where bits go, what has none is charged four times its variance (`kernels.formats.eigenbasis`), so that
    they are spent on many directions rather than on few; what is predicted is that it is lost once.

    Parameters
    ----------
    error
        Of each component [p] at each of `DP_BITS`, see `Components`.
    rope_energy, rope
        Squared length of the rope dims, and how many they are.
    row_bytes
        Of which the gain takes two, the rope dims their norm and codes of 2 to 8 bits, and the groups the rest.

    """
    group = group_of(len(error[0]))
    sums = {bits: lost.unflatten(0, (-1, group)).sum(1).tolist() for bits, lost in error.items()}
    costs = [
        {bits: lost[i] * (DROPPED if bits == 0 else 1.0) for bits, lost in sums.items()} for i in range(len(sums[0]))
    ]
    best: Allocation | None = None
    for rope_bits in ROPE_BITS:
        budget = int((row_bytes - GAIN_BYTES - rotated_bytes(rope, rope_bits)) * 8 // group)
        if budget < min(DP_BITS[1:]):
            continue
        bits = eigenbasis.cheapest(costs, min(budget, max(DP_BITS) * len(costs)))
        lost = sum(sums[each][i] for i, each in enumerate(bits)) + rope_energy * lloyd_max.distortion(rope_bits)
        if best is None or lost < best.squared_error:
            best = Allocation(bits, rope_bits, lost)
    return best


def _basis(nope: Tensor) -> EigenKeys:
    """Mean and basis of some rows; scales and bits are not decided yet."""
    width = nope.shape[1]
    keys = eigenbasis.eigen_keys(0, width, width, width, width // group_of(width), torch.device("cpu"))
    eigenbasis.fit_basis(keys, lambda: iter([nope]), measured_distortion)
    return keys


def _components(keys: EigenKeys, nope: Tensor) -> Components:
    """Scales and losses of the coefficients of rows [n, p]."""
    tiles = eigenbasis.projected(keys, lambda: iter([nope]))
    deviation = eigenbasis.deviation(tiles)
    scale, error = {0: deviation.float()}, {0: deviation.square()}
    for bits in DP_BITS[1:]:
        candidates = deviation.float() * torch.tensor(SCALES)[:, None]
        grid = partial(_on_grid, bits=bits)
        scale[bits], error[bits] = eigenbasis.searched_scale(tiles, candidates, grid)
    return Components(scale, error)


def _on_grid(units: Tensor, bits: int) -> Tensor:
    return lloyd_max.decode(lloyd_max.encode(units, bits), bits)


def _energy(x: Tensor) -> float:
    """Mean squared length of rows."""
    return x.double().square().sum(-1).mean().item()


def _rotated(x: Tensor, bits: int) -> Tensor:
    """Rows as they come back from codes."""
    rows = coded_rows.allocate(len(x), x.shape[1], bits, torch.device("cpu"), seed=0)
    coded_rows.write(rows, 0, x)
    return coded_rows.read(rows, 0, len(x))


def _based(x: Tensor, fit: EigenKeys, rope_bits: int) -> Tensor:
    """Rows as they come back from coefficients."""
    rope = x.shape[1] - fit.basis.shape[0]
    rows = basis_rows.allocate(len(x), fit, rope, rope_bits, 0, torch.device("cpu"))
    basis_rows.write(rows, 0, x)
    return basis_rows.read(rows, 0, len(x))


def _loss(sample: Sample, held: int, back: Tensor, predicted: float) -> Loss:
    """What is lost where entries come back as `back` [n, d]; of entries, the last `held` are measured."""
    x = sample.entries
    measured = _energy((back - x)[len(x) - held :]) / _energy(x[len(x) - held :]) if held else math.nan
    return Loss(predicted, measured, _attention_loss(sample, held, back))


def _attention_loss(sample: Sample, held: int, back: Tensor) -> float:
    """Mean over tokens of what their heads lose: no token is measured by the loudest.

    Of tokens that attend to every entry up to some, only what they see of the last `held` counts: others were fitted
    to. What tokens select counts as a whole.
    """
    seen = sample.seen
    if not bool((seen[:, 1:] & ~seen[:, :-1]).any()):  # none is skipped
        seen = seen & (torch.arange(len(back)) >= len(back) - held)
    some = seen.any(1)
    wanted, found = (_attended(rows, sample.queries[some], seen[some]) for rows in (sample.entries, back))
    lost, whole = ((found - wanted).square().sum((1, 2)), wanted.square().sum((1, 2)))
    return (lost / whole).mean().item()


def _attended(x: Tensor, queries: Tensor, seen: Tensor) -> Tensor:
    """Attention of queries [m, h, d] to those of rows x [n, d] that are `seen` [m, n], and to no window: [m, h, d]."""
    logits: Tensor = queries @ x.mT * x.shape[1] ** -0.5
    out: Tensor = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ x
    return out
