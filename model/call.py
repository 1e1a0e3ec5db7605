"""One call of a model: some tokens that follow each other, where they stand, and which of them this rank has."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom.model.arithmetic import Arithmetic
from fathom.model.rope import Rotation

if TYPE_CHECKING:
    from fathom.model.ranks.ranks import AxisShard


class Call:
    """What every layer of one call is given.

    Between attentions a rank has all of a call's t tokens, or its shard of m of them; `own`, `whole` and `columns` lead
    from one to the other. Where it has all, the first two give back what they are given. No equation of a layer calls
    them: its parts do (`model.linear`, `HyperHead`, `model.ranks.experts`), and draft heads, whose rows are a few.

    Attributes
    ----------
    tokens
        [m] int64, ids of this rank's tokens.
    first
        Position of the first of the t tokens; in a call that is captured, for a graph, [] int64 on the device.
    count
        t.
    shard
        Which of the t tokens are this rank's.
    selected, candidates
        What layers of V4.1 leave to those after them: the selection of each that selects, [t, k] int32 by its number,
        and the blocks of entries among which later ones select, [t, n] int32.

    """

    def __init__(self, tokens: Tensor, first: int | Tensor, arithmetic: Arithmetic) -> None:
        self.count, self.first = tokens.shape[0], first
        self.shard: AxisShard = arithmetic.ranks.tokens(self.count)
        self.tokens = self.own(tokens)
        self._ranks = arithmetic.ranks
        self._angles: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._back: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._windows: dict[tuple[Rotation, int, int, int], tuple[Tensor, Tensor]] = {}
        self._places: dict[int, Tensor] = {}
        self.selected: dict[int, Tensor] = {}
        self.candidates: Tensor | None = None

    @property
    def own_first(self) -> int | Tensor:
        """Position of the first of this rank's tokens."""
        return self.first + self.shard.start if self.shard.split else self.first

    def own(self, x: Tensor) -> Tensor:
        """Rows of all tokens [t, ...] to those of this rank's [m, ...], as a view."""
        return self.shard.of(x)

    def whole(self, x: Tensor) -> Tensor:
        """Rows of this rank's tokens [m, ...] to those of all [t, ...]."""
        return self._ranks.whole(x, 0, self.shard)

    def columns(self, x: Tensor, columns: "AxisShard") -> Tensor:
        """Lead from a rank's columns of all tokens [t, columns.size] to all columns of its own [m, columns.total]."""
        if not columns.split:
            return self.own(x)
        if not self.shard.split:
            return self._ranks.whole(x, 1, columns)
        return self._ranks.turned(x, columns, self.shard)

    def by_token(self, run: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """``run(call, *rows)`` of rows of all tokens [t, ...], each of which it computes by itself: [t, ...].

        A rank runs it on the rows of its own tokens, in a call of these alone.
        """
        call = _Own(self) if self.shard.split else self
        return self.whole(run(call, *map(self.own, rows)))

    def angles(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all tokens, each [t, r / 2] float32; made once for the layers that share a rotation."""
        if rotation not in self._angles:
            self._angles[rotation] = rotation.at(self.first, self.count)
        return self._angles[rotation]

    def angles_back(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """The same of the rotation that undoes it."""
        if rotation not in self._back:
            cos, sin = self.angles(rotation)
            self._back[rotation] = cos, -sin
        return self._back[rotation]

    def angles_of_windows(self, rotation: Rotation, first: int, count: int, ratio: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of windows of `ratio` tokens from `first` on, as of their starts: [count, r / 2] each."""
        windows = rotation, first, count, ratio
        if windows not in self._windows:
            self._windows[windows] = rotation.at(first, count, ratio)
        return self._windows[windows]

    def places(self, modulus: int) -> Tensor:
        """Positions of all tokens modulo something, [t] int64; made once for all layers."""
        if modulus not in self._places:
            device = self.tokens.device
            self._places[modulus] = (self.first + torch.arange(self.count, device=device)) % modulus
        return self._places[modulus]


class _Own(Call):
    """A call of a rank's own tokens alone, inside of a call of all."""

    def __init__(self, every: Call) -> None:
        self.every, self.first, self.count = every, every.own_first, every.shard.size

    def angles(self, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Those of these tokens, each [m, r / 2]."""
        cos, sin = self.every.angles(rotation)
        return self.every.own(cos), self.every.own(sin)
