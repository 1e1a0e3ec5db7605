"""Ops of the run on inputs that a prompt does not bring: attention over a grid, tables to a million positions, edges.

Each is held against float64, written here from its equation. Errors are given as a share of what fp32 may be off,
counted operation by operation beside each formula, and rounding to the dtype of the result.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.ops import Ops, mass_unit
from fathom.model.attention import CsaAttention, HcaAttention
from fathom.model.config import LayerKind, ModelConfig, Yarn
from fathom.model.observe.sites import Site
from fathom.model.rope import Rotation
from fathom.model.transformer import Transformer
from fathom.probes.finding import JSON, Finding, HeatMap, Part, Plot, Report, Table, at_most, exactly, judged
from fathom.probes.probe import Probe, Progress
from fathom.probes.shared.exact import shares_off
from fathom.probes.subject import Subject
from fathom.runtime.arithmetic import DTYPES

F64: Final = torch.float64
U: Final = 2.0**-24  # half an ulp of fp32, as a share of the number
LAMBDA: Final = (
    6.0  # a sum of n products rounds to within LAMBDA sqrt(n) U of the sum of their sizes (Higham and Mary 2019)
)
TINY: Final = 1e-30  # allowed where everything is 0

# --- attention


class Shape(NamedTuple):
    """Dims of an attention."""

    name: str
    heads: int
    width: int
    window: int


V4: Final = (Shape("V4-Flash", 64, 512, 128), Shape("V4-Pro", 128, 512, 128))
WINDOWS: Final = ("one key", "partly filled", "full", "full, ring wrapped")
ENTRIES: Final = (
    "no entries",
    "none finished",
    "all finished",
    "selection empty",
    "selection padded",
    "some selected",
    "all selected",
)
SINKS: Final = ("the file's", "0", "-inf", "+inf", "30", "one per head")
STRAY: Final = 100.0  # size of rows that no token may see: reading one of them cannot go unnoticed


class Case(NamedTuple):
    """One input of the attend op, all but the sink, and which keys each token sees."""

    window_state: str
    entries_state: str
    q: Tensor  # [t, h, d]
    ring: Tensor  # [capacity, d]
    first: int
    window: int
    entries: Tensor | None  # [n, d]
    ratio: int
    selected: Tensor | None  # [t, k] int32
    seen: tuple[tuple[int, ...], ...]  # entries that each token sees

    def keys(self, token: int) -> Tensor:
        """Rows that a token attends to, [n, d] float64."""
        position = self.first + token
        near = [p % len(self.ring) for p in range(max(0, position - self.window + 1), position + 1)]
        far = self.ring[:0] if self.entries is None else self.entries[list(self.seen[token])]
        return torch.cat((self.ring[near], far)).to(F64)


def attended(
    q: Tensor, keys: Tensor, sinks: Tensor, rounding: float, mass_rounding: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``sum_j exp(l_j) k_j / (exp(sink) + sum_j exp(l_j))`` of q [h, d], ``l_j = q . k_j / sqrt(d)``.

    Returns the output and what an op may be off in each number of it, whose dtype rounds to a share `rounding`, and
    which rounds masses, the ``exp(l_j)``, to a share `mass_rounding` before they multiply keys: [h, d].
    """
    d = q.shape[1]
    q = q.to(F64)
    logits = q @ keys.T / d**0.5
    peak = logits.amax(1, keepdim=True)
    mass = (logits - peak).exp()
    total = mass.sum(1, keepdim=True)
    kept = 1 / (1 + (sinks[:, None] - peak - total.log()).exp())  # what the sink leaves to the keys
    output = mass / total @ keys * kept
    # A logit sums products, and is taken from the peak; logits that are off by e move a softmax by up to exp(2 e).
    off = (LAMBDA * d**0.5 + 4) * U * (q.abs() @ keys.abs().T / d**0.5).amax(1) + 4 * U * logits.abs().amax(1)
    off = off + 4 * U * torch.where(sinks.isfinite(), sinks.abs(), 0)
    share = (2 * off).expm1() + (LAMBDA * len(keys) ** 0.5 + 8) * U
    moved = shares_off(mass_rounding, mass / total, keys) * kept
    return output, rounding * output.abs() + moved + share[:, None] * kept * (mass / total @ keys.abs()) + TINY


def cases(shape: Shape, dtype: torch.dtype, tokens: int, seed: int) -> Iterator[Case]:
    """Every window with every kind of entries, as far as the dims allow it."""
    generator = torch.Generator().manual_seed(seed)
    for window_state, entries_state in itertools.product(WINDOWS, ENTRIES):
        t = 1 if window_state == "one key" else tokens
        first, capacity = _place(window_state, shape.window, t)
        if first < 0:
            continue
        ratio = 1 if first + t < 8 else 4
        ratio = first + t + 1 if entries_state == "none finished" else ratio
        done = (first + t) // ratio
        seen = [list(range((first + i + 1) // ratio)) for i in range(t)]
        selected = _selection(entries_state, seen, done, generator)
        if selected is not None:
            seen = [sorted(set(row) & set(of)) for row, of in zip(selected.tolist(), seen, strict=True)]
        entries = torch.randn(done + 3, shape.width, generator=generator)  # three that are not finished
        entries[done:] *= STRAY
        none = entries_state == "no entries"
        q = 2 * torch.randn(t, shape.heads, shape.width, generator=generator)
        yield Case(
            window_state,
            entries_state,
            q.to(dtype),
            _ring(first, t, capacity, shape, generator).to(dtype),
            first,
            shape.window,
            None if none else entries.to(dtype),
            0 if none else ratio,
            selected,
            tuple(() if none else tuple(row) for row in seen),
        )


def _place(window_state: str, window: int, t: int) -> tuple[int, int]:
    """Position of the first token, and rows of the ring; -1 where the window is too small for the state."""
    least = window + t - 1
    match window_state:
        case "one key":
            return 0, least
        case "partly filled":
            return (window - t) // 2, least
        case "full":
            return 2 * window, 3 * window + t
        case _:
            return 7 * least + min(1, window - 1), least


def _ring(first: int, t: int, capacity: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """KV of the positions that are seen, and strays in all other rows."""
    ring = STRAY * torch.randn(capacity, shape.width, generator=generator)
    for position in range(max(0, first - shape.window + 1), first + t):
        ring[position % capacity] = torch.randn(shape.width, generator=generator)
    return ring


def _selection(state: str, seen: list[list[int]], done: int, generator: torch.Generator) -> Tensor | None:
    """[t, k] int32, or None where the state has no selection."""
    match state:
        case "selection empty":
            return torch.full((len(seen), 4), -1, dtype=torch.int32)
        case "selection padded":  # half of what is finished, among everything that is no entry
            pads = [-1, done, done + 3, 2**31 - 1, -(2**31)]
            return torch.tensor([[*range(0, done, 2), *pads] for _ in seen], dtype=torch.int32)
        case "some selected":
            k = max(1, done // 8)
            rows = [torch.randperm(len(of), generator=generator)[:k].sort().values.tolist() for of in seen]
            return torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32)
        case "all selected":
            return torch.tensor([[*of, *[-1] * (done - len(of))] for of in seen], dtype=torch.int32)
        case _:
            return None


class Grid:
    """The attend op at one set of dims over all windows, entries, sinks and dtypes."""

    def __init__(self, subject: Subject, shape: Shape, learned: Tensor, tokens: int) -> None:
        self.shape, self.compared = shape, 0
        self.worst: dict[str, tuple[float, dict[str, JSON]]] = {}  # by sinks: share, and where
        self.cells: dict[tuple[str, str], float] = {}  # by window and entries, of fp32 inputs
        model = subject.model
        for dtype, name in itertools.product(DTYPES.values(), SINKS):
            sinks = self._sinks(name, learned)
            for case in cases(shape, dtype, tokens, subject.seed):
                self._see(name, case, dtype, _attend(model, case, sinks), sinks, mass_unit(model.arithmetic.ops, dtype))

    def _sinks(self, name: str, learned: Tensor) -> Tensor:
        heads = self.shape.heads
        if name == "the file's":
            return learned.repeat(-(-heads // len(learned)))[:heads]
        if name == "one per head":  # no two alike, whatever the checkpoint holds
            return torch.linspace(-4, 4, heads, dtype=F64)
        return torch.full((heads,), float(name), dtype=F64)

    def _see(self, name: str, case: Case, dtype: torch.dtype, got: Tensor, sinks: Tensor, mass_rounding: float) -> None:
        rounding = torch.finfo(dtype).eps / 2
        known = [attended(q, case.keys(token), sinks, rounding, mass_rounding) for token, q in enumerate(case.q)]
        wanted, allowed = (torch.stack(parts) for parts in zip(*known, strict=True))
        share = ((got - wanted).abs() / allowed).nan_to_num(math.inf)
        largest = float(share.max())
        self.compared += 1
        cell = case.window_state, case.entries_state
        if dtype is torch.float32:
            self.cells[cell] = max(self.cells.get(cell, 0.0), largest)
        if largest > self.worst.get(name, (-1.0, {}))[0]:
            token, head, column = (int(i) for i in torch.unravel_index(share.argmax(), share.shape))
            where: dict[str, JSON] = {"window": cell[0], "entries": cell[1], "dtype": str(dtype).removeprefix("torch.")}
            self.worst[name] = largest, where | {"token": token, "head": head, "column": column}

    def findings(self) -> Iterator[Finding]:
        """One for each kind of sink: the kinds that fail name the cause."""
        for name, (share, where) in self.worst.items():
            what = f"attend at {self.shape.name} dims, sinks {name}: error over what rounding allows, worst"
            yield judged(what, share, at_most(1), **where)

    def heat_map(self) -> HeatMap:
        """Error by window and entries."""
        shape = self.shape
        return HeatMap(
            f"Error of attend at {shape.name} dims: {shape.heads} heads x {shape.width}, window {shape.window}",
            "what the token sees beside its window",
            "window",
            ENTRIES,
            WINDOWS,
            [[_clipped(self.cells.get((window, entries))) for entries in ENTRIES] for window in WINDOWS],
            "Largest error over all sinks, tokens and columns, as a share of what fp32 sums may be off; 1 and more is a"
            " fault. Inputs in fp32.",
        )


def _attend(model: Transformer, case: Case, sinks: Tensor) -> Tensor:
    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(model.device)

    entries, selected = there(case.entries), there(case.selected)
    q, ring, sink = (x.to(model.device) for x in (case.q, case.ring, sinks.float()))
    attend = model.arithmetic.ops.attend
    return attend(q, ring, case.first, case.window, entries, case.ratio, selected, sink).cpu().to(F64)


def _clipped(share: float | None) -> float | None:
    return None if share is None else min(share, 1.0)


# --- rotation

POSITIONS: Final = (0, 127, 4096, 65535, 1_000_000)
EDGE: Final = 8 * U  # cosine and sine of an angle in fp32, one ulp each, as an angle
DRAWN: Final = 21  # powers of two of positions in the plot
BF16: Final = 2.0**-8  # half an ulp of bf16, as a share of the number


class Angles(NamedTuple):
    """Frequencies of one kind of layer in radians per position, and how far off fp32 may put an angle."""

    theta: float
    yarn: Yarn | None
    frequency: Tensor  # [rope / 2]
    slowed: Tensor  # [rope / 2], 0: as without YaRN, 1: divided by its factor
    units: Tensor  # [rope / 2], error of an angle in half ulps of it

    @classmethod
    def of(cls, dim: int, theta: float, yarn: Yarn | None) -> "Angles":
        """``theta^(-2i / dim)``, slowed by YaRN's ramp over the pair index (arXiv 2309.00071, section 3.2)."""
        exponent = torch.arange(0, dim, 2, dtype=F64) / dim
        frequency = theta**-exponent
        # A power within one ulp (2), its reciprocal (1), the product with the position (1); the exponent is exact
        # where dim is a power of two, and its rounding moves the power by its logarithm.
        units = 4 + math.log(theta) * exponent * (dim & (dim - 1) != 0)
        slowed = torch.zeros_like(frequency)
        if yarn is not None:

            def turning(times: float) -> float:  # the pair that turns so often within the original context
                context = yarn.original_max_position_embeddings
                return dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

            low = max(math.floor(turning(yarn.beta_fast)), 0)
            high = min(math.ceil(turning(yarn.beta_slow)), dim - 1)
            slowed = ((torch.arange(dim // 2, dtype=F64) - low) / (high - low or 0.001)).clamp(0, 1)
            frequency = frequency / yarn.factor * slowed + frequency * (1 - slowed)
            units = units + torch.where(slowed == 0, 0, 6)  # ramp, quotient, two products, a difference and a sum
        return cls(theta, yarn, frequency, slowed, units)

    @classmethod
    def of_kind(cls, config: ModelConfig, kind: LayerKind) -> "Angles":
        """SWA layers: `rope_theta`, never YaRN. CSA and HCA layers: `compress_rope_theta` and the config's YaRN."""
        if kind is LayerKind.SWA:
            return cls.of(config.qk_rope_head_dim, config.rope_theta, None)
        return cls.of(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)

    def off(self, cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Radians between (cos, sin) and the angle at positions [t], and how many fp32 allows: [t, rope / 2] each."""
        angle = positions.to(F64)[:, None] * self.frequency
        cos, sin = cos.cpu().to(F64), sin.cpu().to(F64)
        apart = torch.atan2(sin * angle.cos() - cos * angle.sin(), cos * angle.cos() + sin * angle.sin()).abs()
        return apart, self.units * U * angle + EDGE


def rotations_of(model: Transformer, layer: int) -> list[Rotation]:
    """Every rotation that a layer holds."""
    attention = model.blocks[layer].attention
    held = [attention.rotation]
    if isinstance(attention, HcaAttention):
        held.append(attention.compressor.rotation)
    if isinstance(attention, CsaAttention):
        held.append(attention.indexer.compressor.rotation)
    return held


def tables(model: Transformer) -> Iterator[Finding]:
    """Cosines and sines of every layer's rotations against the formula, entries' positions included."""
    config, longest = model.config, 0.0
    for layer, kind in enumerate(config.layer_kinds):
        angles, worst = Angles.of_kind(config, kind), (-1.0, 0, 0)
        step = config.ratio(layer) or 1
        for rotation in rotations_of(model, layer):
            for first, count, every in (*((position, 1, 1) for position in POSITIONS), (step, 8, step)):
                cos, sin = rotation.at(first, count, every)
                longest = max(longest, float((torch.hypot(cos.to(F64), sin.to(F64)) - 1).abs().max()))
                apart, allowed = angles.off(cos, sin, first + every * torch.arange(count))
                share = (apart / allowed).nan_to_num(math.inf)
                row, pair = divmod(int(share.argmax()), share.shape[1])
                worst = max(worst, (float(share[row, pair]), first + every * row, pair))
        what = f"table of {kind.name} layers: angle over what fp32 allows, worst up to position {max(POSITIONS)}"
        yield judged(what, worst[0], at_most(1), layer=layer, position=worst[1], pair=worst[2])
    # mscale: YaRN's attention scaling would stretch cosines and sines, and V4 has none
    yield judged("length of (cos, sin) off 1, worst of all tables", longest, at_most(EDGE))


def rotation(ops: Ops, device: torch.device, dtype: torch.dtype) -> Iterator[Finding]:
    """Feed the rotation a vector that is turned by a quarter, which no rounding hides."""
    x = torch.arange(1.0, 13.0, device=device)[None].to(dtype)  # 4 dims that stay, 4 pairs
    quarter = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    right = torch.tensor([1.0, 2, 3, 4, -6, 5, -8, 7, -10, 9, -12, 11], dtype=F64)
    for what, given in (("rows", x), ("heads", x[:, None])):
        turned = ops.rotate(given, *quarter).cpu().to(F64).flatten()
        name = f"quarter turn of {what}: neighbours (a, b) to (-b, a), numbers that are not"
        yield judged(name, int((turned != right).sum()), exactly(0), run=turned.tolist(), expected=right.tolist())


# --- mHC

# Comb logits [j, k] whose Sinkhorn converges slowly: far from doubly stochastic, near triangular. After 20 iterations
# rows are still off 1, and every variant of the algorithm (rows first, other counts, eps elsewhere) is far away.
LOGITS: Final = ((0.5, 0.0, -0.25, 1.0), (-9.0, 0.25, 0.75, 0.0), (-11.0, -8.0, 0.0, 0.5), (-12.0, -10.0, -9.0, -0.5))
ITERATIONS: Final = (1, 2, 20)
HC_EPS: Final = 1e-6


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Rows by softmax, plus eps, then columns; `iterations` - 1 times more rows, then columns. [j, k] float64."""
    comb = logits.softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def streams(ops: Ops, device: torch.device) -> Iterator[Finding]:
    """Feed mHC's ops inputs whose outputs are known, with weights that depend on `base` alone."""
    s, tokens, logits = len(LOGITS), 3, torch.tensor(LOGITS)
    flat, fn = torch.ones(tokens, s, 8, device=device), torch.zeros((2 + s) * s, s * 8, device=device)
    base = torch.cat((torch.zeros(2 * s), logits.flatten())).to(device)
    scale = torch.ones(3, device=device)
    for count in ITERATIONS:
        pre, post, comb = (x.cpu().to(F64) for x in ops.hyper_weights(flat, fn, scale, base, count, HC_EPS, 1e-6))
        off = float((comb / sinkhorn(logits.to(F64), count, HC_EPS) - 1).abs().max())
        # a few roundings for each of the two steps of an iteration
        yield judged(f"comb after {count} iterations, relative error", off, at_most(8 * 2 * count * U))
    yield judged("pre of logit 0: off 1/2 + eps", float((pre - 0.5 - HC_EPS).abs().max()), at_most(4 * U))
    yield judged("post of logit 0: off 1", float((post - 1).abs().max()), at_most(8 * U))
    # comb sends stream j to j + 1 and y is 16: powers of two, so that exact equality is due in every dtype
    before = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)[None, :, None].repeat(tokens, 1, 8)
    shift = torch.eye(s, device=device).roll(1, 1)[None].repeat(tokens, 1, 1)
    after = ops.expand(before[:, 0] * 16, before, torch.ones(tokens, s, device=device), shift).cpu().to(F64)
    wanted = torch.tensor([24.0, 17.0, 18.0, 20.0], dtype=F64)[None, :, None]
    what = "streams 1, 2, 4, 8 sent one on by comb[j, j + 1], plus 16"
    yield judged(what, float((after - wanted).abs().max()), exactly(0), run=after[0, :, 0].tolist())


# --- SwiGLU

REACH: Final = 5.0  # times the clamp to which gate and up go
SWIGLU: Final = 2.0**-20  # in fp32: an exponential and three roundings, an ulp or two each


def swiglu(ops: Ops, limit: float, device: torch.device) -> Iterator[Finding]:
    """SwiGLU over a grid of gate and up beyond the clamp: up is clamped on both sides, the gate only above."""
    axis = torch.linspace(-REACH * limit, REACH * limit, 201, device=device)
    gate, up = (part.flatten()[None] for part in torch.meshgrid(axis, axis, indexing="ij"))
    for what, weight in (("shared", None), ("routed", torch.full((1,), 0.7, device=device))):
        found = ops.swiglu(gate, up, limit, weight).cpu().to(F64)
        kept = gate.cpu().to(F64).clamp(max=limit)
        wanted = kept / (1 + (-kept).exp()) * up.cpu().to(F64).clamp(-limit, limit)
        wanted = wanted if weight is None else wanted * weight.cpu().to(F64)
        error = ((found - wanted).abs() / wanted.abs().clamp_min(TINY)).nan_to_num(math.inf)
        at = int(error.argmax())
        where: dict[str, JSON] = {"gate": float(gate[0, at]), "up": float(up[0, at])}
        yield judged(
            f"SwiGLU of {what} experts around its clamp, relative error", float(error.max()), at_most(SWIGLU), **where
        )


# --- the probe


@dataclass(frozen=True)
class OpsProbe(Probe):
    """Run ops on inputs that prompts do not reach."""

    name: ClassVar[str] = "ops"
    question: ClassVar[str] = "Do the ops compute their equations at edges that a prompt does not reach?"
    of_v41: ClassVar[bool] = True
    reads: ClassVar[tuple[Site, ...]] = ()
    background: ClassVar[str] = """\
A prompt shows an op what the prompt brings. An attention kernel has to get its sink right for every mixture of what a
token can see: a window of one key, half full, or wrapped around its ring; compressed entries that are absent,
unfinished, selected or not. Angles must be right at positions that no short run reaches, Sinkhorn after each number of
iterations, SwiGLU on both sides of its clamp. Here the ops of the run are fed such inputs, with large numbers in every
row that must not be read, and compared with float64.

Errors are given as a share of what rounding allows. A share just below 1 is what to expect: among many thousand values
one is always rounded by nearly half a unit in the last place. A fault gives tens and more. Triton's attention rounds
each mass of its softmax to bf16 before it multiplies bf16 keys, as tensor cores want it: what it is allowed in bf16 is
more, by six times the root of the sum of squares of what these roundings may do."""

    shapes: tuple[Shape, ...] = V4  # dims of the grid beside the model's own
    tokens: int = 3  # per call of attend; with one key there is one

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Feed op after op."""
        model, config = subject.model, subject.config
        ops, device, dtype = model.arithmetic.ops, model.device, DTYPES[subject.options.dtype]
        last = f"layers.{config.num_hidden_layers - 1}.attn.attn_sink"
        learned = subject.file_weights.vector(last).cpu().to(F64)
        own = Shape("the model's", config.num_attention_heads, config.head_dim, config.sliding_window)
        grids = []
        for done, shape in enumerate((own, *self.shapes)):
            progress(done / (2 + len(self.shapes)), f"attend at {shape.name} dims")
            grids.append(Grid(subject, shape, learned, self.tokens))
        progress(0.9, "tables, mHC, SwiGLU")
        findings = (
            *(finding for grid in grids for finding in grid.findings()),
            *tables(model),
            *rotation(ops, device, dtype),
            *streams(ops, device),
            *swiglu(ops, config.swiglu_limit, device),
        )
        return Report(
            _summary(findings, sum(grid.compared for grid in grids)),
            findings,
            (*(grid.heat_map() for grid in grids), *_tables(model)),
            "Not that the model hands these ops the right inputs: the probes of layers judge that.",
        )


def _summary(findings: Sequence[Finding], compared: int) -> str:
    failed = [finding for finding in findings if finding.failed]
    said = f"Attention ({compared} inputs), tables of angles, RoPE, mHC and SwiGLU were compared with float64"
    if not failed:
        return f"{said}; all {len(findings)} results agree within rounding."
    return f"{said}; {len(failed)} of {len(findings)} results differ, first: {failed[0].what}."


def _tables(model: Transformer) -> Iterator[Part]:
    config = model.config
    kinds = {kind: layer for layer, kind in reversed(list(enumerate(config.layer_kinds)))}
    rows, curves = [], dict[str, Sequence[tuple[float, float]]]()
    for kind, layer in sorted(kinds.items(), key=lambda item: item[1]):
        angles, yarn = Angles.of_kind(config, kind), Angles.of_kind(config, kind).yarn
        waves = (2 * math.pi / float(angles.frequency[0]), 2 * math.pi / float(angles.frequency[-1]))
        kept, slowed = int((angles.slowed == 0).sum()), int((angles.slowed == 1).sum())
        name = "off" if yarn is None else f"x{yarn.factor:g} from {yarn.original_max_position_embeddings}"
        rows.append((kind.name, angles.theta, name, *waves, kept, len(angles.slowed) - kept - slowed, slowed))
        if kind is not LayerKind.HCA or LayerKind.CSA not in kinds:  # the two share a table
            curves[kind.name] = _errors(model.blocks[layer].attention.rotation, angles)
    yield Table(
        "The table of each kind of layer",
        ("kind", "theta", "YaRN", "shortest wave", "longest wave", "kept", "between", "slowed"),
        rows,
        "Waves in tokens: the period of a pair. Pairs are kept as without YaRN, slowed by its factor,"
        " or between the two.",
    )
    yield Plot(
        "Error of an angle in fp32",
        "position",
        "radians",
        curves | {"half an ulp of bf16": [(1.0, BF16), (2.0 ** (DRAWN - 1), BF16)]},
        log_x=True,
        log_y=True,
        note="Largest of all pairs and of up to 256 positions below the one drawn: position times frequency is rounded"
        " to fp32. Where the curves cross the line, the angle loses more than storing the rotated number in bf16 does.",
    )


def _errors(rotation: Rotation, angles: Angles) -> list[tuple[float, float]]:
    """Largest error of an angle up to each power of two; steps are odd, as others are rounded less."""
    points = []
    for first in (1 << power for power in range(DRAWN)):
        count, step = min(256, first), (first // 512) | 1
        start = first - (count - 1) * step
        apart, _ = angles.off(*rotation.at(start, count, step), start + step * torch.arange(count))
        points.append((float(first), float(apart.max())))
    return points


FULL: Final = OpsProbe()
QUICK: Final = OpsProbe(shapes=(), tokens=5)
