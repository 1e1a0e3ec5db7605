"""The parameters of a checkpoint on torch's meta device: what the model is given to be rehearsed."""

from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor

from fathom.kernels.formats.groups import FP4_BLOCK, FP8_BLOCK, NVFP4_BLOCK, ROW_BLOCK
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Fp8Rows, NvFp4, Weight
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.tensor_mapping import ROUNDED, Form
from fathom.model.checkpoint.weights import Held
from fathom.runtime.plan.shapes import empty

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_PLAIN: Final = {
    Form.BF16: torch.bfloat16,
    Form.F16: torch.float16,
    Form.F32: torch.float32,
    Form.I64: torch.int64,
    Form.I32: torch.int32,
}
_SCALES: Final = {Form.FP8: E8M0, Form.FP8_F32: torch.float32}


def table(rows: int, columns: int) -> Fp8Rows:
    """A table whose rows are looked up by number."""
    return Fp8Rows(empty(rows, columns, dtype=E4M3), empty(rows, columns // ROW_BLOCK, dtype=E8M0))


def stored(form: Form, *shape: int, block: int = FP8_BLOCK) -> Weight:
    """A parameter in a stored form, which of a matrix alone may be a narrow one; `block` is that of FP8."""
    if form in _PLAIN:
        return Dense(empty(*shape, dtype=_PLAIN[form]))
    rows, columns = shape
    match form:
        case Form.FP8 | Form.FP8_F32:
            scale = empty(-(-rows // block), -(-columns // block), dtype=_SCALES[form])
            return Fp8(empty(rows, columns, dtype=E4M3), scale)
        case Form.FP4:
            return Fp4(empty(rows, columns // 2, dtype=torch.int8), empty(rows, columns // FP4_BLOCK, dtype=E8M0))
        case _:
            data, scale = empty(rows, columns // 2, dtype=torch.uint8), empty(rows, columns // NVFP4_BLOCK, dtype=E4M3)
            return NvFp4(data, scale, empty())


def form_of(weight: Weight) -> Form:
    """The form of a matrix that `stored` made."""
    match weight:
        case Fp8(_, scale):
            return next(form for form, dtype in _SCALES.items() if dtype == scale.dtype)
        case Fp4():
            return Form.FP4
        case NvFp4():
            return Form.NVFP4
    return next(form for form, dtype in _PLAIN.items() if dtype == weight.data.dtype)


class MetaWeights:
    """The parameters of a checkpoint, as `model.checkpoint.weights.Weights` hands them out, without bytes.

    `layers`: which of the checkpoint's stand for the layers of the model, one after the other.
    """

    def __init__(self, census: Census, held: Held, layers: Sequence[int]) -> None:
        self.census, self.held, self.layers = census, held, layers

    def matrix(self, name: str) -> Weight:
        """One matrix."""
        name = self._of_layer(name)
        (rows, columns), mapping = self.census.demanded[name].shape, self.census.mappings[name]
        return stored(mapping.form, self.held(name, rows).size, columns, block=mapping.block or FP8_BLOCK)

    def matrices(self, names: Sequence[str], *, together: bool) -> list[Weight]:
        """Several of one shape, those of one form as one."""
        del together
        forms = [self.census.mappings[self._of_layer(name)].form for name in names]
        made = {form: self.matrix(name) for form, name in dict(zip(forms, names, strict=True)).items()}
        return [made[form] for form in forms]

    def operand(self, name: str) -> Tensor:
        """Any other parameter, as stored."""
        name = self._of_layer(name)
        rows, *others = self.census.demanded[name].shape
        return stored(self.census.mappings[name].form, self.held(name, rows).size, *others)[0]

    vector = operand

    def rows(self, name: str) -> Fp8Rows:
        """A table whose rows are looked up."""
        return table(*self.census.demanded[self._of_layer(name)].shape)

    def table(self, name: str) -> Tensor:
        """A table of experts."""
        return self.operand(name).long()

    def here(self, names: Iterable[str]) -> list[str]:
        """Those of which this rank holds anything."""
        stored = {name: self._of_layer(name) for name in names}
        return [name for name, of in stored.items() if self.held(of, self.census.demanded[of].shape[0]).size]

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
