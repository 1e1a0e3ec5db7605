"""What the bytes of a call depend on, and what all of its parts reckon with."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from model.checkpoint.binding import Form
from model.checkpoint.census import Census
from model.config import ModelConfig
from model.ranks.ranks import Share, Shares
from runtime.plan.ops import F32, Costs

Alive = dict[str, int]  # bytes by what they are
Forms = Mapping[str, frozenset[Form]]

IN_FP32: Final = Costs(F32, deployed=False, narrow=False)  # compressors, gate and head, in every run


class Moment(NamedTuple):
    """What is alive while something runs."""

    name: str  # of what runs
    parts: Alive  # what it keeps and takes

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


def moment(name: str, alive: Alive, **more: int) -> Moment:
    """What is alive, and while `name` runs `more`: `work` of an op, `exchange` between ranks."""
    return Moment(name, {what: size for what, size in (alive | more).items() if size})


def stored_forms(census: Census) -> Forms:
    """The forms in which each parameter is stored over all layers and experts, by name without these and `.weight`."""
    found: dict[str, set[Form]] = {}
    for name, binding in census.bindings.items():
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        found.setdefault(".".join(parts).removeprefix("layers."), set()).add(binding.form)
    return {name: frozenset(forms) for name, forms in found.items()}


class Sizes(NamedTuple):
    """One call on one rank."""

    config: ModelConfig
    costs: Costs
    forms: Forms
    shares: Shares  # this rank's
    ranks: int
    tokens: Share  # of the call: this rank's between attentions
    context: int  # positions that the caches hold
    even: bool  # whether tokens spread evenly over experts; else all go to one expert, or to this rank's
    few_pass: bool  # whether few entries pass the indexer's comparisons; else all do

    @property
    def t(self) -> int:
        """Tokens of the call."""
        return self.tokens.total

    @property
    def m(self) -> int:
        """Those of this rank between attentions."""
        return self.tokens.size

    @property
    def item(self) -> int:
        """Bytes of an activation."""
        return self.costs.item

    def linear(self, name: str, tokens: int, rows: int, columns: int) -> int:
        """`Arithmetic.linear` with a matrix by its name in `forms`, in the costliest of these."""
        return max(self.costs.rounded_linear(tokens, rows, columns, form) for form in self.forms[name])

    def wide_linear(self, name: str, tokens: int, rows: int, columns: int) -> int:
        """The same in fp32 whatever the run's dtype; its input is not counted."""
        return max(IN_FP32.linear(tokens, rows, columns, form) for form in self.forms[name])

    def gather(self, numbers: int, share: Share, *, first: bool = True, item: int | None = None) -> int:
        """`Ranks.whole` of an axis, with so many numbers in the whole tensor; `first`: it is the first axis."""
        if not share.split:
            return 0
        whole = numbers * (item or self.item)
        uneven = share.total % self.ranks != 0
        turned = 0 if first and not uneven else whole
        # this rank's part, those of all as the collective lays them out, the same in order, and turned back
        return -(-whole // self.ranks) + 2 * whole + turned
