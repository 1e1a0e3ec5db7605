"""What one call of a model holds beside weights and caches: named tensors that are alive, and the scratch of an op."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.ops import Ops
from fathom.model.arithmetic import CODED
from fathom.model.cache.formats import CacheFormats
from fathom.model.checkpoint.tensor_mapping import ROUNDED, Form
from fathom.model.ranks.ranks import AxisShard, Shards
from fathom.model.rounding import FP8, Rounding

F32, I64 = 4, 8  # bytes
SLACK: Final = 1 << 16  # bytes of scratch that no op counts: a row of scales, a list of positions
HEAD_ROWS: Final = 64  # rows of logits made at once, see `scripts.logits`; generation makes one

# By name without layer and expert: form, rows and columns, and how many there are of these
Matrices = Mapping[str, Mapping[tuple[Form, int, int], int]]


class Moment(NamedTuple):
    """What is alive while something runs."""

    name: str  # of what runs
    parts: dict[str, int]  # bytes of what is alive, and of what it takes itself

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


class Live:
    """The named tensors that are alive, and the moment at which they and what ran took the most bytes."""

    def __init__(self) -> None:
        self.alive: dict[str, int] = {}
        self.largest = Moment("nothing", {})

    def hold(self, name: str, nbytes: int) -> None:
        """From here on, a tensor of so many bytes is alive; under a name that is there already, in its place."""
        self.alive[name] = nbytes

    def run(self, name: str, scratch: int = 0, exchange: int = 0) -> None:
        """Run something that takes `scratch`, or an `exchange` between ranks."""
        beside = {"scratch": scratch + SLACK, "exchange": exchange}
        moment = Moment(name, {what: nbytes for what, nbytes in (self.alive | beside).items() if nbytes})
        self.largest = max(self.largest, moment, key=lambda one: one.nbytes)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Let go at the end of what is held inside."""
        before = dict(self.alive)
        yield
        self.alive = before


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model on one rank, and what its bytes depend on."""

    ops: Ops  # of the backend
    matrices: Matrices  # of this rank, as they are stored
    formats: CacheFormats
    rounding: Rounding
    device: torch.device
    shards: Shards  # this rank's
    ranks: int
    tokens: AxisShard  # of the call: this rank's between attentions
    context: int  # positions that the caches hold
    prompt: int | None  # of them those of the prompt, where it is told; None: it may be as long
    even: bool  # whether tokens spread evenly over experts; else all go to one expert, or to this rank's
    few_pass: bool  # whether few entries pass the indexer's comparisons; else all do
    fp8_scores: bool  # whether index queries are rounded to E4M3

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
        return self.formats.dtype.itemsize

    def op(self, name: str, *sizes: object, **more: object) -> int:
        """Bytes of scratch of an op: what the function says that stands beside it, under its name and `_scratch`."""
        op = getattr(self.ops, name)
        found: int = getattr(sys.modules[op.__module__], f"{op.__name__}_scratch")(*sizes, **more)
        return found

    def linear(self, name: str, tokens: int, *, wide: bool = False) -> int:
        """`Arithmetic.linear` with a matrix of this name, the costliest; `wide`: of what is not rounded."""
        return self.linears(tokens, {name: wide})

    def linears(self, tokens: int, products: Mapping[str, bool]) -> int:
        """`Arithmetic.linears` with matrices of these names, wide or not, the costliest of each; results included.

        One after the other, the rounded input beside them; or, of a token alone, all at once.
        """
        made, largest, at_once, rounded, rounding = 0, 0, 0, 0, 0
        for name, wide in products.items():
            found = []
            for form, rows, columns in self.matrices[name]:
                sizes = rows, columns, form.name, self.item, self.device
                found.append([self.op("linear", n, *sizes, wide=wide) for n in (tokens, 1)])
                if self.rounds(form) and not wide:
                    rounded = tokens * columns * self.item
                    rounding = self.op("simulate_fp8", tokens * columns, self.item)
            taken, alone = (max(of) for of in zip(*found, strict=True))
            largest, at_once, made = max(largest, made + taken), at_once + alone, made + self.made(tokens, {name: wide})
        return max(rounding, rounded + largest, at_once)

    def rounds(self, form: Form) -> bool:
        """Whether inputs of linears in this form are rounded to FP8."""
        return self.rounding.linears == FP8 and form in ROUNDED

    def coded(self, *names: str) -> bool:
        """Whether inputs of all matrices of these names are."""
        return all(self.rounds(form) for name in names for form, _, _ in self.matrices[name])

    def in_codes(self, columns: int, *names: str) -> bool:
        """Whether ranks exchange the inputs of matrices of these names as codes, so many columns on each."""
        return self.t > CODED and columns % LINEAR_GROUP == 0 and self.coded(*names)

    def made(self, tokens: int, products: Mapping[str, bool]) -> int:
        """Bytes of the results of `linears`."""
        rows = {name: max(rows for _, rows, _ in self.matrices[name]) for name in products}
        return sum(tokens * rows[name] * (F32 if wide else self.item) for name, wide in products.items())

    def embed(self, live: Live, hidden: int) -> None:
        """Run the embedding: rows as stored; of several ranks looked up, masked, as integers, as they were."""
        rows = self.t * hidden * F32
        live.run("embedding", rows, 3 * rows + self.t * I64 if self.shards.vocabulary.split else 0)

    def unembed(self, live: Live, name: str, vocabulary: int) -> None:
        """Run the head, a matrix of this name, on as many rows as are made into logits at once."""
        head, rows = self.shards.vocabulary, min(HEAD_ROWS, self.t)
        gathered = rows * head.size * F32 + self.gather(rows * vocabulary, head, first=False, item=F32)
        live.run("logits", max(self.linear(name, rows, wide=True), gathered))

    def widened(self, numbers: int) -> int:
        """Bytes of as many activations made fp32; none where they are."""
        return 0 if self.item == F32 else numbers * F32

    def gather(self, numbers: int, shard: AxisShard, *, first: bool = True, item: int = 0) -> int:
        """Bytes of `Ranks.whole` of an axis, with so many numbers in the whole tensor; `first`: it is the first axis.

        This rank's part, those of all as the collective lays them out, in order, and where the axis is not the first or
        not even a copy. What gloo's threads free a moment late, on a busy machine, is the reserve's.
        """
        if not shard.split:
            return 0
        whole = numbers * (item or self.item)
        copied = 0 if first and shard.total % self.ranks == 0 else whole
        return -(-whole // self.ranks) + 2 * whole + copied

    def gather_coded(self, numbers: int, shard: AxisShard, *, first: bool) -> int:
        """The same of `Arithmetic.whole_rows`, or `.whole_columns` where it is not the `first` axis, of codes.

        Codes of this rank, those of all, and numbers again; of columns in order not even a copy.
        """
        if not shard.split:
            return 0
        own, bytes_of_all = -(-numbers // self.ranks), numbers + numbers // LINEAR_GROUP
        packing = self.op("pack_fp8", own, LINEAR_GROUP, self.item)
        gathered = -(-bytes_of_all // self.ranks) + 2 * bytes_of_all
        unpacked = self.op("unpack_fp8", numbers, LINEAR_GROUP, self.item)
        copied = 0 if first else numbers * self.item
        return max(packing, gathered, bytes_of_all * 2 + max(unpacked, copied + numbers * self.item))
