"""The arguments of an op as a value, for those who pass them on changed."""

from typing import NamedTuple

from torch import Tensor

from fathom.kernels.formats.stored import Rows, Slots


class Attend(NamedTuple):
    """The arguments of `attend`, in its order; see `kernels.attention.reference`."""

    q: Tensor
    ring: Tensor
    first: int
    window: int
    entries: Rows | Slots | None
    ratio: int
    selected: Tensor | None
    sink: Tensor
