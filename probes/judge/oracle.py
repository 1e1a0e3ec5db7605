"""The oracle: one layer of V4 in float64, written from the paper and DeepSeek's formulas, to judge tensors by.

It shares no code with `kernels` or `model`: of them it takes the facts of config.json, and the bytes of the files.
Every site is a method that says how it follows from the sites before it. A site that was recorded is not computed but
taken as it was recorded, so that each is judged from the nearest recorded ones (teacher forcing): a wrong tensor says
nothing about those after it.

How far rounding may take a run from this is found by doing it: beside the exact values, replicas of them are carried
along in which every tensor is moved by half a unit in the last place of the run's dtype, up or down at random, where a
run of that dtype has a tensor; sums of products are moved as fp32 accumulators are off at most. What the replicas
differ by is the spread of a site. Where a value decides (a selection, a rounding to FP8 or FP4), a replica differs
`FACTOR` times as much, so that whatever the bound leaves open is decided in both ways by some of them. What is drawn
for a number follows from its layer, its site, its row and its place in it, see `Noise`: a verdict does not depend on
what else is judged.

All tensors are [r, n, ...] float64: r is 1 where nothing was moved yet, else 1 + replicas, the exact values first.

Source: DeepSeek-V4's technical report, section 2; DeepSeek's inference code, model.py and kernel.py.
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fathom.model.checkpoint.census import Census, census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.tensor_mapping import Form, TensorMapping
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.rounding import F16, FP4, FP8, GGML, NONE, Rounding

Array = NDArray[Any]

F32: Final = torch.float32
F64: Final = torch.float64
PRECISION: Final = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}  # bits of a significand
REPLICAS: Final = 15
# How many times the spread a difference may be. The spread is the RMS of 15 draws; an error of at least four
# independent parts that is no larger than the spread exceeds four times it in one row of 10^9 (F distribution of 4 and
# 60 degrees of freedom). Real roundings are uniform in half a unit, and their RMS is 0.58 of it.
FACTOR: Final = 4.0
# All rows of a site together: rounding as often again as the replicas do would take their RMS to 1.4 times the spread.
TOGETHER: Final = 2.0
HEAVY: Final = 64  # a number makes up much of its row where it holds one part in so many of the squared length
NUMBERS: Final = 1 << 24  # float64 of a temporary tensor, 128 MiB
RUN_FREELY: Final = 1 << 28  # numbers of the streams of a whole prompt, replicas included: 2 GiB
MOST: Final = 1e30  # of a sink, beyond which it takes all or nothing: infinities have no difference
TOKENS: Final = 512  # of the whole prompt at a time

KV_BLOCK, LINEAR_BLOCK, INDEX_BLOCK = 64, 128, 32  # columns that share a scale when they are rounded
FREELY: Final = "freely"  # of a value: it came by way of the layers before, none of which was recorded
SELECTED, CANDIDATES, EXPERT_IDS = "indexer.selected", "indexer.candidates", "experts.ids"
LOGPROBS, LOGPROB_IDS = "logprobs", "logprobs.ids"


class Unknown(LookupError):
    """A site cannot be computed: what it follows from was not recorded, and there are no weights to compute it with."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


# --- weights: the numbers that the stored bytes stand for


def _e4m3() -> Tensor:
    """Value of each byte as E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F is NaN."""
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
        values.append((math.nan if byte & 127 == 127 else size) * (-1 if byte & 128 else 1))
    return torch.tensor(values, dtype=F64)


E4M3: Final = _e4m3()
E2M1: Final = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=F64)


def decoded(form: Form, data: Tensor, scale: Tensor | None, overall: Tensor | None, block: int = 128) -> Tensor:
    """A parameter as float64.

    Parameters
    ----------
    form
        How it is stored.
    data
        The stored tensor; two columns of FP4 share a byte, the even one in its low half.
    scale
        Of blocks: [out / block, in / block] of FP8, [out, in / 32] of FP4 and FP8 by rows, [out, in / 16] of NVFP4.
    overall
        One number, of NVFP4.
    block
        Rows and columns that share a scale of FP8.

    """
    if form in (Form.FP8, Form.FP8_F32):
        assert scale is not None, "FP8 has scales"
        values = E4M3.index_select(0, data.view(torch.uint8).int().flatten()).view(data.shape)
        by_row = _scales(scale).repeat_interleave(block, 0).split(1, 1)
        for columns, factor in zip(values.split(block, 1), by_row, strict=True):
            columns.mul_(factor[: len(data)])
        return values
    if form is Form.FP8_ROWS:
        assert scale is not None, "FP8 has scales"
        values = E4M3.index_select(0, data.view(torch.uint8).int().flatten()).view(*data.shape[:-1], -1, 32)
        return (values * _scales(scale)[..., None]).flatten(-2)
    if form in (Form.FP4, Form.NVFP4):
        assert scale is not None, "FP4 has scales"
        values = E2M1_PAIRS.index_select(0, data.view(torch.uint8).int().flatten()).view(len(data), -1)
        values.unflatten(1, (-1, 32 if form is Form.FP4 else 16)).mul_(_scales(scale)[..., None])
        return values if overall is None else values * overall.to(F64)
    return data.to(F64)


def _scales(scale: Tensor) -> Tensor:
    """Block scales: E8M0 is 2^(byte - 127), NVFP4's are E4M3, F32 is itself."""
    if scale.dtype == torch.float8_e8m0fnu:
        return _two_to(scale.view(torch.uint8).int() - 127)
    return E4M3[scale.view(torch.uint8).int()] if scale.dtype == torch.float8_e4m3fn else scale.to(F64)


E2M1_PAIRS: Final = torch.stack((E2M1.repeat(16), E2M1.repeat_interleave(16)), 1)  # of a byte, its low half first


class Parameters:
    """The parameters of a checkpoint as float64, by official name; those of the layer at hand are kept."""

    def __init__(self, checkpoint: Checkpoint, counted: Census, types: Mapping[str, str] | None = None) -> None:
        self.checkpoint, self.mappings, self.absent = checkpoint, counted.mappings, counted.absent
        self.kept: dict[str, Tensor] = {}
        self.scales: dict[str, tuple[float, float]] = {}  # the least and the largest of those decoded, by their form
        self.changed: dict[str, Tensor] = {}  # float64, in place of what the files hold: of a run with these
        self.types = types or {}  # ggml's, of a GGUF file, by official name

    @classmethod
    def of(cls, directory: Path, config: ModelConfig, *, head: bool = False) -> Self:
        """Those of a checkpoint's files, a draft head's too where it is asked for; CheckpointError as of a census."""
        checkpoint = Checkpoint.open(directory)
        return cls(checkpoint, census(checkpoint.shapes(), config, where=str(directory), head=head))

    def mapping(self, name: str) -> TensorMapping:
        """Where its bytes are; Unknown, naming the file, where that is not here."""
        if name in self.absent:
            raise Unknown(f"{name} is in {self.checkpoint.absent[self.absent[name]]}, which is not in the directory")
        return self.mappings[name]

    def __getitem__(self, name: str) -> Tensor:
        """Read and decode one; Unknown where its file is not here."""
        if name not in self.kept:
            self.kept[name] = self.fresh(name)
        return self.kept[name]

    def fresh(self, name: str) -> Tensor:
        """Read and decode one that is not kept: an expert's."""
        if name in self.changed:
            return self.changed[name]
        mapping, read = self.mapping(name), self.checkpoint.read
        data = read(mapping.weight)
        if mapping.part is not None:
            data = data[mapping.part.expert, mapping.part.start : mapping.part.stop]
        scale, overall = (None if part is None else read(part) for part in (mapping.scale, mapping.global_scale))
        if scale is not None:
            least, most = (float(x) for x in _scales(scale).aminmax())
            before = self.scales.get(mapping.form.name, (math.inf, -math.inf))
            self.scales[mapping.form.name] = min(least, before[0]), max(most, before[1])
        return decoded(mapping.form, data, scale, overall, mapping.block)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows of a table or an embedding, as they are stored; Unknown where its file is not here."""
        mapping = self.mapping(name)
        data = self.checkpoint.rows(mapping.weight, ids)
        if mapping.scale is None:
            return data
        return decoded(mapping.form, data, self.checkpoint.rows(mapping.scale, ids), None)

    def rounds(self, name: str) -> bool:
        """Whether the input of this linear is one that a run may round: that of FP8 and FP4 weights."""
        return self.mapping(name).form in (Form.FP8, Form.FP8_F32, Form.FP4)

    def forget(self) -> None:
        """Let go of what was kept, when another layer comes."""
        self.kept.clear()


# --- rounding to the narrow formats, as DeepSeek's kernels do it


class Narrow(NamedTuple):
    """A narrow format: codes times a power of two for each block of columns."""

    name: str  # E4M3 | E2M1
    largest: float  # code
    least: float  # amax that a scale is made of
    step: Callable[[Tensor], Tensor]  # distance of the codes around y, |y| <= largest
    block: int = 0  # columns that share a scale; 0: all of a row

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks [..., blocks, columns] of x, and the power of two of each, [..., blocks, 1]."""
        blocks = x.unflatten(-1, (-1, self.block or x.shape[-1]))
        return blocks, _scale_of(blocks.abs().amax(-1, keepdim=True).clamp_min(self.least), self.largest)

    def borders(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The largest numbers of a block below and above which its scale is another."""
        return self.largest * scale / 2, self.largest * scale

    def rounded(self, x: Tensor) -> Tensor:
        """Round [..., d], ties to even, as DeepSeek's `act_quant` and `fp4_act_quant` do."""
        blocks, scale = self.scales(x)
        y = (blocks / scale).clamp(-self.largest, self.largest)
        step = self.step(y)
        return (torch.round(y / step) * step).clamp(-self.largest, self.largest).mul(scale).flatten(-2)


def _step_e4m3(y: Tensor) -> Tensor:
    exponent = torch.frexp(y).exponent.clamp_min(-5)  # y = fraction 2^exponent, half <= fraction < 1
    return _two_to(exponent - 4)


def _step_e2m1(y: Tensor) -> Tensor:
    return torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))


E4M3_ROW: Final = Narrow("E4M3", 448.0, 1e-4, _step_e4m3)
E4M3_LINEAR, E4M3_KV = E4M3_ROW._replace(block=LINEAR_BLOCK), E4M3_ROW._replace(block=KV_BLOCK)
E2M1_INDEX: Final = Narrow("E2M1", 6.0, 6 * 2.0**-126, _step_e2m1, INDEX_BLOCK)


class Unscaled(Narrow):
    """A narrow format without scales."""

    __slots__ = ()

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All of a row in one block, of scale 1."""
        blocks = x.unflatten(-1, (1, -1))
        return blocks, torch.ones_like(blocks[..., :1])


class Whole(Narrow):
    """Whole numbers from -127 to 127, of which the largest of a block is one, times a scale in fp16: ggml's Q8_0."""

    __slots__ = ()

    def scales(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Blocks, and the scale of each as numbers are divided by it, not rounded yet."""
        blocks = x.unflatten(-1, (-1, self.block))
        return blocks, (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(2.0**-500)

    def rounded(self, x: Tensor) -> Tensor:
        """Round [..., d]; the scale is rounded to fp16 where numbers are multiplied by it."""
        blocks, scale = self.scales(x)
        return (torch.round(blocks / scale) * self.held(scale)).flatten(-2)

    def held(self, scale: Tensor) -> Tensor:
        """A scale as it is kept: in fp16, of blocks of 256 (Q8_K) in fp32."""
        return scale.to(F32 if self.block > LINEAR_BLOCK else torch.float16).to(F64)


def _step_half(y: Tensor) -> Tensor:
    return _two_to(torch.frexp(y).exponent.clamp_min(-13) - 11)


def _step_bf16(y: Tensor) -> Tensor:
    return _two_to(torch.frexp(y).exponent.clamp_min(-125) - 8)


HALF: Final = Unscaled("F16", math.inf, 0.0, _step_half)
BFLOAT16: Final = Unscaled("BF16", math.inf, 0.0, _step_bf16)
Q8_0: Final = Whole("Q8_0", math.inf, 0.0, torch.ones_like, 32)
Q8_K: Final = Q8_0._replace(name="Q8_K", block=256)

# What ggml's products on a CPU round the other factor to, by the type of the weight: `vec_dot_type` of ggml-cpu.c.
ASKED: Final = {
    "F16": HALF,
    "BF16": BFLOAT16,
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "NVFP4", "IQ4_NL"), Q8_0),
    **dict.fromkeys(
        ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M",
         "IQ4_XS", "TQ1_0", "TQ2_0"),
        Q8_K,
    ),
}  # fmt: skip


def _scale_of(amax: Tensor, largest: float) -> Tensor:
    """The least power of two that is not below ``amax / largest``: `fast_round_scale`.

    As there, that is a product in fp32 with a reciprocal in fp32: it decides on which side an amax falls that lies
    within an ulp of `largest` times a power of two.
    """
    reciprocal = torch.tensor(1 / largest, dtype=F32)
    fraction, exponent = torch.frexp((amax.to(F32) * reciprocal).to(F64))
    return _two_to(exponent - (fraction == 0.5).int())


def length(x: Tensor) -> Tensor:
    """Euclidean length of the last axis."""
    return x.square().sum(-1).sqrt()


def hadamard(x: Tensor) -> Tensor:
    """Multiply [..., d] by the Walsh-Hadamard matrix in natural order, divided by the root of d."""
    d, half = x.shape[-1], 1
    while half < d:
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x, half = torch.stack((a + b, a - b), -2).flatten(-3), 2 * half
    out: Tensor = x * d**-0.5
    return out


def _two_to(exponent: Tensor) -> Tensor:
    """Powers of two from their exponents, exact: the bits of float64."""
    return (exponent.long() + 1023 << 52).view(F64)


# --- what rounding does to a run


@dataclass
class Work:
    """Rows of sites that were computed: all of them, and at most at once."""

    rows: int = 0
    most: int = 0


class Noise:
    """Moves the replicas of a tensor as rounding to a dtype may.

    The direction in which a number is moved follows from what is computed and for which row (`of` says both), from how
    many tensors were moved for that before, and from the number's place in its row: not from the rows beside it, nor
    from what was computed before.

    Parameters
    ----------
    dtype
        The run's.
    replicas
        How many of them.
    first
        The first one's number: others of the same run are found with another.
    seed
        Of the directions.

    """

    def __init__(self, dtype: torch.dtype, replicas: int = REPLICAS, first: int = 0, seed: int = 0) -> None:
        self.dtype, self.replicas, self.first, self.seed = dtype, replicas, first, seed
        self.factor = FACTOR  # how far replicas are moved apart where a value decides
        self.what: tuple[object, ...] = ()
        self.rows = torch.zeros(1, dtype=torch.int64)
        self.drawn = self.decided = 0  # tensors that were moved, and that decided something, since `of`
        self.work = Work()

    @contextmanager
    def of(self, *what: object, rows: Tensor) -> Iterator[None]:
        """Inside the ``with``, tensors are [r, n, ...] of these rows [n], and belong to what is named."""
        before = self.what, self.rows, self.drawn, self.decided
        self.what, self.rows, self.drawn, self.decided = what, rows, 0, 0
        self.work.rows, self.work.most = self.work.rows + len(rows), max(self.work.most, len(rows))
        try:
            yield
        finally:
            self.what, self.rows, self.drawn, self.decided = before

    def parts(self, rows: Tensor, most: int) -> Iterator[slice]:
        """So many rows at a time, each as if it were alone."""
        before, drawn, decided = self.rows, self.drawn, self.decided
        for low in range(0, max(1, len(rows)), most):
            part = slice(low, low + most)
            self.rows, self.drawn, self.decided = rows[part], drawn, decided
            yield part
        self.rows = before

    def through_layers(self) -> Self:
        """The same for a run of several layers, in which moving replicas apart again and again would leave no bound."""
        other = copy.copy(self)
        other.factor = 1.0
        return other

    def beside(self, dtype: torch.dtype) -> Self:
        """The same for another run of the same rows, of its own dtype and moved in directions of its own."""
        other = copy.copy(self)
        other.dtype, other.seed = dtype, self.seed + 1
        return other

    def spread(self, x: Tensor) -> Tensor:
        """Give every replica a tensor of its own."""
        return x if x.shape[0] > 1 or not self.replicas else x.repeat(1 + self.replicas, *[1] * (x.ndim - 1))

    def moved(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Move each number of the replicas by half a unit in its last place."""
        x = self.spread(x)
        if x.shape[0] > 1:
            part = x[1:].numpy()
            half = (part.view(np.int64) & EXPONENT) - (PRECISION[dtype or self.dtype] << MANTISSA)
            np.maximum(half, 0, out=half)  # of zero, and near the least float64, half a unit is none
            moves = self._signed(half.view(np.float64))
            with np.errstate(all="ignore"):  # a recording may hold any bits
                part += moves
        return x

    def stored(self, x: Tensor) -> Tensor:
        """Values that a run has as they are, rounded to its dtype: the replicas are off as that is at most."""
        x = self.spread(x)
        if x.shape[0] > 1:
            near = x[:1].to(self.dtype).to(F64)
            x[1::2], x[2::2] = near, 2 * x[:1] - near
        return x

    def summed(self, y: Tensor, size: Tensor) -> Tensor:
        """Move sums of products as rounding every partial sum in fp32 can, where these are added one by one.

        `size` is what the partial sums grow to, ``|x| |w|`` for two vectors: n roundings of them have the variance of
        one of it.
        """
        y = self.spread(y)
        if y.shape[0] > 1:
            size = size[1:] if size.shape[0] > 1 else size
            moves = (size * 2.0**-23).expand(y[1:].shape).contiguous()
            y[1:].add_(torch.from_numpy(self._signed(moves.numpy())))
        return y

    def choosing(self, x: Tensor, count: int, apart: float) -> Tensor:
        """What the best `count` are chosen by: replicas `apart` times as far off, equal values in any order.

        -inf is what cannot be chosen.
        """
        del count
        if x.shape[0] == 1:
            return x
        known = x.masked_fill(x.isneginf(), 0)
        off = torch.from_numpy(self._signed((known[1:].abs() * 2.0**-40 + 2.0**-500).numpy()))
        out = torch.cat((known[:1], known[:1] + (known[1:] - known[:1]) * apart + off))
        return out.masked_fill_(x.isneginf(), -math.inf)

    def rounding(self, x: Tensor, form: Narrow, apart: float) -> Tensor:
        """What is rounded to a narrow format: replicas that are `apart` times as far off where a flip is rare.

        In a run of fp32 that is everywhere. In one of bf16 some numbers of every row round otherwise, and the
        spread has it; but not so surely a single number that makes up much of its row.
        """
        del form
        if x.shape[0] == 1:
            return x
        off = x[1:] - x[:1]
        if self.dtype != torch.float32:
            square = x[:1].square()
            off = torch.where(HEAVY * square >= square.sum(-1, keepdim=True), apart * off, off)
            return torch.cat((x[:1], x[:1] + off))
        return torch.cat((x[:1], x[:1] + apart * off))

    def _signed(self, sizes: Array) -> Array:
        """Sizes [replicas, n, ...] float64 with the signs that are drawn next. In numpy, whose calls cost a third."""
        assert sizes.shape[1] == len(self.rows), f"{sizes.shape[1]} rows of {self.what}, want {len(self.rows)}"
        self.drawn += 1
        if not sizes.size:
            return sizes
        flat = sizes.view(np.uint64).reshape(len(sizes), sizes.shape[1], -1)
        first, last = self.first, self.first + len(flat)
        together = max(1, AT_ONCE // flat[0].size)
        for number in range(first // SIGNS, (last - 1) // SIGNS + 1):
            signs, start = self._signs(number, flat.shape[2]), number * SIGNS
            end = min(start + SIGNS, last)
            for low in range(max(start, first), end, together):
                high = min(low + together, end)
                bits = signs << SHIFTS[low - start : high - start]
                bits &= SIGN_BIT
                flat[low - first : high - first] ^= bits
        return flat.view(np.float64).reshape(sizes.shape)

    def _signs(self, number: int, width: int) -> Array:
        """Drawn bits [n, width] uint64: of `SIGNS` replicas each has its sign in a bit, that of its number."""
        told = repr((self.seed, *self.what, self.drawn, number)).encode()
        key = np.uint64(int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little"))
        rows = _shuffled(self.rows.numpy().view(np.uint64) + key)
        return _shuffled(rows[:, None] + np.arange(width, dtype=np.uint64) * GOLDEN)


SIGNS: Final = 63  # replicas whose signs one drawn number has
SHIFTS: Final = np.arange(SIGNS, dtype=np.uint64)[:, None, None]
SIGN_BIT: Final = np.uint64(1 << 63)
GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # an odd number, by which neighbours lie far apart
MANTISSA: Final = 52  # bits of a float64
EXPONENT: Final = 0x7FF << MANTISSA
AT_ONCE: Final = 1 << 15  # numbers of replicas that get signs together, so that they stay in a cache


def _shuffled(x: Array) -> Array:
    """Bits that look drawn from numbers that do not, uint64: the finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    mixed: Array = x ^ x >> np.uint64(31)
    return mixed


# --- the layer


class Theirs(Protocol):
    """What was recorded."""

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """Rows [n, ...] of a tensor at these positions (or entries), all where None; None where not all are there."""
        ...


class Replay(NamedTuple):
    """From which position on late layers of V4.1 were given the prompt: their windows see nothing before it."""

    start: int
    layer: int  # the first that is late


@dataclass(frozen=True, slots=True)
class Setting:
    """What a recording is judged as."""

    config: ModelConfig
    parameters: Parameters
    tokens: Tensor  # [t] int64
    rounding: Rounding
    theirs: Theirs
    noise: Noise
    freely: bool = True  # whether a layer whose input was not recorded is computed from the embeddings on
    replay: Replay | None = None
    layer: "type[Layer] | None" = None  # of V4.1: one with a fault
    alike: Tensor | None = None  # [vocab] of V4.1: the number of each id, those that spell alike have one


class Part:
    """What the equations of layers and of the head have in common."""

    def __init__(self, setting: Setting, prefix: str) -> None:
        self.setting, self.config, self.prefix = setting, setting.config, prefix
        self.noise, self.rounding, self.parameters = setting.noise, setting.rounding, setting.parameters
        self.largest: dict[str, float] = {}  # of what a clamp may cut, by whose experts and which half
        self.rests: set[str] = set()  # what the last value rests on beside what was recorded: FREELY, or own choices

    @property
    def apart(self) -> float:
        """How far replicas are moved apart where a value decides: no further behind layers that were run freely."""
        return 1.0 if FREELY in self.rests else self.noise.factor

    def name(self, parameter: str) -> str:
        """Official name of one of this part's parameters."""
        return f"{self.prefix}{parameter}"

    def looked_up(self, parameter: str, ids: Tensor) -> Tensor:
        """Rows [r, n, width] of an embedding."""
        return self.noise.stored(self.parameters.rows(self.name(parameter), ids).to(F64)[None])

    def linear(self, x: Tensor, parameter: str) -> Tensor:
        """``x W^T``, the input rounded where the run rounds it."""
        name = self.name(parameter)
        return self.product(self.rounded(x, name), self.parameters[name])

    def rounded(self, x: Tensor, name: str) -> Tensor:
        """The input of a linear: E4M3 by blocks of columns, where the run rounds those of FP8 and FP4 weights."""
        if self.rounding.linears != FP8:
            return self.asked(x, name)
        return self.narrow(x, E4M3_ROW._replace(block=self.config.fp8_block)) if self.parameters.rounds(name) else x

    def asked(self, x: Tensor, name: str) -> Tensor:
        """The input of any product with a weight, in the format that its type asks for where the run has ggml's."""
        form = ASKED.get(self.parameters.types.get(name, "")) if self.rounding.linears == GGML else None
        if isinstance(form, Whole):  # on which side of a tie a number lies is computed in fp32
            x = self.noise.moved(x, F32)
        return x if form is None else self.narrow(x, form)

    def narrow(self, x: Tensor, form: Narrow) -> Tensor:
        """What a run holds in a narrow format."""
        return form.rounded(self.noise.rounding(x, form, self.apart))

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x W^T`` as a run holds it."""
        return self.noise.moved(self.noise.summed(x @ weight.T, length(x)[..., None] * length(weight)))

    def rms_norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """``x / sqrt(mean x^2 + eps)`` over the last axis, times the weight.

        The factor of a row is rounded by itself, in fp32: that error is common to all numbers of the row.
        """
        factor = self.noise.moved(torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps), F32)
        y = x * factor
        return self.noise.moved(y if weight is None else y * weight)

    def mixes(self, streams: Tensor, name: str) -> Tensor:
        """What mHC's weights are made of: ``fn`` times the normed streams [r, n, s, hidden], run together.

        Every implementation computes these in fp32: in a run of another dtype they are moved as fp32 is.
        """
        fn, flat = self.parameters[name], streams.flatten(2)
        normed = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        mixes = flat @ fn.T * normed
        if self.rounding.linears == GGML and self.parameters.types.get(name) in ASKED:  # it norms first, in fp32
            mixes = self.asked(self.noise.moved(flat * normed, F32), name) @ fn.T
        return self.noise.moved(self.noise.summed(mixes, length(fn)[None, None] * flat.shape[-1] ** 0.5), F32)

    def collapsed(self, streams: Tensor, pre: Tensor) -> Tensor:
        """What reads the streams [r, n, s, hidden] by their weights [r, n, s]."""
        parts = pre[..., None] * streams
        return self.noise.moved(self.noise.summed(parts.sum(2), parts.abs().sum(2)))

    def hyper_head(self, streams: Tensor) -> Tensor:
        """The streams [r, n, s, hidden] behind the last layer as one, [r, n, hidden], not normed."""
        scale, base = (self.parameters[self.name(f"hc_head_{leaf}")] for leaf in ("scale", "base"))
        mixes = self.mixes(streams, self.name("hc_head_fn"))
        pre = torch.sigmoid(mixes * scale[0] + base) + self.config.hc_eps
        return self.collapsed(streams, self.noise.moved(pre, F32))

    def _alike(self, *parts: Tensor) -> Iterator[Tensor]:
        """The same number of replicas for all, as einsum wants it."""
        most = max(part.shape[0] for part in parts)
        return (part if part.shape[0] == most else part.expand(most, *part.shape[1:]) for part in parts)

    def joined(self, *parts: Tensor, dim: int) -> Tensor:
        """Parts side by side, where some have replicas and others have none yet."""
        return torch.cat(tuple(self._alike(*parts)), dim)


class Ends(Part):
    """What is in no layer: embeddings before the first, and the head behind the last."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, "")

    def computed(self, site: str, at: Tensor) -> Tensor:
        """One of the sites that are of no layer, [r, n, ...]; Unknown where there is nothing to compute it from."""
        if site == "hidden":
            return self.hidden(at)
        if site == "folded":
            with self.noise.of("folded", rows=at):
                return self.folded(at)
        if site == "embedded":
            return self.looked_up("embed.weight", self.setting.tokens[at])
        return self.logprobs(at) if site == LOGPROBS else self.logits(at)

    def logits(self, at: Tensor) -> Tensor:
        """The head's product with the normed output, [r, n, vocab]."""
        theirs = self.setting.theirs.rows("hidden", at)
        hidden = self.hidden(at) if theirs is None else theirs[None]
        with self.noise.of("logits", rows=at):
            return self.product(self.asked(hidden, "head.weight"), self.parameters["head.weight"])

    def logprobs(self, at: Tensor) -> Tensor:
        """Log-probabilities [r, n, k] of the ids that they were recorded of."""
        theirs, ids = (self.setting.theirs.rows(name, at) for name in ("logits", LOGPROB_IDS))
        if ids is None:
            raise Unknown(f"{LOGPROB_IDS} is not recorded at these positions")
        logits = self.logits(at) if theirs is None else theirs[None]
        of_ids = torch.log_softmax(logits, -1).gather(-1, ids.long()[None].expand(len(logits), -1, -1))
        with self.noise.of(LOGPROBS, rows=at):
            return self.noise.moved(of_ids, F32)

    def hidden(self, at: Tensor) -> Tensor:
        """The streams behind the last layer, read as one and normed."""
        theirs = self.setting.theirs.rows("folded", at)
        with self.noise.of("hidden", rows=at):
            folded = self.folded(at) if theirs is None else theirs[None]
            return self.rms_norm(folded, self.parameters["norm.weight"])

    def folded(self, at: Tensor) -> Tensor:
        """The streams behind the last layer as one, [r, n, hidden]: by the hyper head, in V4.1 by the last `pre`."""
        last = layer_of(self.setting, self.config.num_hidden_layers - 1, at)
        streams = last.value("streams", at)
        pre = last.fold_weights(at) if self.config.v41 is not None else None
        self.rests |= last.rests
        return self.hyper_head(streams) if pre is None else self.collapsed(streams, pre)


Equation = Callable[[Any, Tensor], Tensor]
EQUATIONS: dict[str, str] = {}  # site -> the method of `Layer` that computes it


def site(name: str) -> Callable[[Equation], Equation]:
    """Say which site a method of a layer computes."""

    def note(equation: Equation) -> Equation:
        EQUATIONS[name] = equation.__name__
        return equation

    return note


def layer_of(setting: Setting, number: int, at: Tensor) -> "Layer":
    """A layer of the architecture that the config describes, see `Layer`."""
    if setting.config.v41 is None:
        return Layer(setting, number, at)
    from fathom.probes.judge.oracle_v41 import Layer41  # noqa: PLC0415 -- which is made from this file's

    return (setting.layer or Layer41)(setting, number, at)


class Layer(Part):
    """One layer; `value` gives any of its sites at some positions (or entries), `computed` what it should be.

    Parameters
    ----------
    setting
        Of the recording.
    layer
        Number of the layer.
    at
        [n] int64, ascending: positions that are looked at. They see keys and entries of all tokens.

    """

    def __init__(self, setting: Setting, layer: int, at: Tensor) -> None:
        super().__init__(setting, f"layers.{layer}.")
        self.layer, self.at = layer, at
        self.kind, self.ratio = self.config.layer_kind(layer), self.config.ratio(layer)
        self.rope_theta = self.config.compress_rope_theta if self.ratio else self.config.rope_theta
        self.yarn = self.config.rope_scaling if self.ratio else None
        self.entries = torch.arange(len(setting.tokens) // self.ratio if self.ratio else 0)
        replay = setting.replay
        self.first = replay.start if replay is not None and layer >= replay.layer else 0  # position that a window sees
        self.experts, self.chosen = self.config.experts(layer)  # how many there are, and how many a token takes
        self.held: dict[tuple[str, str], tuple[Tensor, set[str]]] = {}
        self._before: Layer | None = None

    def look(self, at: Tensor) -> None:
        """Go on to other positions; what was computed for all tokens is kept."""
        self.at = at
        self.held = {key: value for key, value in self.held.items() if key[1] == "entries"}

    # --- sites

    def value(self, site: str, at: Tensor) -> Tensor:
        """What the layer goes on with at a site: as recorded, or else as computed."""
        theirs = self.setting.theirs.rows(f"layers.{self.layer}.{site}", at)
        if theirs is None or not self._can_be(site, theirs):
            if site in (SELECTED, CANDIDATES) or (site == EXPERT_IDS and not self.config.is_hash(self.layer)):
                self.rests.add(site)
            return self.computed(site, at)
        return theirs[None]

    def _can_be(self, site: str, ids: Tensor) -> bool:
        """Whether recorded choices are numbers of experts, entries or blocks: others are not gone on with."""
        if site not in (EXPERT_IDS, SELECTED, CANDIDATES):
            return True
        least, count = (0, self.experts) if site == EXPERT_IDS else (-1, len(self.entries))
        if site == CANDIDATES and self.config.v41 is not None:
            count = -(-count // self.config.v41.candidate_block_size)
        return bool(((ids >= least) & (ids < count) & (ids == ids.floor())).all())

    def computed(self, site: str, at: Tensor) -> Tensor:
        """What a site should be, from the sites before it; Unknown where there is nothing to compute it from."""
        key = (site, "at" if at is self.at else "entries" if at is self.entries else "")
        if key in self.held:
            out, rests = self.held[key]
            self.rests |= rests
            return out
        before, self.rests = self.rests, set()
        try:
            with self.noise.of(self.prefix, site, rows=at):
                out = self.equation(site, at)
            if key[1]:
                self.held[key] = out, self.rests
        finally:
            self.rests = self.rests | before
        return out

    def passed(self, site: str, at: Tensor) -> Tensor:
        """As `value`, of a step that few runs show: where it was not recorded it is part of the site after it."""
        theirs = self.setting.theirs.rows(f"layers.{self.layer}.{site}", at)
        return self.equation(site, at) if theirs is None else theirs[None]

    def fold_weights(self, at: Tensor) -> Tensor:
        """The weights [r, n, s] that the streams behind the last layer of V4.1 are read by."""
        return self.value("experts.pre", at)

    def equation(self, site: str, at: Tensor) -> Tensor:
        """What the method of a site says."""
        out: Tensor = getattr(self, EQUATIONS[site])(at)
        return out

    def read_by(self, part: str, at: Tensor) -> Tensor:
        """The weights [r, n, s] that "attention" or "experts" read the streams by."""
        return self.value(f"{part}.pre", at)

    def before(self, at: Tensor) -> Tensor:
        """The residual streams before the layer, [r, n, s, hidden]."""
        if self.layer:
            theirs = self.setting.theirs.rows(f"layers.{self.layer - 1}.streams", at)
            if theirs is not None:
                return theirs[None]
            before = self.run_before()
            self.rests.add(FREELY)
            streams: Tensor = before.value("streams", before.at)
            return streams[:, at]
        embedded = self.setting.theirs.rows("embedded", at)
        if embedded is None:
            embedded = self.parameters.rows("embed.weight", self.setting.tokens[at]).to(F64)
        return embedded[None, :, None].expand(-1, -1, self.config.hc_mult, -1)

    def run_before(self) -> "Layer":
        """The layer before, at all tokens: the input of this one was not recorded."""
        if self._before is None:
            self._before = self._run_before()
        return self._before

    def _run_before(self) -> "Layer":
        tokens, config = len(self.setting.tokens), self.config
        if not self.setting.freely:
            raise Unknown(f"layers.{self.layer - 1}.streams are not recorded")
        if tokens * config.hc_mult * config.hidden_size * (1 + self.noise.replicas) > RUN_FREELY:
            raise Unknown(
                f"layers.{self.layer - 1}.streams are not recorded, and the prompt is too long to compute them"
            )
        setting = replace(self.setting, noise=self.noise.through_layers())
        return type(self)(setting, self.layer - 1, torch.arange(tokens))

    # --- the parts that equations share

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cos and sin [r, n, rope / 2] of this layer's rotation.

        The angle is rounded to fp32, as DeepSeek's and everybody's is; beyond some ten thousand positions it is far off
        the exact one.
        """
        dim, theta, yarn = self.config.qk_rope_head_dim, self.rope_theta, self.yarn
        pair = torch.arange(0, dim, 2, dtype=torch.float32)
        frequency = 1.0 / (theta ** (pair / dim))
        if yarn is not None:

            def turning(times: float) -> float:
                """The pair that turns so often within the original context."""
                return (
                    dim
                    * math.log(yarn.original_max_position_embeddings / (times * 2 * math.pi))
                    / (2 * math.log(theta))
                )

            low, high = max(math.floor(turning(yarn.beta_fast)), 0), min(math.ceil(turning(yarn.beta_slow)), dim - 1)
            slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
            frequency = frequency / yarn.factor * slowed + frequency * (1 - slowed)
        # The frequency is of fp32, its last bit depends on who computes it; so does the angle's.
        exact = (positions.to(torch.float32)[:, None] * frequency).to(F64)[None]
        with self.noise.of(self.prefix, "frequency", rows=torch.zeros(1, dtype=torch.int64)):  # one table for all
            turning_by = self.noise.moved(frequency.to(F64)[None, None], torch.float32)
            if self.parameters.types:  # a GGUF's: ggml multiplies one after the other, n times the variance of one
                turning_by = turning_by[:1] + (turning_by - turning_by[:1]) * (1 + pair).sqrt()
        off = positions.to(F64)[:, None] * (turning_by - turning_by[:1])
        angle = self.noise.moved(exact + off, torch.float32)
        return angle.cos(), angle.sin()

    def rotated(self, x: Tensor, positions: Tensor, *, back: bool = False) -> Tensor:
        """Turn neighbouring pairs of the last dims of [r, n, (h,) d] by their position's angle, or back."""
        cos, sin = self.angles(positions)
        if x.ndim == 4:
            cos, sin = cos[:, :, None], sin[:, :, None]
        rope = 2 * cos.shape[-1]
        a, b = x[..., -rope::2], x[..., -rope + 1 :: 2]
        sin = -sin if back else sin
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        return self.noise.moved(self.joined(x[..., :-rope], turned, dim=-1))

    def cached(self, kv: Tensor) -> Tensor:
        """A key as it is remembered: where the run rounds it, all dims but those of rope to E4M3, by 64.

        One of F16 is shown before it is rounded: see `read`.
        """
        if self.rounding.kv in (NONE, F16):
            return kv
        nope = self.config.head_dim - self.config.qk_rope_head_dim
        return self.joined(self.narrow(kv[..., :nope], E4M3_KV), kv[..., nope:], dim=-1)

    def read(self, site: str, at: Tensor) -> Tensor:
        """Keys of tokens, or entries, as attention reads them out of a cache, which may be of F16.

        llama.cpp then rotates keys and queries by a Hadamard matrix, meant for index keys, where both have one width.
        """
        kv = self.value(site, at)
        if self.rounding.kv != F16:
            return kv
        with self.noise.of(self.prefix, site, "read", rows=at):
            if self.config.head_dim != self.config.index_head_dim:
                return self.narrow(kv, HALF)
            return hadamard(self.narrow(self.transformed(kv), HALF))

    def transformed(self, x: Tensor) -> Tensor:
        """The Hadamard transform of the last axis, as a run holds it."""
        return self.noise.moved(self.noise.summed(hadamard(x), length(x)[..., None].expand(x.shape)))

    def keys(self, x: Tensor, at: Tensor) -> Tensor:
        """What is remembered of tokens [r, n, hidden] at their positions, [r, n, d]."""
        return self.turned_keys(self.normed_keys(self.linear(x, "attn.wkv.weight")), at)

    def turned_keys(self, kv: Tensor, at: Tensor) -> Tensor:
        """Normed keys [r, n, d] as they are remembered."""
        return self.cached(self.rotated(kv, at))

    def normed_keys(self, kv: Tensor) -> Tensor:
        """Keys [r, n, d] normed."""
        return self.rms_norm(kv, self.parameters[self.name("attn.kv_norm.weight")])

    def index_rounded(self, x: Tensor) -> Tensor:
        """An index query or key as it is scored: Hadamard, then E2M1 by 32, or F16; or E4M3 by row; or as it is.

        Some kernels take a query as it is to keys of F16, some round it: it is moved so far, not rounded.
        """
        if self.rounding.index in (FP4, F16):
            if self.rounding.index == F16 and x.ndim == 4:
                return self.noise.moved(self.transformed(x), torch.float16)
            return self.narrow(self.transformed(x), HALF if self.rounding.index == F16 else E2M1_INDEX)
        return self.narrow(x, E4M3_ROW) if self.rounding.index == FP8 else x

    def hyper(self, streams: Tensor, part: str) -> list[Tensor]:
        """What mHC's pre and post, [r, n, s], and comb, [r, n, s * s], are functions of."""
        scale, base = (self.parameters[self.name(f"hc_{part}_{leaf}")] for leaf in ("scale", "base"))
        s = self.config.hc_mult
        parts = (x.split((s, s, s * s), -1) for x in (self.mixes(streams, self.name(f"hc_{part}_fn")), base))
        return [mixes * factor + offset for mixes, offset, factor in zip(*parts, scale, strict=True)]

    def pre(self, streams: Tensor, part: str) -> Tensor:
        """How much of each stream a sublayer reads, [r, n, s]."""
        return self.noise.moved(torch.sigmoid(self.hyper(streams, part)[0]) + self.config.hc_eps, F32)

    def post(self, streams: Tensor, part: str) -> Tensor:
        """How much of its output it adds to each, [r, n, s]."""
        return self.noise.moved(2 * torch.sigmoid(self.hyper(streams, part)[1]), F32)

    def comb(self, streams: Tensor, part: str) -> Tensor:
        """How much of a stream goes to each other, [r, n, s, s]: Sinkhorn makes the sums of rows and columns 1."""
        comb = self.hyper(streams, part)[2].unflatten(-1, (self.config.hc_mult,) * 2).softmax(-1)
        comb = self.noise.moved(comb + self.config.hc_eps, F32)
        for step in range(2 * self.config.hc_sinkhorn_iters - 1):  # columns first and last
            total = self.noise.moved(comb.sum(-1 if step % 2 else -2, keepdim=True) + self.config.hc_eps, F32)
            comb = self.noise.moved(comb / total, F32)
        return comb

    def expanded(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """What a sublayer leaves: ``comb[j, k]`` sends stream j to k, ``post[k]`` the output to k."""
        own = post[..., None] * y[:, :, None]
        mixed = torch.einsum("rnjk,rnjd->rnkd", *self._alike(comb, streams))
        size = torch.einsum("rnjk,rnjd->rnkd", *self._alike(comb, streams.abs()))
        return self.noise.moved(self.noise.summed(own + mixed, own.abs() + size))

    def pooled(self, parameter: str, width: int, at: Tensor) -> Tensor:
        """Entries `at`, [r, n, width]: tokens of a window pooled by their gates.

        A CSA window sees the one before it too: each token has two series, one for its own window and one for the next.
        """
        overlap = 2 if self.kind is LayerKind.CSA else 1
        wkv, wgate, ape = (
            self.parameters[self.name(f"{parameter}.{leaf}")] for leaf in ("wkv.weight", "wgate.weight", "ape")
        )
        pooled = []
        for part in self.noise.parts(at, max(1, TOKENS // self.ratio)):
            some = at[part]
            # Of the first window, those before are not there.
            windows = torch.cat((some - 1, some)) if overlap == 2 else some
            tokens = (windows[:, None] * self.ratio + torch.arange(self.ratio)).flatten()
            x = self.value("attention.input", tokens.clamp_min(0))
            with self.noise.of(self.prefix, parameter, "tokens", rows=tokens):
                kv, gate = (
                    self.product(self.asked(x, self.name(f"{parameter}.{leaf}.weight")), weight)
                    for leaf, weight in (("wkv", wkv), ("wgate", wgate))
                )
                gate = self.noise.moved(gate + ape.repeat(len(windows), 1))
            # by window: tokens of it are the third axis now
            kv, gate = (rows.unflatten(1, (-1, self.ratio)) for rows in (kv, gate))
            if overlap == 2:
                n = len(some)
                hidden = (some == 0)[:, None, None]
                kv = torch.cat((kv[:, :n, :, :width], kv[:, n:, :, width:]), 2)
                gate = torch.cat((gate[:, :n, :, :width].masked_fill(hidden, -math.inf), gate[:, n:, :, width:]), 2)
            share = self.noise.moved(gate.softmax(2))
            pooled.append(self.noise.moved((kv * share).sum(2)))
        return torch.cat(pooled, 1)

    def normed_entries(self, rows: Tensor, parameter: str) -> Tensor:
        """Pooled entries [r, n, width] normed."""
        return self.rms_norm(rows, self.parameters[self.name(f"{parameter}.norm.weight")])

    # --- Engram, of V4.1 alone

    @site("engram.rows")
    def _engram_rows(self, at: Tensor) -> Tensor:
        raise NotImplementedError

    @site("engram.gate")
    def _engram_gate(self, at: Tensor) -> Tensor:
        raise NotImplementedError

    @site("engram.streams")
    def _engram_streams(self, at: Tensor) -> Tensor:
        raise NotImplementedError

    # --- attention

    @site("attention.pre")
    def _attention_pre(self, at: Tensor) -> Tensor:
        return self.pre(self.before(at), "attn")

    @site("attention.post")
    def _attention_post(self, at: Tensor) -> Tensor:
        return self.post(self.before(at), "attn")

    @site("attention.comb")
    def _attention_comb(self, at: Tensor) -> Tensor:
        return self.comb(self.before(at), "attn")

    @site("attention.input")
    def _attention_input(self, at: Tensor) -> Tensor:
        x = self.collapsed(self.before(at), self.read_by("attention", at))
        return self.rms_norm(x, self.parameters[self.name("attn_norm.weight")])

    @site("attention.latent_unnormed")
    def _latent_unnormed(self, at: Tensor) -> Tensor:
        return self.linear(self.value("attention.input", at), "attn.wq_a.weight")

    @site("attention.latent")
    def _latent(self, at: Tensor) -> Tensor:
        return self.rms_norm(
            self.passed("attention.latent_unnormed", at), self.parameters[self.name("attn.q_norm.weight")]
        )

    @site("attention.query_unnormed")
    def _query_unnormed(self, at: Tensor) -> Tensor:
        q: Tensor = self.linear(self.value("attention.latent", at), "attn.wq_b.weight").unflatten(
            -1, (-1, self.config.head_dim)
        )
        return q

    @site("attention.query_unrotated")
    def _query_unrotated(self, at: Tensor) -> Tensor:
        return self.rms_norm(self.passed("attention.query_unnormed", at))

    @site("attention.query")
    def _query(self, at: Tensor) -> Tensor:
        return self.rotated(self.passed("attention.query_unrotated", at), at)

    @site("attention.kv_unnormed")
    def _kv_unnormed(self, at: Tensor) -> Tensor:
        return self.linear(self.value("attention.input", at), "attn.wkv.weight")

    @site("attention.kv_unrotated")
    def _kv_unrotated(self, at: Tensor) -> Tensor:
        return self.normed_keys(self.passed("attention.kv_unnormed", at))

    @site("attention.kv")
    def _kv(self, at: Tensor) -> Tensor:
        some = (at[part] for part in self.noise.parts(at, TOKENS))
        return self.joined(
            *(self.turned_keys(self.passed("attention.kv_unrotated", rows), rows) for rows in some), dim=1
        )

    @site("attention.entry_unnormed")
    def _entry_unnormed(self, at: Tensor) -> Tensor:
        return self.pooled("attn.compressor", self.config.head_dim, at)

    @site("attention.entry_unrotated")
    def _entry_unrotated(self, at: Tensor) -> Tensor:
        return self.normed_entries(self.passed("attention.entry_unnormed", at), "attn.compressor")

    @site("attention.entry")
    def _entry(self, at: Tensor) -> Tensor:
        return self.cached(self.rotated(self.passed("attention.entry_unrotated", at), at * self.ratio))

    @site("indexer.key_unnormed")
    def _index_key_unnormed(self, at: Tensor) -> Tensor:
        return self.pooled("attn.indexer.compressor", self.config.index_head_dim, at)

    @site("indexer.key_unrotated")
    def _index_key_unrotated(self, at: Tensor) -> Tensor:
        return self.normed_entries(self.passed("indexer.key_unnormed", at), "attn.indexer.compressor")

    @site("indexer.key")
    def _index_key(self, at: Tensor) -> Tensor:
        return self.rotated(self.passed("indexer.key_unrotated", at), at * self.ratio)

    @site("indexer.key_used")
    def _index_key_used(self, at: Tensor) -> Tensor:
        return self.index_rounded(self.value("indexer.key", at))

    @site("indexer.query_unrotated")
    def _index_query_unrotated(self, at: Tensor) -> Tensor:
        q: Tensor = self.linear(self.value("attention.latent", at), "attn.indexer.wq_b.weight").unflatten(
            -1, (-1, self.config.index_head_dim)
        )
        return q

    @site("indexer.query")
    def _index_query(self, at: Tensor) -> Tensor:
        return self.rotated(self.passed("indexer.query_unrotated", at), at)

    @site("indexer.query_used")
    def _index_query_used(self, at: Tensor) -> Tensor:
        return self.index_rounded(self.value("indexer.query", at))

    @site("indexer.weights")
    def _index_weights(self, at: Tensor) -> Tensor:
        config = self.config
        weights = self.linear(self.value("attention.input", at), "attn.indexer.weights_proj.weight")
        return self.noise.moved(weights * (config.index_head_dim**-0.5 * config.index_n_heads**-0.5))

    def index_scores(self, at: Tensor) -> Tensor:
        """What entries are selected by [r, n, entries], -inf for those that are not finished."""
        return self.scored(at, self.value("indexer.key_used", self.entries))

    def scored(self, at: Tensor, keys: Tensor) -> Tensor:
        """``sum_h w_h relu(q_h . k)`` [r, n, entries] of keys [r, entries, d], -inf for entries not finished."""
        q, weights = self.value("indexer.query_used", at), self.value("indexer.weights", at)
        most = max(part.shape[0] for part in (q, weights, keys))
        step = max(1, NUMBERS // max(1, most * q.shape[2] * keys.shape[1]))
        found = []
        with self.noise.of(self.prefix, "index scores", rows=at):
            for part in self.noise.parts(at, step):
                each = self.noise.moved(torch.einsum("rnhd,red->rnhe", *self._alike(q[:, part], keys)))
                found.append(self.noise.moved(self.of_heads(each.relu(), weights[:, part])))
        unfinished = self.entries >= ((at + 1) // self.ratio)[:, None]
        return torch.cat(found, 1).masked_fill(unfinished, -math.inf)

    def of_heads(self, each: Tensor, weights: Tensor) -> Tensor:
        """Scores of heads [r, n, heads, entries] by their weights [r, n, heads], added up."""
        return torch.einsum("rnhe,rnh->rne", *self._alike(each, weights))

    @site("indexer.candidates")
    def _candidates(self, at: Tensor) -> Tensor:
        raise NotImplementedError

    @site("indexer.selected")
    def _selected(self, at: Tensor) -> Tensor:
        """The top k of the scores, of equal ones the first; -1 where fewer are finished: [r, n, k]."""
        scores = self.index_scores(at)
        k = min(self.config.index_topk, scores.shape[-1])
        best = self.noise.choosing(scores, k, self.apart).sort(dim=-1, descending=True, stable=True)
        return best.indices[..., :k].masked_fill(best.values[..., :k].isneginf(), -1).to(F64)

    @site("attention.weights")
    def _weights(self, at: Tensor) -> Tensor:
        """Shares of the softmax on KV of all positions, then on all entries, [r, n, heads, t + e]."""
        whole, found = len(self.setting.tokens) + len(self.entries), []
        for q, keys, hidden, places in self._looks(at):
            share = self.shares(q, keys, hidden, self.sinks.clamp(-MOST, MOST))
            at_keys = places.unsqueeze(-2).expand(share.shape)
            found.append(share.new_zeros(*share.shape[:-1], whole).scatter_add(-1, at_keys, share))
        return torch.cat(found, 1)

    @site("attention.mixed")
    def _mixed(self, at: Tensor) -> Tensor:
        theirs = self.setting.theirs.rows(f"{self.prefix}attention.weights", at)
        if theirs is None:
            return self.mixed(at)
        keys = self.read("attention.kv", torch.arange(len(self.setting.tokens)))
        if self.ratio:
            keys = self.joined(keys, self.read("attention.entry", self.entries), dim=1)
        parts = self.noise.parts(at, max(1, NUMBERS // ((1 + self.noise.replicas) * theirs[0].numel())))
        return torch.cat([self.weighed(theirs[None, some], keys[:, None]) for some in parts], 1)

    def masses(self, at: Tensor) -> Tensor:
        """Shares of the softmax [r, n, heads, 3] on the sink, the window and the entries."""
        return torch.cat([mass for _, mass in self._attended(at)], 1)

    def mixed(self, at: Tensor, sinks: Tensor | None = None, *, entries: bool = True) -> Tensor:
        """`attention.mixed` with other sinks [heads], or without what lies beyond the window."""
        return torch.cat([out for out, _ in self._attended(at, sinks, entries=entries)], 1)

    @property
    def sinks(self) -> Tensor:
        """[heads]."""
        return self.parameters[self.name("attn.attn_sink")]

    def _attended(
        self, at: Tensor, sinks: Tensor | None = None, *, entries: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Output and `masses` of some tokens at a time."""
        sinks = (self.sinks if sinks is None else sinks).clamp(-MOST, MOST)
        for q, keys, hidden, _ in self._looks(at, entries=entries):
            yield self.softmax_over(q, keys, hidden, sinks, self.config.sliding_window)

    def _looks(self, at: Tensor, *, entries: bool = True) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Queries, keys [r, n, k, d], which are hidden, and their places among all KV and entries, some at a time."""
        q = self.value("attention.query", at)
        back = torch.arange(-self.config.sliding_window + 1, 1)
        seen, window = torch.unique((at[:, None] + back).clamp_min(self.first), return_inverse=True)  # of these, [n, w]
        kv = self.read("attention.kv", seen)
        far = self.read("attention.entry", self.entries) if self.ratio and entries else None
        selected = self.value("indexer.selected", at) if self.kind is LayerKind.CSA and entries else None
        for some in self.noise.parts(at, self._rows_at_once(far, selected)):
            chosen = None if selected is None else selected[:, some]
            yield q[:, some], *self._seen(at[some], kv[:, window[some]], far, chosen)

    def _rows_at_once(self, entries: Tensor | None, selected: Tensor | None) -> int:
        keys = self.config.sliding_window
        if entries is not None:
            keys += entries.shape[1] if selected is None else selected.shape[-1]
        width = max(self.config.num_attention_heads, self.config.head_dim)
        return max(1, NUMBERS // ((1 + self.noise.replicas) * keys * width))

    def _seen(
        self, at: Tensor, keys: Tensor, entries: Tensor | None, selected: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The window's keys [r, n, w, d] and the entries, which of them are hidden, and their places."""
        places = at[:, None] - torch.arange(self.config.sliding_window - 1, -1, -1)
        hidden, tokens = places < self.first, len(self.setting.tokens)  # before the first token
        places = places.clamp_min(self.first)
        if entries is not None and selected is None:
            chosen = self.entries.expand(len(at), -1)
            more, hide = entries[:, None].expand(-1, len(at), -1, -1), chosen >= ((at + 1) // self.ratio)[:, None]
            which = chosen
        elif entries is not None and selected is not None:
            entries = entries if entries.shape[1] else entries.new_zeros(1, 1, entries.shape[2])  # all are hidden
            which, every = self._alike(selected.long(), entries)
            replica = torch.arange(which.shape[0])[:, None, None]
            more, hide = every[replica, which.clamp_min(0)], which < 0
        if entries is not None:
            hidden = torch.cat((hidden.expand(*hide.shape[:-1], -1), hide), -1)
            far = tokens + which.clamp_min(0).masked_fill(hide, 0) if len(self.entries) else which * 0
            places = torch.cat((places.expand(*far.shape[:-1], -1), far), -1)
            keys = self.joined(keys, more, dim=2)
        return keys, hidden, places

    def softmax_over(self, q: Tensor, keys: Tensor, hidden: Tensor, sink: Tensor, near: int) -> tuple[Tensor, Tensor]:
        """Output [r, n, heads, d] and `masses` of the softmax over keys and the sink, which has no value.

        Parameters
        ----------
        q, keys
            [r, n, heads, d] and [r, n, k, d].
        hidden
            Bool [(r,) n, k]: keys that a query does not see.
        sink
            [heads].
        near
            How many of the keys are the window's; they come first.

        """
        share = self.shares(q, keys, hidden, sink)
        mass = torch.stack((1 - share.sum(-1), share[..., :near].sum(-1), share[..., near:].sum(-1)), -1)
        return self.weighed(share, keys), mass

    def shares(self, q: Tensor, keys: Tensor, hidden: Tensor, sink: Tensor) -> Tensor:
        """What the softmax gives each key, [r, n, heads, k]."""
        scale, q = self.config.head_dim**-0.5, self.attended_in(q)
        scores = torch.einsum("rnhd,rnkd->rnhk", *self._alike(q, keys)) * scale
        scores = self.noise.moved(self.noise.summed(scores, length(q)[..., None] * length(keys)[:, :, None] * scale))
        scores = scores.masked_fill(hidden.unsqueeze(-2), -math.inf)
        largest = torch.maximum(scores.amax(-1), sink)[..., None]
        mass = (scores - largest).exp()
        share = mass / (mass.sum(-1, keepdim=True) + (sink[:, None] - largest).exp())
        return self.attended_in(self.noise.moved(share))

    def attended_in(self, x: Tensor) -> Tensor:
        """Queries, shares and sums: of keys in F16 some kernels compute in F16 altogether, ggml's with some shapes."""
        return self.noise.moved(x, torch.float16) if self.rounding.kv == F16 else x

    def weighed(self, share: Tensor, keys: Tensor) -> Tensor:
        """The sum of keys [r, n, k, d] by their shares; n may be 1 where all rows see the same."""
        keys = keys.expand(-1, share.shape[1], -1, -1)
        out = torch.einsum("rnhk,rnkd->rnhd", *self._alike(share, keys))
        size = torch.einsum("rnhk,rnkd->rnhd", *self._alike(share, keys.abs()))
        return self.attended_in(self.noise.moved(self.noise.summed(out, size)))

    @site("attention.unrotated")
    def _unrotated(self, at: Tensor) -> Tensor:
        return self.rotated(self.value("attention.mixed", at), at, back=True)

    @site("attention.output")
    def _attention_output(self, at: Tensor) -> Tensor:
        """Groups of heads by rows of wo_a, whose input is rounded where that of every product is, then wo_b."""
        out, groups = self.value("attention.unrotated", at).flatten(2), self.config.o_groups
        weight = self.parameters[self.name("attn.wo_a.weight")].unflatten(0, (groups, -1))
        low = [
            self.product(self.asked(x, self.name("attn.wo_a.weight")), w)
            for x, w in zip(out.chunk(groups, -1), weight, strict=True)
        ]
        return self.linear(torch.cat(low, -1), "attn.wo_b.weight")

    @site("attention.streams")
    def _attention_streams(self, at: Tensor) -> Tensor:
        post, comb = self.value("attention.post", at), self.value("attention.comb", at)
        return self.expanded(self.value("attention.output", at), self.before(at), post, comb)

    # --- experts

    @site("experts.pre")
    def _experts_pre(self, at: Tensor) -> Tensor:
        return self.pre(self.value("attention.streams", at), "ffn")

    @site("experts.post")
    def _experts_post(self, at: Tensor) -> Tensor:
        return self.post(self.value("attention.streams", at), "ffn")

    @site("experts.comb")
    def _experts_comb(self, at: Tensor) -> Tensor:
        return self.comb(self.value("attention.streams", at), "ffn")

    @site("experts.input")
    def _experts_input(self, at: Tensor) -> Tensor:
        streams, pre = self.value("attention.streams", at), self.read_by("experts", at)
        return self.rms_norm(self.collapsed(streams, pre), self.parameters[self.name("ffn_norm.weight")])

    @site("experts.logits")
    def _expert_logits(self, at: Tensor) -> Tensor:
        return self.linear(self.value("experts.input", at), "ffn.gate.weight")

    def expert_scores(self, at: Tensor) -> Tensor:
        """``sqrt(softplus(x . w))`` of each expert, [r, n, experts]."""
        with self.noise.of(self.prefix, "expert scores", rows=at):
            return self.noise.moved(torch.nn.functional.softplus(self.passed("experts.logits", at)).sqrt())

    def expert_ranks(self, at: Tensor) -> Tensor:
        """What experts are chosen by: the scores and a bias."""
        return self.expert_scores(at) + self.parameters[self.name("ffn.gate.bias")]

    @site("experts.ids")
    def _expert_ids(self, at: Tensor) -> Tensor:
        if self.config.is_hash(self.layer):
            return self.parameters.rows(self.name("ffn.gate.tid2eid"), self.setting.tokens[at])[None].to(F64)
        ranks = self.noise.choosing(self.expert_ranks(at), self.chosen, self.apart)
        best = ranks.sort(dim=-1, descending=True, stable=True).indices
        return best[..., : self.chosen].to(F64)

    @site("experts.weights")
    def _expert_weights(self, at: Tensor) -> Tensor:
        """Scores of the chosen experts without the bias, as shares of the route scale; in the order of the ids."""
        return self.shares_of(self.expert_scores(at), at)

    def shares_of(self, scores: Tensor, at: Tensor) -> Tensor:
        """Shares of the chosen experts by scores [r, n, experts], times the route scale."""
        scores, ids = self._alike(scores, self.value("experts.ids", at).long())
        chosen = scores.gather(-1, ids)
        return self.noise.moved(chosen / chosen.sum(-1, keepdim=True) * self.config.routed_scaling_factor)

    @site("experts.shared_gate")
    def _shared_gate(self, at: Tensor) -> Tensor:
        return self.linear(self.value("experts.input", at), "ffn.shared_experts.w1.weight")

    @site("experts.shared_up")
    def _shared_up(self, at: Tensor) -> Tensor:
        return self.linear(self.value("experts.input", at), "ffn.shared_experts.w3.weight")

    @site("experts.gate")
    def _gate(self, at: Tensor) -> Tensor:
        return self.of_chosen("w1", at)

    @site("experts.up")
    def _up(self, at: Tensor) -> Tensor:
        return self.of_chosen("w3", at)

    def of_chosen(self, part: str, at: Tensor) -> Tensor:
        """First products of the chosen experts, [r, n, k, intermediate], in the order of the ids."""
        x, ids = self.value("experts.input", at), self.value(EXPERT_IDS, at).long()
        if EXPERT_IDS in self.rests:
            raise Unknown(f"{self.prefix}{EXPERT_IDS} is not recorded, whose order this is in")
        out = torch.zeros(1 + self.noise.replicas, *ids.shape[1:], self.config.moe_intermediate_size, dtype=F64)
        for expert in ids.unique().tolist():
            row, column = (ids[0] == expert).nonzero(as_tuple=True)
            name = self.name(f"ffn.experts.{expert}.{part}.weight")
            with self.noise.of(self.prefix, "expert", expert, part, rows=at[row]):
                product = self.product(self.rounded(x[:, row], name), self.parameters.fresh(name))
            out[:, row, column] = product
        return out

    @site("experts.output")
    def _experts_output(self, at: Tensor) -> Tensor:
        """The routed experts of each token, one expert after the other, and the shared one."""
        x, weights = self.value("experts.input", at), self.value("experts.weights", at)
        ids, halves = self.value(EXPERT_IDS, at).long(), self._halves(at)
        out = torch.zeros(1 + self.noise.replicas, *x.shape[1:], dtype=F64)
        for expert in ids.unique().tolist():
            chosen = ids == expert  # [r, n, k]
            rows = chosen.any(-1).any(0).nonzero()[:, 0]  # of any replica; its weight is 0 in the others
            weight = (weights * chosen).sum(-1)[:, rows, None]
            known = tuple(half[:, rows][chosen[:, rows]][None] for half in halves)
            with self.noise.of(self.prefix, "expert", expert, rows=at[rows]):
                out[:, rows] = self.noise.moved(out[:, rows] + self.expert(expert, x[:, rows], weight, known))
        return self.noise.moved(out + self.shared_expert(at))

    def _halves(self, at: Tensor) -> tuple[Tensor, ...]:
        """Gate and up of the chosen experts, where both were recorded and nobody is chosen twice; else nothing."""
        names = ("experts.gate", "experts.up", EXPERT_IDS)
        gate, up, ids = (self.setting.theirs.rows(f"{self.prefix}{site}", at) for site in names)
        if gate is None or up is None or ids is None or bool((ids.sort(-1).values.diff(dim=-1) == 0).any()):
            return ()
        return gate[None], up[None]

    def shared_expert(self, at: Tensor) -> Tensor:
        """What the expert of all tokens adds, [r, n, hidden]."""
        gate, up = self.value("experts.shared_gate", at), self.value("experts.shared_up", at)
        with self.noise.of(self.prefix, "shared expert", rows=at):
            return self.linear(self.activated(gate, up), "ffn.shared_experts.w2.weight")

    def expert(self, expert: int, x: Tensor, weight: Tensor, halves: Sequence[Tensor] = ()) -> Tensor:
        """One routed expert, `halves` its gate and up if known; weights [r, n, 1] multiply before the last product.

        In llama.cpp they multiply after it: the same but for what is rounded.
        """
        w1, w3, w2 = (self.name(f"ffn.experts.{expert}.{part}.weight") for part in ("w1", "w3", "w2"))
        if not halves:
            x = self.rounded(x, w1)
            halves = tuple(self.product(x, self.parameters.fresh(name)) for name in (w1, w3))
        gate, up = halves
        if self.rounding.linears == GGML:
            y = self.activated(gate, up, torch.ones_like(weight))
            return self.noise.moved(self.product(self.asked(y, w2), self.parameters.fresh(w2)) * weight)
        return self.product(self.rounded(self.activated(gate, up, weight), w2), self.parameters.fresh(w2))

    def activated(self, gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
        """``silu(gate) up`` and the weight, if any; gate is clamped from above, up on both sides."""
        limit, whose = self.config.swiglu_limit, "shared" if weight is None else "routed"
        for part, x in (("gate", gate[0]), ("up", up[0].abs())):
            most = float(x.nan_to_num(0).max()) if x.numel() else 0.0
            self.largest[f"{whose} {part}"] = max(most, self.largest.get(f"{whose} {part}", 0.0))
        y = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        return self.noise.moved(y if weight is None else y * weight)

    @site("streams")
    def _streams(self, at: Tensor) -> Tensor:
        post, comb = self.value("experts.post", at), self.value("experts.comb", at)
        return self.expanded(self.value("experts.output", at), self.value("attention.streams", at), post, comb)


def has(config: ModelConfig, layer: int, name: str) -> bool:
    """Whether a layer has a site, by the parts that it has."""
    if name.startswith("engram."):
        return config.v41 is not None and layer in config.v41.engram.layer_ids
    if name == CANDIDATES:
        return config.v41 is not None and layer == config.v41.candidate_source
    if name.startswith("indexer.") and not config.selects(layer):
        return False
    return config.makes_entries(layer) or not name.startswith(("attention.entry", "indexer.key"))


def sites_of(config: ModelConfig, layer: int) -> list[str]:
    """Sites that a layer has, in the order in which they follow from each other."""
    return [name for name in EQUATIONS if has(config, layer, name)]
