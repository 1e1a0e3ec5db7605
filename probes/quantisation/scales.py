"""What is stored quantised: scales, and how much of each format's range its blocks use."""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.formats.stored import Dense, Fp4, Fp8, Weight
from model.checkpoint.census import Census
from model.checkpoint.weights import Weights
from model.transformer import Transformer
from probes.finding import Finding, Table, exactly, judged, measured
from probes.shared import file_bytes
from probes.shared.held import find
from probes.shared.narrow import F64, as_bytes, power


@dataclass
class Stored:
    """The matrices of one form."""

    form: str
    matrices: int = 0
    blocks: int = 0
    half_used: int = 0  # blocks whose largest number lies in the upper half of the format's range
    exponents: list[int] = field(default_factory=list)  # least and largest of the scales
    bad_scales: int = 0  # no power of two that E8M0 has
    nan_bytes: int = 0
    minus_zeros: int = 0  # bytes 0x80: -0, and NaN to whoever takes OCP's E4M3 for AMD's FNUZ
    values: int = 0
    differing: list[str] = field(default_factory=list)  # matrices whose bytes, as held, are not the files'

    def add(self, name: str, held: Weight | Tensor | None, filed: Weight) -> None:
        """Count one matrix as the model holds it."""
        self.matrices += 1
        if held is None or isinstance(held, Tensor) or type(held) is not type(filed) or not _same(held, filed):
            self.differing.append(name)
        if isinstance(held, Fp8):
            codes = as_bytes(held.data)
            self.values += codes.size
            self.nan_bytes += int((codes & 127 == 127).sum())
            self.minus_zeros += int((codes == 128).sum())
            self._blocks(_fp8_largest(np.abs(file_bytes.E4M3[codes])), 224)
        elif isinstance(held, Fp4):
            size = np.abs(file_bytes.e2m1(as_bytes(held.data)))
            self.values += size.size
            self._blocks(size.reshape(len(size), -1, 32).max(2), 3)
        if isinstance(held, Fp8 | Fp4):
            self._scales(power(held.scale))

    def _blocks(self, largest: F64, half: float) -> None:
        self.blocks += largest.size
        self.half_used += int((largest >= half).sum())

    def _scales(self, scale: F64) -> None:
        fraction, exponent = np.frexp(scale)
        exponent = exponent[np.isfinite(scale)] - 1
        good = (fraction == 0.5) & np.isfinite(scale)
        self.bad_scales += int((~good).sum())
        if exponent.size:
            self.exponents = [
                min([int(exponent.min()), *self.exponents]),
                max([int(exponent.max()), *self.exponents]),
            ]


def _same(held: Weight, filed: Weight) -> bool:
    """Whether two matrices of one form are the same bytes."""
    return all(torch.equal(_raw(a), _raw(b)) for a, b in zip(held, filed, strict=True))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _fp8_largest(size: F64) -> F64:
    """Largest number of each 128 x 128 block; those at the edges may be partial."""
    rows, columns = (math.ceil(length / 128) * 128 - length for length in size.shape)
    padded = np.pad(size, ((0, rows), (0, columns)))
    largest: F64 = padded.reshape(len(padded) // 128, 128, -1, 128).max((1, 3))
    return largest


def survey(model: Transformer, census: Census, weights: Weights, experts: int) -> list[Stored]:
    """Go through the quantised matrices; of the routed experts of a layer, `experts` spread over them."""
    count = model.config.n_routed_experts
    some = {e * count // min(experts, count) for e in range(min(experts, count))}
    forms: dict[str, Stored] = {}
    for name, parameter in census.demanded.items():
        if parameter.kind != "matrix" or (".experts." in name and int(name.split(".")[4]) not in some):
            continue
        filed = weights.matrix(name)
        if isinstance(filed, Dense):
            continue
        place = find(model, name)
        form = census.mappings[name].form.value
        forms.setdefault(form, Stored(form)).add(name, None if place is None else place.value, filed)
    return list(forms.values())


def findings(forms: list[Stored]) -> list[Finding]:
    """Judge what is stored; how much of the range is used is the checkpoint's own affair, and measured."""
    found = []
    for form in forms:
        found.append(
            judged(
                f"{form.form}: matrices whose bytes, as held, are not the files'",
                len(form.differing),
                exactly(0),
                of=form.matrices,
                first=form.differing[:3],
            )
        )
        if form.blocks:
            found += [
                judged(f"{form.form}: scales that are no powers of two", form.bad_scales, exactly(0)),
                measured(
                    f"{form.form}: blocks that leave the upper half of the range unused", form.blocks - form.half_used
                ),
            ]
        if form.form.startswith("FP8"):
            found.append(judged(f"{form.form}: bytes that are NaN", form.nan_bytes, exactly(0), of=form.values))
    return found


def table(forms: list[Stored]) -> Table:
    """What is stored, a row for each form."""
    columns = (
        "form",
        "matrices",
        "blocks",
        "least scale",
        "largest scale",
        "blocks using the upper half of the range, %",
        "bytes 0x7f, 0xff",
        "bytes 0x80",
    )
    rows = [
        (
            form.form,
            form.matrices,
            form.blocks or None,
            f"2^{form.exponents[0]}" if form.exponents else None,
            f"2^{form.exponents[1]}" if form.exponents else None,
            100 * form.half_used / form.blocks if form.blocks else None,
            form.nan_bytes if form.form.startswith("FP8") else None,
            form.minus_zeros if form.form.startswith("FP8") else None,
        )
        for form in forms
    ]
    note = (
        "A block quantised with the smallest power of two that fits has its largest number in the upper half of the "
        "format's range: at least 224 of 448 for E4M3, at least 3 of 6 for E2M1. Byte 0x80 is -0 here, and NaN in the "
        "FNUZ dialect of E4M3."
    )
    return Table("Stored weights", columns, rows, note)
