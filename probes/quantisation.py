"""Quantisation: what deployed numerics costs, and whether what rounds rounds as it should."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Weight
from fathom.kernels.ops import Ops
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import Weights
from fathom.model.choices import DEPLOYED
from fathom.model.config import LayerKind, ModelConfig, check_widths
from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site
from fathom.model.rounding import ROUNDINGS
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.finding import (
    JSON,
    Finding,
    Part,
    Plot,
    Report,
    Table,
    at_least,
    at_most,
    exactly,
    judged,
    measured,
    vacuous,
)
from fathom.probes.judge.oracle import (
    E2M1,
    E2M1_INDEX,
    E2M1_PAIRS,
    E4M3,
    E4M3_KV,
    E4M3_LINEAR,
    F64,
    INDEX_BLOCK,
    KV_BLOCK,
    LINEAR_BLOCK,
    Layer,
    Narrow,
    Noise,
    Parameters,
    Setting,
    hadamard,
    length,
)
from fathom.probes.probe import Probe, Progress, one_rank
from fathom.probes.shared.held import Value, find
from fathom.probes.shared.recorder import Recorder
from fathom.probes.subject import Subject

# What the demo is known by, and no other model is held to: 18 documents of 192 to 2048 tokens gave a mean KL of 3.4e-5
# to 1.7e-4 nats, and not one decided position at which the likeliest token changed. KL grows by the square of the
# error: a bit of mantissa less in every rounding costs four times as much, and three times the worst is let pass.
DEMO_KL: Final = 5e-4
DEMO_DECIDED: Final = 0.999
DECIDED: Final = 0.1  # a position is decided where the first two tokens are so far apart in probability
# Relative error of one number: at most half a step, 1/16 of itself (E4M3 has three bits of mantissa), and numbers far
# below their block's largest add next to nothing. So no rounding to E4M3 costs more than this.
E4M3_COST: Final = 2.0**-4
# fp32 sums are off by 1.4e-6 (512 terms) where a step of bf16 is 2^-8 of a number: 4e-4 of all values fall on the other
# side. The Hadamard matrix spreads each over 128, a twentieth of the values then, of which a step of bf16 takes one in
# ten at most over a border of E2M1's coarser steps: 0.005, and twice that is let pass.
UNLIKE: Final = 0.01
CLOSE: Final = 2.0**-8  # every value of a token off by one last place of bf16
LOGIT_ROWS: Final = 128  # tokens whose logits are held at a time
BINS: Final = 32  # of positions, in the plot of KL
BLOCKS: Final = 16  # of random numbers in each case

# of the deployed run, for float64
WATCHED: Final = (
    sites.ATTENTION_INPUT, sites.LATENT, sites.KV, sites.ENTRY, sites.INDEX_KEY, sites.INDEX_KEY_USED,
    sites.INDEX_QUERY, sites.INDEX_QUERY_USED, sites.UNROTATED, sites.EXPERTS_INPUT, sites.SHARED_GATE, sites.SHARED_UP,
)  # fmt: skip
REAL: Final = (sites.ATTENTION_INPUT, sites.LATENT, sites.EXPERTS_INPUT, sites.SHARED_GATE, sites.INDEX_QUERY)
# at which the two runs are compared
AT_SITES: Final = (
    sites.QUERY, sites.KV, sites.ENTRY, sites.INDEX_QUERY, sites.INDEX_KEY, sites.MIXED, sites.ATTENTION_OUTPUT,
    sites.EXPERTS_INPUT, sites.EXPERTS_OUTPUT, sites.STREAMS,
)  # fmt: skip
CHOICES: Final = (sites.SELECTED, sites.EXPERT_IDS)
BY_DEPTH: Final = {
    "attention, before its projection": sites.MIXED,
    "attention output": sites.ATTENTION_OUTPUT,
    "experts output": sites.EXPERTS_OUTPUT,
    "streams after the layer": sites.STREAMS,
}


# --- the run's rounding ops, on inputs made to break them and on real ones


@dataclass
class Rounding:
    """One use of a rounding op, and what became of all its cases."""

    what: str  # "simulate_fp8 in groups of 128"
    op: Callable[[Tensor, int], Tensor]
    form: Narrow
    values: int = 0
    unlike: int = 0  # values that are not the oracle's, bit for bit
    blocks: int = 0
    off_grid: int = 0  # blocks that no power of two puts on the format's numbers
    first: dict[str, JSON] = field(default_factory=dict)  # the first value unlike

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.form.block

    def add(self, case: str, x: Tensor) -> None:
        """Round x [n, group * m]."""
        found, given = self.op(x, self.group).to("cpu", F64), x.to("cpu", F64)
        wanted = self.form.rounded(given)
        unlike = found.view(torch.int64) != wanted.view(torch.int64)  # the sign of a zero counts
        off = off_grid(found, self.form)
        self.values += found.numel()
        self.unlike += int(unlike.sum())
        self.blocks += off.numel()
        self.off_grid += int(off.sum())
        if unlike.any() and not self.first:
            numbers = {"given": given, "found": found, "wanted": wanted}
            self.first = {"case": case, **{name: float(values[unlike][0]) for name, values in numbers.items()}}

    def findings(self) -> Iterator[Finding]:
        """Judge the casts and the scales behind them."""
        what = f"{self.what}: values unlike an independent cast"
        yield judged(what, self.unlike, exactly(0), of=self.values, **self.first)
        what = f"{self.what}: blocks that are no {self.form.name} numbers times a power of two"
        yield judged(what, self.off_grid, exactly(0), of=self.blocks)

    def cases(self, seed: int) -> dict[str, Tensor]:
        """Inputs [n, group] float32 on which a rounding that is almost right goes wrong."""
        generator = torch.Generator().manual_seed(seed)
        codes = (E4M3 if self.form.name == "E4M3" else E2M1).unique()  # NaN stays with its kind
        codes = codes[codes.isfinite()].sort().values
        largest = float(codes[-1])

        def with_amax(amax: Tensor) -> Tensor:
            """Random blocks whose largest number is given for each."""
            blocks = (2 * torch.rand(len(amax), self.group, generator=generator, dtype=F64) - 1) * amax[:, None]
            blocks[torch.arange(len(amax)), torch.randint(self.group, (len(amax),), generator=generator)] = amax
            return blocks

        powers = 2.0 ** torch.arange(-10, 11, dtype=F64)
        edges = largest * powers
        ulp = edges * 2.0**-23  # of fp32, or half of it
        every = torch.cat((codes, (codes[1:] + codes[:-1]) / 2))
        rows = -(-len(every) // (self.group - 1))
        every = every.repeat(self.group)[: rows * (self.group - 1)].view(rows, -1)
        few = torch.rand(BLOCKS, self.group, generator=generator) < 0.9
        made = {
            "amax a power of two": with_amax(powers),
            "amax at the format's largest": with_amax(edges),
            "amax an ulp above it": with_amax(edges + ulp),
            "amax an ulp below it": with_amax(edges - ulp),
            # in blocks that the largest pins to scale 1
            "every number of the format and every midpoint": functional.pad(every, (0, 1), value=largest),
            **{f"amax {amax:g}": with_amax(torch.full((BLOCKS,), amax, dtype=F64)) for amax in (1e-30, 1e-4, 1e30)},
            "zeros": torch.zeros(1, self.group),
            "one number among zeros": torch.eye(1, self.group) * -3.0,
            "outlier": with_amax(torch.full((BLOCKS,), 1e4, dtype=F64)) * torch.where(few, 1e-5, 1.0),
        }
        return {name: x.float() for name, x in made.items()}


def roundings(ops: Ops) -> list[Rounding]:
    """Return what deployed numerics rounds with."""
    return [
        *(
            Rounding(f"simulate_fp8 in groups of {form.block}", ops.simulate_fp8, form)
            for form in (E4M3_LINEAR, E4M3_KV)
        ),
        Rounding(f"simulate_fp4 in groups of {INDEX_BLOCK}", ops.simulate_fp4, E2M1_INDEX),
    ]


def off_grid(y: Tensor, form: Narrow) -> Tensor:
    """Which blocks of y [..., d] float64 are no numbers of the format times one power of two.

    A rounded block's largest number lies in the upper half of the format's range or, rounded down, on its lower end;
    both name a power of two under which a block that has one at all is on the grid: rounded again, it stays.
    """
    off: Tensor = (form.rounded(y) != y).unflatten(-1, (-1, form.block)).any(-1).flatten()
    return off


# --- what each rounding costs by itself, in float64 on what a run hands to it


@dataclass(frozen=True)
class Heard:
    """What a recorder kept, as the oracle takes it."""

    recorder: Recorder

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """Every row that was kept of ``layers.N.site``, in float64; None where it was not watched."""
        del at  # the positions that were recorded
        _, layer, name = name.split(".", 2)
        site = next((site for site in WATCHED if site.name == name), None)
        return None if site is None else self.recorder.rows(site, int(layer)).to(F64)


class Costs(NamedTuple):
    """One layer: what its roundings cost, and whether the run rounds as float64 does."""

    layer: int
    cost: dict[str, float]  # RMS of the error as a share of the RMS of what is rounded; missing where it is not
    kv: float  # distance of the stored KV from float64 with the rounding, median token
    blocks: int  # of KV and entries as stored, rope dims left out
    off_grid: int  # of those, blocks that are no E4M3 numbers times a power of two
    unlike: dict[str, float]  # share of index queries and keys that are not those of float64 with the rounding


ROUNDED: Final = {
    "input of wq_a, wkv": "attn.wq_a",
    "input of wq_b": "attn.wq_b",
    "input of wo_b": "attn.wo_b",
    "input of experts": "ffn.shared_experts.w1",
    "input of w2, shared": "ffn.shared_experts.w2",
}  # and the matrix that makes it so
COLUMNS: Final = (*ROUNDED, "KV", "index query", "index key")


def costs(oracle: Layer, dtype: torch.dtype) -> Costs:
    """Measure one layer of a deployed run, whose activations are of a dtype."""

    def rows(site: Site) -> Tensor:
        return oracle.value(site.name, oracle.at)  # [1, n, ...], no replicas

    def kept(x: Tensor) -> Tensor:
        return x.to(dtype).to(F64)

    config, x = oracle.config, rows(sites.ATTENTION_INPUT)
    wo_a = oracle.parameters[oracle.name("attn.wo_a.weight")].unflatten(0, (config.o_groups, -1))
    out = rows(sites.UNROTATED).flatten(2).unflatten(2, (config.o_groups, -1))
    given = {
        "input of wq_a, wkv": x,
        "input of wq_b": rows(sites.LATENT),
        "input of wo_b": kept(torch.einsum("ntgd,grd->ntgr", out, wo_a).flatten(2)),
        "input of experts": rows(sites.EXPERTS_INPUT),
        "input of w2, shared": kept(oracle.activated(rows(sites.SHARED_GATE), rows(sites.SHARED_UP))),
    }
    cost = {
        name: _cost(given[name], E4M3_LINEAR.rounded(given[name]))
        for name, matrix in ROUNDED.items()
        if oracle.parameters.rounds(oracle.name(f"{matrix}.weight"))
    }
    nope = config.head_dim - config.qk_rope_head_dim  # rotated dims are not rounded
    wkv = kept(oracle.linear(x, "attn.wkv.weight"))
    before = kept(oracle.rms_norm(wkv, oracle.parameters[oracle.name("attn.kv_norm.weight")]))[..., :nope]
    after = E4M3_KV.rounded(before)
    cost["KV"] = _cost(before, after)
    unlike = {}
    if oracle.kind is LayerKind.CSA:
        pairs = {"query": (sites.INDEX_QUERY, sites.INDEX_QUERY_USED), "key": (sites.INDEX_KEY, sites.INDEX_KEY_USED)}
        for name, (made, used) in pairs.items():
            turned = kept(hadamard(rows(made)))
            wanted = E2M1_INDEX.rounded(turned)
            cost[f"index {name}"] = _cost(turned, wanted)
            unlike[name] = float((rows(used) != wanted).double().mean())
    kv = rows(sites.KV)[..., :nope]
    stored = kv if oracle.kind is LayerKind.SWA else torch.cat((kv, rows(sites.ENTRY)[..., :nope]), 1)
    off = off_grid(stored, E4M3_KV)
    distance = (length(kv - after) / length(after).clamp(min=1e-30)).median()
    return Costs(oracle.layer, cost, float(distance), off.numel(), int(off.sum()), unlike)


def _cost(x: Tensor, rounded: Tensor) -> float:
    return float((rounded - x).norm() / x.norm()) if x.any() else 0.0


def cost_findings(layers: Sequence[Costs]) -> Iterator[Finding]:
    """Judge that the run rounds as deployed, and that no rounding costs more than its format explains."""
    worst = max(layers, key=lambda one: one.kv)
    what = "KV as stored, median token's distance from float64, worst layer"
    yield judged(what, worst.kv, at_most(CLOSE), layer=worst.layer)
    what = "KV and entries as stored, blocks that are no E4M3 numbers times a power of two"
    off, blocks = [one.layer for one in layers if one.off_grid], sum(one.blocks for one in layers)
    yield judged(what, sum(one.off_grid for one in layers), exactly(0), of=blocks, layers=off)
    for name, plural in (("query", "queries"), ("key", "keys")):
        having = [one for one in layers if name in one.unlike]
        if having:
            most = max(having, key=lambda one: one.unlike[name])
            what = f"index {plural} as scored, values unlike float64, worst layer"
            yield judged(what, most.unlike[name], at_most(UNLIKE), layer=most.layer)
    narrow = {(name, one.layer): cost for one in layers for name, cost in one.cost.items() if "index" not in name}
    (name, layer), cost = max(narrow.items(), key=lambda item: item[1])
    what = "error of one rounding to E4M3, as a share of what is rounded, largest"
    yield judged(what, cost, at_most(E4M3_COST), layer=layer, where=name)


# --- one prompt in deployed and plain numerics side by side

Seen = dict[tuple[str, int], Tensor]  # by site and layer: what passed in one call


@dataclass
class Pair:
    """Sums over the tokens so far."""

    config: ModelConfig
    difference: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # squares: of it, of plain
    common: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)  # choices in common, and of plain
    kl: list[float] = field(default_factory=list)  # nats, by position
    agree: list[bool] = field(default_factory=list)  # whether the likeliest token is the same
    margin: list[float] = field(default_factory=list)  # probability between plain's first two tokens
    loss: list[float] = field(default_factory=lambda: [0.0, 0.0])  # nats over all next tokens: deployed, plain

    def share(self, site: Site, layer: int) -> float | None:
        """RMS of the difference in % of the RMS of plain; None where the layer has no such site."""
        apart, size = self.difference.get((site.name, layer), (0.0, 0.0))
        return 100 * math.sqrt(apart / size) if size else None

    def overlap(self, site: Site, layer: int) -> float | None:
        """Choices of plain that deployed made too, in %; None where there was nothing to choose."""
        both, of = self.common.get((site.name, layer), (0, 0))
        return 100 * both / of if of else None

    def decided(self) -> list[bool]:
        """Of the positions where plain is decided, whether deployed's likeliest token is the same."""
        return [agree for agree, margin in zip(self.agree, self.margin, strict=True) if margin >= DECIDED]

    def add_sites(self, deployed: Seen, plain: Seen, first: int) -> None:
        """Add one call, of positions ``first ..``."""
        for key, a in deployed.items():
            (name, layer), b = key, plain[key]
            if name == sites.SELECTED.name:
                # the first tokens see no more entries than are selected: there is a choice after them
                free = max(0, (self.config.index_topk + 1) * self.config.compress_ratios[layer] - 1 - first)
                self._add_choices(key, a[free:], b[free:])
            elif name == sites.EXPERT_IDS.name:
                if not self.config.is_hash(layer):
                    self._add_choices(key, a, b)
            else:
                apart, size = self.difference.get(key, (0.0, 0.0))
                more = (a.double() - b.double()).square().sum().item(), b.double().square().sum().item()
                self.difference[key] = apart + more[0], size + more[1]

    def _add_choices(self, key: tuple[str, int], a: Tensor, b: Tensor) -> None:
        """Add choices [t, k] of entries or experts."""
        if b.numel():
            both, of = self.common.get(key, (0, 0))
            self.common[key] = both + int((a[:, :, None] == b[:, None]).any(1).sum()), of + b.numel()

    def add_logits(self, deployed: Tensor, plain: Tensor, following: Tensor) -> None:
        """Add logits [t, vocab] and the tokens that came next: at least t of them but at the end, where one lacks."""
        a, b = deployed.double().log_softmax(-1), plain.double().log_softmax(-1)
        self.kl += (b.exp() * (b - a)).sum(-1).tolist()
        self.agree += (a.argmax(-1) == b.argmax(-1)).tolist()
        first, second = b.exp().topk(2).values.unbind(-1)
        self.margin += (first - second).tolist()
        known = following[: len(a), None]
        for side, x in enumerate((a, b)):
            self.loss[side] -= x[: len(known)].gather(1, known).sum().item()

    def findings(self, *, of_demo: bool) -> Iterator[Finding]:
        """Judge the demo at its logits by its frozen bounds; of other checkpoints measure."""
        decided, worst = self.decided(), max(range(len(self.kl)), key=self.kl.__getitem__)
        mean, same = _mean(self.kl), sum(decided) / len(decided) if decided else 1.0
        kl, top = "KL from plain to deployed, mean over positions", "same likeliest token where plain is decided"
        if not max(self.kl):
            yield vacuous(kl, "both numerics gave the same logits: nothing was rounded")
        elif of_demo:
            yield judged(kl, mean, at_most(DEMO_KL), "nats")
            yield judged(top, same, at_least(DEMO_DECIDED), positions=len(decided))
        else:
            yield measured(kl, mean, "nats")
            yield measured(top, same, positions=len(decided))
        yield measured("KL from plain to deployed, worst position", self.kl[worst], "nats", position=worst)
        yield measured("same likeliest token", _mean(self.agree))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _call(model: Transformer, tokens: Tensor, state: State, heard: Mapping[Site, Listener]) -> tuple[Tensor, Seen]:
    """One call: hidden rows, and what passed."""
    recorder = Recorder(_sites_of(model.config, (*AT_SITES, *CHOICES)))
    with listening(model, recorder.listeners()), listening(model, heard):
        hidden = model(tokens, state)
    return hidden, recorder.joined()


def _sites_of(config: ModelConfig, watched: Sequence[Site]) -> tuple[Site, ...]:
    """Those that this model has."""
    return tuple(site for site in watched if LayerKind.CSA in config.layer_kinds or "indexer." not in site.name)


def run_pair(
    deployed: Transformer, plain: Transformer, tokens: list[int], chunk: int, tick: Callable[[float], None],
    heard: Mapping[Site, Listener],
) -> Pair:  # fmt: skip
    """Run `tokens` through both in calls of `chunk`; `heard` listens to the deployed one besides."""
    pair = Pair(plain.config)
    ids = torch.tensor(tokens, dtype=torch.int64, device=plain.device)
    states = [model.new_state(len(tokens), chunk) for model in (deployed, plain)]
    for first in range(0, len(tokens), chunk):
        part = ids[first : first + chunk]
        ours, seen = _call(deployed, part, states[0], heard)
        theirs, seen_plain = _call(plain, part, states[1], {})
        pair.add_sites(seen, seen_plain, first)
        for low in range(0, len(part), LOGIT_ROWS):
            some = slice(low, low + LOGIT_ROWS)
            pair.add_logits(deployed.logits(ours[some]), plain.logits(theirs[some]), ids[first + 1 :][some])
        tick((first + len(part)) / len(tokens))
    return pair


def one_kind(ops: Ops) -> dict[str, Ops]:
    """Return op sets that round one kind of thing alone."""

    def only(group: int) -> Callable[[Tensor, int], Tensor]:
        return lambda x, columns: ops.simulate_fp8(x, columns) if columns == group else x

    def unrounded(x: Tensor, group: int) -> Tensor:
        del group
        return x

    return {
        "inputs of linears alone": ops._replace(simulate_fp8=only(LINEAR_BLOCK), simulate_fp4=unrounded),
        "KV and entries alone": ops._replace(simulate_fp8=only(KV_BLOCK), simulate_fp4=unrounded),
        "index queries and keys alone": ops._replace(simulate_fp8=unrounded),
    }


# --- what is stored quantised: scales, and how much of each format's range its blocks use


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

    def add(self, name: str, held: Value | None, filed: Weight) -> None:
        """Count one matrix as the model holds it."""
        self.matrices += 1
        if held is None or type(held) is not type(filed) or not _same(held, filed):
            self.differing.append(name)
        if not isinstance(held, Fp8 | Fp4):
            return
        codes = held.data.cpu().view(torch.uint8)
        if isinstance(held, Fp8):
            size, half = E4M3[codes.int()].abs(), 224
            self.nan_bytes += int(size.isnan().sum())
            self.minus_zeros += int((codes == 128).sum())
            padded = functional.pad(size, (0, -size.shape[1] % 128, 0, -size.shape[0] % 128))  # the last may be partial
            largest = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).amax((1, 3))
        else:
            size, half = E2M1_PAIRS[codes.int()].flatten(1).abs(), 3
            largest = size.unflatten(1, (-1, 32)).amax(2)
        self.values += size.numel()
        self.blocks += largest.numel()
        self.half_used += int((largest >= half).sum())
        scale = held.scale.cpu().to(torch.float32).to(F64)
        fraction, exponent = torch.frexp(scale)
        self.bad_scales += int(((fraction != 0.5) | ~scale.isfinite()).sum())
        if len(found := exponent[scale.isfinite()].flatten() - 1):
            ends = [*self.exponents, int(found.min()), int(found.max())]
            self.exponents = [min(ends), max(ends)]

    def findings(self) -> Iterator[Finding]:
        """Judge what is stored; how much of the range is used is the checkpoint's own affair, and measured."""
        what = f"{self.form}: matrices whose bytes, as held, are not the files'"
        yield judged(what, len(self.differing), exactly(0), of=self.matrices, first=self.differing[:3])
        if self.blocks:
            yield judged(f"{self.form}: scales that are no powers of two", self.bad_scales, exactly(0))
            what = f"{self.form}: blocks that leave the upper half of the range unused"
            yield measured(what, self.blocks - self.half_used)
        if self.form.startswith("FP8"):
            yield judged(f"{self.form}: bytes that are NaN", self.nan_bytes, exactly(0), of=self.values)

    def row(self) -> list[float | str | None]:
        """A row of the table of stored weights."""
        ends: list[str | None] = [f"2^{exponent}" for exponent in self.exponents]
        fp8 = self.form.startswith("FP8")
        used = 100 * self.half_used / self.blocks if self.blocks else None
        codes = (self.nan_bytes, self.minus_zeros) if fp8 else (None, None)
        return [self.form, self.matrices, self.blocks or None, *(ends or (None, None)), used, *codes]


def _same(held: Value, filed: Weight) -> bool:
    """Whether two matrices of one form are the same bytes."""
    ours, theirs = ([part.cpu().contiguous().flatten().view(torch.uint8) for part in of] for of in (held, filed))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def survey(model: Transformer, census: Census, weights: Weights, experts: int) -> list[Stored]:
    """Go through the quantised matrices; of the routed experts of a layer, `experts` spread over them."""
    count = model.config.n_routed_experts
    some = {e * count // min(experts, count) for e in range(min(experts, count))}
    forms: dict[str, Stored] = {}
    for name, parameter in census.demanded.items():
        if parameter.kind != "matrix" or (".experts." in name and int(name.split(".")[4]) not in some):
            continue
        filed, place = weights.matrix(name), find(model, name)
        if not isinstance(filed, Dense):
            form = census.mappings[name].form.value
            forms.setdefault(form, Stored(form)).add(name, None if place is None else place.value, filed)
    return list(forms.values())


# --- the probe


@dataclass(frozen=True)
class Quantisation(Probe):
    """Run deployed and plain numerics side by side, and hold every rounding against an independent cast."""

    name: ClassVar[str] = "quantisation"
    question: ClassVar[str] = "What does the deployed rounding cost, and does everything that rounds round right?"
    reads: ClassVar[tuple[Site, ...]] = tuple(
        site for site in sites.SITES if site in {*AT_SITES, *CHOICES, *WATCHED, sites.LOGITS}
    )
    background: ClassVar[str] = """\
DeepSeek serves V4 with narrow activations: the input of every FP8 or FP4 matrix is rounded to E4M3 (three bits of
mantissa), one scale for 128 columns; KV and compressed entries likewise for 64 columns, but for the dims that carry
positions; index queries and keys to E2M1 (one bit) for 32 columns, after a Hadamard transform that spreads outliers.
This is `deployed` numerics. `plain` rounds none of it, as Hugging Face transformers does.

All these scales are powers of two, stored in one byte of exponent. Runtimes went wrong here without an error: scales
that were no powers of two, packed as if they were (a quarter of the value lost); scales of the neighbour block; FP4
unpacked high nibble first; and byte 0x80, which is -0 in one dialect of E4M3 and NaN in another.

This probe runs one prompt in both numerics and says how far apart they are at every site and at the logits. Then it
looks at each rounding by itself: what it costs, and whether it is, bit for bit, the cast that a formula in float64
gives, on the prompt's tensors and on numbers made to lie on the edges. Last, it reads the stored scales."""
    noticed: ClassVar[str] = """\
- Nothing is off by a bit, signed zeros included. KV computed again from the layer's input through matrix, norm, bf16
  and rounding, and index queries and keys through Hadamard transform and rounding, equal what the run used.
- The indexer's selection is far less stable than the model: FP4 of index queries and keys alone exchanges nearly as
  many of the selected entries as all rounding together (in both tables, *entries in common*), and what the attention of
  these layers gathers (*mixed*) differs far more than in other layers. At the logits that costs little, and `needle`
  finds its codes in these numerics. What is exchanged are entries that hardly weigh: the overlap of two selections is a
  poor measure of harm, and a selection that is wrong in some entries may show in no answer.
- The likeliest token changes at some positions, which looks alarming and is not: all of these are near ties of plain's
  first two tokens. Where plain is decided it never changes.
- The difference does not grow with depth (*streams*), though every layer rounds anew. The demo was trained with these
  roundings.
- Some of the stored FP8 bytes are `0x80`, and none is a NaN of this dialect: one such byte, read as FNUZ, is enough to
  lose a row. All FP8 blocks and FP4 blocks use the upper half of their range, as a scale that is the smallest power of
  two must have it."""

    tokens: int = 4096  # prompt, run in both numerics
    rows: int = 256  # tokens, spread over the prompt, whose roundings are computed again in float64
    experts: int = 8  # routed experts of each layer whose stored bytes are looked at
    alone: bool = True  # run the prompt also with one kind of rounding at a time

    def needs(self, subject: Subject) -> str | None:
        """Deployed numerics has no meaning for widths that its groups do not divide."""
        try:
            check_widths(subject.config, ROUNDINGS[DEPLOYED])
        except ConfigError as error:
            return f"this model has no deployed numerics to compare with ({error})"
        return one_rank(subject, "it takes weights out of the model, and a rank holds only its part of them")

    def vacuous(self, subject: Subject) -> str | None:
        """Entries need closed windows."""
        tokens, ratio = self._count(subject.config), max(subject.config.compress_ratios)
        return f"{tokens} tokens close no window of {ratio}" if tokens < ratio else None

    def _count(self, config: ModelConfig) -> int:
        return min(max(self.tokens, max(config.compress_ratios) + 64), config.max_position_embeddings)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Stored bytes, one prompt in both numerics, then each rounding by itself."""
        options, config = subject.with_options(numerics="deployed"), subject.config
        deployed, plain = subject.load(options), subject.load(subject.with_options(numerics="plain")).model
        progress(0.0, "stored bytes")
        stored = survey(deployed.model, deployed.census, subject.file_weights, self.experts)
        tokens = subject.tokens(self._count(config))
        at = [i * (len(tokens) - 1) // max(1, self.rows - 1) for i in range(self.rows)]
        recorder = Recorder(_sites_of(config, WATCHED), at)
        runs = {"all": deployed.model}
        if self.alone:
            runs |= {name: subject.load(options, ops).model for name, ops in one_kind(subject.ops).items()}
        pairs: dict[str, Pair] = {}
        for name, model in runs.items():
            done = len(pairs)

            def tick(share: float, done: int = done, name: str = name) -> None:
                progress(0.1 + 0.7 * (done + share) / len(runs), f"the prompt, rounding {name}, beside plain")

            heard = recorder.listeners() if name == "all" else {}
            pairs[name] = run_pair(model, plain, tokens, subject.options.prefill_chunk, tick, heard)
        progress(0.8, "roundings in float64")
        arithmetic, parameters = (
            deployed.model.arithmetic,
            Parameters(Checkpoint.open(subject.directory), deployed.census),
        )
        noise = Noise(arithmetic.dtype, replicas=0)
        setting = Setting(config, parameters, torch.tensor(tokens), ROUNDINGS[DEPLOYED], Heard(recorder), noise)
        layers = []
        for layer in range(config.num_hidden_layers):
            parameters.forget()
            layers.append(costs(Layer(setting, layer, torch.tensor(at)), arithmetic.dtype))
        progress(0.9, "rounding ops")
        ops = roundings(arithmetic.ops)
        for rounding in ops:
            self._try(rounding, recorder, deployed.model, subject.seed)
        progress(1.0, "done")
        pair = pairs["all"]
        findings = (
            *(found for rounding in ops for found in rounding.findings()),
            *(found for form in stored for found in form.findings()),
            *cost_findings(layers),
            *pair.findings(of_demo=subject.speaks_demo_language and subject.prompt is None),
        )
        return Report(summary(pair, ops, stored), findings, tuple(parts(pairs, layers, stored, ops)), NOT_CLAIMED)

    def _try(self, rounding: Rounding, recorder: Recorder, model: Transformer, seed: int) -> None:
        """Made inputs in fp32 and bf16, and those of the prompt."""
        for name, x in rounding.cases(seed).items():
            for dtype in (torch.float32, torch.bfloat16):
                rounding.add(f"{name}, {dtype}", x.to(model.device, dtype))
        for layer, kind in enumerate(model.config.layer_kinds):
            for site in REAL:
                if site is not sites.INDEX_QUERY or kind is LayerKind.CSA:
                    x = recorder.rows(site, layer)
                    if x.shape[-1] % rounding.group == 0:
                        rounding.add(f"{site.name} of layer {layer}", x.to(model.device))


# --- the summary, tables and plots


def summary(pair: Pair, ops: Sequence[Rounding], stored: Sequence[Stored]) -> str:
    """The sentence at which a hurried reader stops."""
    last, decided = pair.config.num_hidden_layers - 1, pair.decided()
    clear = f"{sum(decided)} of the {len(decided)} where plain has a clear winner" if decided else "no clear winner"
    ends = [exponent for form in stored for exponent in form.exponents]
    scales = f"Stored scales run from 2^{min(ends)} to 2^{max(ends)}." if ends else "No scales are stored."
    return (
        f"Rounding as deployed costs {_mean(pair.kl):.2g} nats per token (KL at the logits; worst {max(pair.kl):.2g}). "
        f"The likeliest token is the same at {_mean(pair.agree):.1%} of {len(pair.kl)} positions ({clear}). After the "
        f"last layer the streams differ by {pair.share(sites.STREAMS, last) or 0:.1f}%. Of "
        f"{sum(op.values for op in ops)} values that the run's ops rounded, {sum(op.unlike for op in ops)} differ from "
        f"an independent cast. {scales}"
    )


def parts(
    pairs: Mapping[str, Pair], layers: Sequence[Costs], stored: Sequence[Stored], ops: Sequence[Rounding]
) -> Iterator[Part]:
    """Everything below the findings, in the order of the page."""
    pair, kinds = pairs["all"], pairs["all"].config.layer_kinds
    yield _logits(pair)
    if len(pairs) > 1:
        yield Table(
            "One kind of rounding at a time",
            (
                "rounded", "KL, mean", "KL, worst", "same likeliest token, %", "entries in common, %",
                "experts in common, %", "difference of the last streams, %",
            ),
            [_alone(name, one) for name, one in pairs.items()],
            "Each against plain, in runs of their own; entries and experts in common are means over the layers that"
            " choose.",
        )  # fmt: skip
    yield from _plots(pair)
    yield Table(
        "Deployed against plain, by site",
        ("layer", "kind", *map(_heading, AT_SITES), "entries in common", "experts in common"),
        [
            [n, kind.name, *(pair.share(site, n) for site in AT_SITES), *(pair.overlap(site, n) for site in CHOICES)]
            for n, kind in enumerate(kinds)
        ],
        "In %. Differences as in the plot. In common: of plain's choices, those that deployed made too, where there was"
        " a choice (more entries than are selected; layers that route by score).",
    )  # fmt: skip
    yield Table(
        "What each rounding costs by itself",
        ("layer", *COLUMNS),
        [
            [one.layer, *(100 * one.cost[name] if name in one.cost else None for name in COLUMNS)]
            for one in layers
        ],
        "RMS of the error of this rounding alone, in % of the RMS of what is rounded. The two of the index are E2M1 per"
        " 32 columns after the Hadamard transform, the rest E4M3. Empty: not rounded in this layer.",
    )  # fmt: skip
    yield Table(
        "Rounding ops against an independent cast",
        ("op", "values", "unlike", "blocks", "off grid"),
        [(op.what, op.values, op.unlike, op.blocks, op.off_grid) for op in ops],
        "Cases: amax on, just above and just below powers of two and the format's largest times them; every number of"
        " the format and every midpoint; tiny, huge, zeros, outliers, in fp32 and bf16; and what the prompt brought.",
    )
    if stored:
        yield Table(
            "Stored weights",
            (
                "form", "matrices", "blocks", "least scale", "largest scale",
                "blocks using the upper half of the range, %", "bytes 0x7f, 0xff", "bytes 0x80",
            ),
            [form.row() for form in stored],
            "A block quantised with the smallest power of two that fits has its largest number in the upper half of the"
            " format's range: at least 224 of 448 for E4M3, at least 3 of 6 for E2M1. Byte 0x80 is -0 here, and NaN in"
            " the FNUZ dialect of E4M3.",
        )  # fmt: skip


def _logits(pair: Pair) -> Table:
    kl, known, decided = torch.tensor(pair.kl), max(1, len(pair.kl) - 1), pair.decided()
    changed = [margin for margin, agree in zip(pair.margin, pair.agree, strict=True) if not agree]
    rows: list[tuple[str, float | None]] = [
        ("KL from plain to deployed, mean, nats", _mean(pair.kl)),
        ("... median", kl.median().item()),
        ("... 99 % of positions are below", kl.quantile(0.99).item()),
        ("... worst", max(pair.kl)),
        ("loss of the next token, plain, nats", pair.loss[1] / known),
        ("... deployed less plain", (pair.loss[0] - pair.loss[1]) / known),
        ("same likeliest token, % of positions", 100 * _mean(pair.agree)),
        ("decided positions, %", 100 * len(decided) / len(kl)),
        ("same likeliest token, % of decided positions", 100 * _mean(decided) if decided else None),
        ("largest margin at which the likeliest token changed", max(changed, default=0.0)),
    ]
    note = f"Margin: probability between plain's first two tokens; a position is decided from {DECIDED:g} on."
    return Table("At the logits", ("", "measured"), rows, note)


def _alone(name: str, pair: Pair) -> list[float | str | None]:
    layers = range(pair.config.num_hidden_layers)
    overlaps = ([pair.overlap(site, layer) for layer in layers] for site in CHOICES)
    known = [[share for share in shares if share is not None] for shares in overlaps]
    common = [_mean(shares) if shares else None for shares in known]
    last = pair.share(sites.STREAMS, layers[-1]) or 0
    return [name, _mean(pair.kl), max(pair.kl), 100 * _mean(pair.agree), *common, last]


def _plots(pair: Pair) -> Iterator[Plot]:
    bins = [part for part in torch.arange(len(pair.kl)).tensor_split(BINS) if len(part)]
    kl = torch.tensor(pair.kl).clamp(min=1e-12)
    series: dict[str, Sequence[tuple[float, float]]] = {
        "mean": [(part.float().mean().item(), kl[part].mean().item()) for part in bins],
        "worst": [(part.float().mean().item(), kl[part].max().item()) for part in bins],
    }
    note = f"In {len(bins)} stretches of the prompt."
    yield Plot("KL by position", "position", "nats", series, log_y=True, note=note)
    depth: dict[str, Sequence[tuple[float, float]]] = {
        name: [(layer, share) for layer in range(pair.config.num_hidden_layers) if (share := pair.share(site, layer))]
        for name, site in BY_DEPTH.items()
    }
    note = "RMS of deployed minus plain, in % of the RMS of plain, in two free runs of the same prompt."
    yield Plot("Difference by depth", "layer", "%", depth, note=note)


def _heading(site: Site) -> str:
    return site.name.replace("attention.", "").replace("indexer.", "index ").replace(".", " ")


NOT_CLAIMED = """\
That deployed numerics is as good as plain for other checkpoints: the bounds on KL and on the likeliest token were
frozen on the demo and are applied to it alone. The differences by depth are between two free runs: each layer's
includes all that the layers before it added. Quality on tasks is not measured here."""

FULL = Quantisation()
QUICK = Quantisation(tokens=192, rows=32, experts=2, alone=False)
