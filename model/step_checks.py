"""What a decode step looks at without a host: the sum of each watched tensor, which the host reads once, afterwards."""

import math

import torch
from torch import Tensor

from kernels import codes
from kernels.rows import Fp4Keys, Fp8Entries, Fp8Keys, Rows
from model.errors import Tripwire
from model.sites import Site


class Sums:
    """Sums of watched tensors in one buffer on the device, each of a site and a layer: finite where all terms are.

    As in `model.tripwire.finite`, a sum that overflows is a fault too.

    Parameters
    ----------
    room
        Tensors of a step, at most.
    device
        Of the step.

    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.values = torch.zeros(room, dtype=torch.float32, device=device)
        self._cells = self.values.unbind(0)
        self._watched: list[tuple[Site, int | None, int]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._watched.clear()

    def add(self, site: Site, layer: int | None, x: Tensor, ratio: int = 1) -> None:
        """Watch `x`, of any shape and dtype of floats, at each position that ends `ratio` tokens."""
        cell = self._cells[len(self._watched)]
        torch.sum(x, dim=tuple(range(x.ndim)), dtype=torch.float32, out=cell)
        self._watched.append((site, layer, ratio))

    def add_row(self, site: Site, layer: int, rows: Rows, index: Tensor, ratio: int) -> None:
        """Watch the row `index` [1] int64 of a cache, which is written at each position that ends `ratio` tokens.

        Of a narrow form its scales, and what is stored without one: a group with a NaN has the scale NaN.
        """
        match rows:
            case Tensor():
                parts = [rows.index_select(0, index)]
            case Fp8Entries(_, rope, scale):
                parts = [rope.index_select(0, index), _scales(scale, index)]
            case Fp8Keys(_, scale):
                parts = [scale.index_select(0, index)]
            case Fp4Keys(_, scale):
                parts = [_scales(scale, index)]
            case _:
                raise NotImplementedError(f"a decode step writes no {type(rows).__name__}")
        for part in parts:
            self.add(site, layer, part, ratio)

    def look(self, position: int) -> None:
        """Read what the step of `position` left: one copy to the host. Tripwire for the first that is not finite."""
        found = self.values.tolist()
        for value, (site, layer, ratio) in zip(found, self._watched, strict=False):
            if not math.isfinite(value) and (position + 1) % ratio == 0:
                raise Tripwire(site.name, layer, position, f"values whose sum is {value}", "finite")


def _scales(scale: Tensor, index: Tensor) -> Tensor:
    return codes.e8m0(scale.view(torch.uint8).index_select(0, index).view(torch.float8_e8m0fnu))
