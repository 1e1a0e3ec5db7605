"""Probe `variants`: cache variants keep what they promise, take the bytes they say, and do so however tokens come.

Grouped-query layers are drawn, and held to attention and rotation in float64 that use nothing of `kernels`; on the
layers of the model, rows that are drawn go into the caches that it makes, and prompts through the whole of it.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.attention.cpu import KEYS, keys_per_tile
from fathom.kernels.formats import basis_fit, coded_rows, rows
from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import BasisRows, Rows, Slots
from fathom.kernels.ops import Ops
from fathom.kernels.shard import cpu as shard_cpu
from fathom.model.cache.entries import RowCache
from fathom.model.cache.gqa import KvShape, all_heads
from fathom.model.cache.layers import CsaCache, HcaCache
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import StateError
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.model.variants.banked_entries import BankedEntries
from fathom.model.variants.choice import Basis, Full, Shard
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Tokens, prefill, step
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.coded_entries import SIGNS
from fathom.model.variants.shard import ShardCache, ShardSettings
from fathom.probes.fault import Parts
from fathom.probes.finding import (
    JSON,
    Finding,
    Part,
    Plot,
    Report,
    Table,
    Text,
    at_least,
    at_most,
    broken,
    exactly,
    judged,
    measured,
)
from fathom.probes.probe import Probe, Progress, one_rank, room
from fathom.probes.shared.alive import peak_alive
from fathom.probes.subject import Subject

# --- bounds

# fp32 sums of a softmax, in whichever order: 1.8e-6 and 4.3e-6 of the largest output were seen in the published code
SAME = at_most(5e-6)
GROWTH = at_most(1.5)  # all tokens are drawn alike: an error that does not build up stays as it is
IDENTITY = at_most(1e-12)  # of the scores' RMS, in float64
SCORES = at_most(3e-6)  # the same in fp32: 1.8e-6 was seen where the identity was published
INT4 = at_most(0.02)  # best clip on a normal distribution 0.0129; the int8 basis adds less than 0.005
LENGTH = at_most(2.0**-10)  # float16 rounds a length by 2^-11 of itself
RECALL = at_least(0.99)  # the gate of the probe `recall`
# of a row of attention at `LOSSLESS` bits: half the squared error of a logit, 2e-5 where it is N(0, 1)
KL = at_most(1e-4)
SUM = at_most(2e-5)  # fp32 sums of coefficients in a basis against float64, over the RMS of the output
MASS = at_most(0.01)  # logarithms in fp32 of numbers below a thousand
# Least squared error of so many bits on N(0, 1): Max (1960) to 5 bits, the same recursion beyond.
OPTIMUM = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501, 5: 0.002505, 6: 6.44e-4, 8: 4.12e-5}
CODED = 1.1  # of the least error of so many bits: rows of 64 columns are not quite normal
ARTICLE = {4096: 57.98, 8192: 101.98, 16384: 189.98, 32768: 365.98}  # MiB of all layers; "58, 102, 190, 366 MB"
TWO_DECIMALS = at_most(0.005)  # MiB
PACKAGE = 1_771_392  # bytes of a layer of 8 heads of 128 at 256 + 64 + 64 slots in bf16, by coda-gqa-l's cache_bytes
# What attention holds at once, in tiles of keys. Grouped-query, over the middle: keys 1, values 1, coefficients 1/2 (64
# for 128 columns), cosines, sines and the complex numbers of them 1 (an angle serves both heads), codes of values as
# indices 1/4. Over the stream: keys 1, values 1, values of the tile before 1, codes as integers 1. A quarter is left to
# what is small: nibbles 1/16, logits 1/16, the basis 1/32, queries and sums.
GQA_TILES = 4.25
# On V4's layers beside a tile: centroids 1, the bytes of their codes as integers 3/4, pairs of codes 1/2 at 6 bits; and
# as much again as these last for the queries, sums and logits of the token, which no context changes.
V4_TILES = 3

# --- what is drawn

HEADS, GROUPS, WIDTH = 8, 2, 64  # query heads, KV heads, head_dim: a Llama layer in small
BASE = 10_000.0
DIRECTIONS = 16  # near which keys lie, as a model's do; a basis of so many holds most of them
QUERIES = 128  # rows of float64 logits at once
PROJECTED = 64  # random projections of an output, taken for logits
DIVERGENCE = f"KL of a softmax over {PROJECTED} random projections of the output, from the full cache's"
LOGITS_DIVERGENCE = "KL of the logits from the full cache's"
LAYOUTS = {"halves": False, "neighbours": True}  # of RoPE's pairs: whether they are interleaved
CUTS = (1, 4, 7, 128)  # tokens, or rows, that come at a time
SHARD = ShardSettings(rank=64)
FEW = SHARD.sinks + SHARD.window  # tokens that shard keeps as they are
CODA = (48, 16, 16)  # window, exact, summary: small, so that everything has been evicted to and from
SMALL = "coda:window=9,exact=4,summary=4"  # of which everything is evicted within a prompt of a few hundred tokens
LLAMA = (32, 8, 128)  # layers, KV heads, head_dim of Llama-3.1-8B
CPU = torch.device("cpu")
MIB = 2**20
CALL = 64  # tokens of a call, where it does not matter
WINDOW = 4  # rows of a ring
KINDS = 3  # of entries, all of one kind equal
INDEX_HEADS = 64  # of published indexers
BITS = {"entries": 6, "keys": 8}  # that `shard` promises: not read from what is held to it
LOSSLESS = 8  # bits at which attention to entries is to be as good as exact
MORE = 4  # times the entries of one tile, whose scratch is compared with that tile's
FITTED = 600  # entries to which a basis is fitted: none of those that are stored
SHARED = 100_000  # entries of a context that share a basis
DECAY = 1.03  # of deviations, from one direction of a basis to the next
SINKS = (-2.0, 6.0, 30.0)  # which take a little, most and nearly all of the mass: weights of entries sum to less
REFERENCE = "reference"  # the op set that decodes whole caches, on purpose
INTEGER = 8  # bytes of a number that the host keeps and a saved state makes a tensor of

NOT_CLAIMED = """\
That a variant is good enough for a model or a task: this page holds the code to its equations. What a variant costs in
answers is a question of trained models. That CoDA is what its authors published: the tests compare it with their
package, call by call. Two thousand steps are not a million: what does not build up in these may still in those. Tokens
of the grouped-query layer are drawn, and so are the entries that come one by one: there is no vocabulary behind them.
What is called their divergence is the KL of a softmax over 64 random projections of all heads' output, at unit scale:
it tells whether an error grows, and its size says nothing about text. CoDA's is that of keys without any structure that
banks could use. V4's text is read in calls of 64 tokens and not one by one; that what is stored does not depend on the
calls is one of the findings. Scratch is what tensor operations allocate, not what they use inside."""


@dataclass(frozen=True)
class Variants(Probe):
    """Hold coda and shard to their equations, on grouped-query layers and on the layers of the model."""

    name: ClassVar[str] = "variants"
    question: ClassVar[str] = "Do the cache variants keep what they promise to keep, and take the bytes they say?"
    reads: ClassVar[tuple[Site, ...]] = ()
    of_fathom: ClassVar[bool] = True
    in_variants: ClassVar[bool] = True
    background: ClassVar[str] = """\
A layer need not remember everything. **CoDA** keeps a window of what is newest, some entries that were like no other,
and means of the rest, in memory that no context fills. **Shard** keeps everything as codes: of the tokens of a prompt
keys in their own eigenbasis and values from a codebook; of later ones, and of V4's entries, a length and Lloyd-Max
codes of the row after a Hadamard rotation, or of its coefficients in a basis that was fitted beforehand. Both were
published for layers with grouped queries (GQA), and are here for those and, in another form, for the layers of V4.

Lossy by design is where mistakes hide. An answer that is a little off is what one expects, so it is not asked whether
it is the loss that was paid for or a fault: a mean left out of the scores, a rotation by the wrong sign, codes that
depend on how a prompt was cut into calls, a codebook of 8 bits that is as good as one of 5, an entry that is in no bank
and one that is in two, a mean of a hundred entries that weighs as much as one. The memory that such a cache is there to
save is easily spent again, on keys that are decoded all at once or buffers that are not counted.

So each promise is held to something outside of the code: to full attention in float64 while nothing is evicted; to
rotations as products of complex numbers; to Max's table of quantisers; to the figures in the published articles; to the
memory that a run has written to; to itself, cut otherwise or put back from a save, bit by bit."""
    noticed: ClassVar[str] = """\
**A mean of KL says little about a document.** A few tokens make up most of Shard's divergence on a document of the
demo: they stand where a layer selected other entries than with the full cache, and the tokens after them are as close
as ever. A first form of this probe judged how much that mean grew through a document, and passed or failed by one
token; by the median it failed too, for text is not alike in all its parts. So what is judged now is drawn, and alike
throughout; of the document, the numbers are told.

**Eight bits exchange entries all the same.** The recall of a selection is near one and not one even where keys are
normal.

**Two of the faults are the published designs.** CoDA as published lets a mean weigh as much as one token, and offers
each token to both banks; on V4's layers either is a fault here.

**A window that evicts one entry too early is hard to see.** The first slots of either bank hold what they are given as
it is, so all outputs stay the same until these are full. What shows it is the index: the banks are attended to whatever
the indexer says, and an entry that is there too early changes the selection."""

    tokens: int = 275  # of a prompt: two entries of 128, and some that come after the last entry of four
    chunks: tuple[int, ...] = (3, 68, 275)  # tokens of a call; single tokens come in any case
    tail: int = 24  # tokens that come one by one
    length: int = 96  # of a sequence that coda's window holds, grouped-query
    published: tuple[int, ...] = (512, 1024, 2048)  # the same, of the lengths that CoDA's page tells
    draws: int = 3  # of each of these
    cuts: tuple[int, ...] = CUTS  # rows that come at a time
    entries: int = 300  # that are drawn
    steps: int = 2048  # decoded one by one, grouped-query
    read: int = 2048  # tokens of a document read with each variant; 0: none
    prompt: int = 600  # that shard compresses
    prompts: tuple[int, ...] = (108, 0)  # after which shard is saved; the first one, cut otherwise too
    keys: int = 2048  # index keys, of which a quarter is selected, and entries over which attention is spread
    widths: tuple[int, ...] = (4, 6)  # bits of index keys, for comparison
    contexts: tuple[int, int] = (8192, 32768)  # tokens of which grouped-query scratch is compared: many tiles in both

    def needs(self, subject: Subject) -> str | None:
        """Several ranks hold the same caches."""
        config = subject.config
        entries = max(config.compress_ratios) * max(self.entries, self.steps, self.keys)
        why = one_rank(subject, "every rank holds the caches whole, and alike")
        return why or room(subject, max(self._length(config), self.read, entries))

    def vacuous(self, subject: Subject) -> str | None:
        """Too little to evict, to cut or to compare."""
        del subject
        if len(self.cuts) < 2:
            return "one way to cut has nothing to be compared with"
        if self.entries < 64 or self.steps < 512 or self.keys < 1024:
            return "too few entries, steps or keys to evict, to drift or to choose from"
        return None

    def _length(self, config: ModelConfig) -> int:
        """Tokens of the prompt: an entry of the longest block is finished, and passed before the tail."""
        return max(self.tokens, max(config.compress_ratios) + self.tail + 5)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Grouped-query layers first, then those of the model."""
        parts, seed = subject.parts, subject.seed
        progress(0.0, "grouped-query layers")
        findings = [
            *gqa_exact(parts, self.length, seed),
            *gqa_exact_at(parts, self.published, self.draws, seed),
            *identity(parts, seed),
            *rebuilt(parts, seed, self.prompt),
            *codebooks(parts),
            *gqa_cut_alike(parts, self.cuts, self.prompts[0], seed),
            *gqa_restored(parts, self.prompts, seed),
            *published(parts),
            *gqa_counted(parts, seed),
            *gqa_scratch(parts, self.contexts, seed),
        ]
        progress(0.2, f"{self.steps} steps of drawn tokens")
        drawn = list(gqa_drifts(parts, self.steps, seed, coda=self.read > 0))
        findings.append(drawn[0].grown(f"GQA, shard, {self.steps} steps"))
        findings += [one.told("GQA", f"{self.steps} steps") for one in drawn]
        left, read = _left_out(subject.config), list[Drift]()
        if any(kind is not LayerKind.SWA for kind in subject.config.layer_kinds):
            progress(0.5, "layers of the model, coda")
            findings += self._coda(subject)
            progress(0.7, "layers of the model, shard")
            if rotated := not left:
                findings += self._shard(subject, left)
            progress(0.8, "a document with each variant")
            read = self._read(subject, shard=rotated) if self.read else []
            findings += [one.told("V4", f"{self.read} tokens") for one in read]
        return Report(_summary(findings, drawn[0]), tuple(findings), _parts(findings, drawn, read, left), NOT_CLAIMED)

    def _coda(self, subject: Subject) -> Iterator[Finding]:
        length, count, seed = self._length(subject.config), self.entries, subject.seed
        full, whole = _model(subject), _model(subject, *kept_whole(subject.config, length))
        small = _model(subject, f"all={SMALL}")
        ids = torch.tensor(subject.tokens(length), device=full.device)
        yield exact(full, whole, ids, self.chunks, self.tail)
        yield from rows_kept(small, "coda", self.cuts, count, seed)
        yield from masses(small, count, seed)
        yield from means(small, count, seed)
        yield restored(small, "coda", ids, self.tail)

    def _shard(self, subject: Subject, left: list[str]) -> Iterator[Finding]:
        model, config, count, seed = _model(subject, "all=shard"), subject.config, self.entries, subject.seed
        ids = torch.tensor(subject.tokens(self._length(config)), device=model.device)
        yield from rows_kept(model, "shard", self.cuts, count, seed)
        yield from attentions(_model(subject, f"all=shard:bits={LOSSLESS}"), self.keys, seed)
        if (why := without_basis(config)) is None:
            yield from in_a_basis(model, count, self.cuts, seed)
        else:
            left.append(why)
        yield from drifts(model, self.steps, seed)
        yield from recalls(model, self.keys, self.keys // 4, self.widths, seed)
        yield restored(model, "shard", ids, self.tail)
        if subject.ops.name != REFERENCE:
            heads, width = config.num_attention_heads, config.head_dim
            yield from scratch(model.arithmetic.ops, model.device, heads, width, BITS["entries"])

    def _read(self, subject: Subject, *, shard: bool) -> list["Drift"]:
        """Read a document with each variant: divergence of each token's logits from the full cache's."""
        rules = ({"shard": "all=shard"} if shard else {}) | {"coda, 9+4+4": f"all={SMALL}"}
        ids = torch.tensor(subject.tokens(self.read), device=subject.model.device)
        sizes = [len(part) for part in ids.split(CALL)]
        whole = logits(_model(subject), ids, sizes).double().log_softmax(-1)
        found = []
        for name, rule in rules.items():
            other = logits(_model(subject, rule), ids, sizes).double().log_softmax(-1)
            found.append(Drift(name, (whole.exp() * (whole - other)).sum(-1).cpu(), LOGITS_DIVERGENCE))
        return found


def _model(subject: Subject, *rules: str) -> Transformer:
    """The model with these rules of `--kv`, in numerics that round nothing but what a variant rounds."""
    return subject.load(subject.with_options(numerics="plain", dtype="fp32", kv=rules)).model


def _left_out(config: ModelConfig) -> list[str]:
    """What the model's layers do not have."""
    if all(kind is LayerKind.SWA for kind in config.layer_kinds):
        return ["The model has window layers alone: variants change nothing in it."]
    widths = {"head_dim": config.head_dim}
    if LayerKind.CSA in config.layer_kinds:
        widths["index_head_dim"] = config.index_head_dim
    odd = [f"{name} is {width}" for name, width in widths.items() if width & (width - 1) or width < 8]
    return [f"Shard on the model's layers: it rotates rows of a power of two, and {' and '.join(odd)}."] if odd else []


# --- a grouped-query layer, drawn, and what its attention and rotation are in float64


class Drawn(NamedTuple):
    """Tokens at positions 0 .. n - 1, float32; queries and keys rotated."""

    q: Tensor  # [n, HEADS, WIDTH]
    k: Tensor  # [n, GROUPS, WIDTH]
    v: Tensor  # [n, GROUPS, WIDTH]

    def rows(self, low: int, high: int) -> "Drawn":
        """Some of the tokens."""
        return Drawn(*(part[low:high] for part in self))


def frequencies() -> Tensor:
    """Radians per position of each pair, [WIDTH / 2] float32."""
    return BASE ** -(torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH)


def rotated(x: Tensor, angle: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the pairs of `x` [n, h, d] by `angle` [n, d / 2], as complex numbers: [n, h, d] float64."""
    pairs = x.double().unflatten(-1, (-1, 2)) if interleaved else x.double().unflatten(-1, (2, -1)).mT
    angle = angle.double()[:, None]
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(angle.cos(), angle.sin()))
    return out.flatten(-2) if interleaved else out.mT.flatten(-2)


def draw(n: int, seed: int, *, interleaved: bool = False) -> Drawn:
    """Draw n tokens whose keys have a mean and lie near some directions."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(DIRECTIONS, GROUPS * WIDTH, generator=g) / DIRECTIONS**0.5
    plain = torch.randn(n, DIRECTIONS, generator=g) @ mix + 0.2 * torch.randn(n, GROUPS * WIDTH, generator=g)
    k = (plain + 0.5 * torch.randn(GROUPS * WIDTH, generator=g)).unflatten(1, (GROUPS, WIDTH))
    q = torch.randn(n, HEADS, WIDTH, generator=g)
    angle = torch.arange(n, dtype=torch.float32)[:, None] * frequencies()  # rounded to fp32, as models round it
    v = torch.randn(n, GROUPS, WIDTH, generator=g)
    q, k = (rotated(x, angle, interleaved=interleaved).float() for x in (q, k))
    return Drawn(q, k, v)


def attended(drawn: Drawn, window: int | None = None) -> Tensor:
    """Causal attention of tokens to all before, or to the last `window`: [n, HEADS, WIDTH] float64."""
    keys, values = (x.double().repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for x in (drawn.k, drawn.v))
    positions, out = torch.arange(len(drawn.q)), []
    for part in positions.split(QUERIES):
        scores = drawn.q[part].double().transpose(0, 1) @ keys.mT * WIDTH**-0.5  # [h, t, n]
        far = positions - part[:, None]
        hidden = far > 0 if window is None else (far > 0) | (far <= -window)
        out.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


def scores_of(query: Tensor, keys: Tensor) -> Tensor:
    """Scores of a query [HEADS, WIDTH] with keys [n, GROUPS, WIDTH]: [HEADS, n] float64."""
    return torch.einsum("hd,nhd->hn", query.double(), keys.double().repeat_interleave(HEADS // GROUPS, 1))


def divergence(whole: Tensor, found: Tensor) -> Tensor:
    """KL of what random projections of `found` [n, h, d] say from what those of `whole` say, as logits: [n] float64."""
    g = torch.Generator().manual_seed(0)
    project = torch.randn(whole[0].numel(), PROJECTED, generator=g, dtype=torch.float64)
    project /= whole.double().square().mean().sqrt() * whole[0].numel() ** 0.5  # logits of unit scale
    wanted, other = ((x.double().flatten(1) @ project).log_softmax(-1) for x in (whole, found))
    return (wanted.exp() * (wanted - other)).sum(-1)


def off(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number wanted."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


def off_rms(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the RMS of what is wanted."""
    return float((found.double() - wanted).abs().max() / wanted.square().mean().sqrt())


def coda_cache(parts: Parts, window: int, exact: int = 0, summary: int = 0) -> CodaCache:
    """An empty cache of the corrected rules, in fp32."""
    settings = CodaSettings(window=window, exact=exact, summary=summary, rope="half")
    return parts.coda(settings, all_heads(GROUPS), WIDTH, torch.full((GROUPS,), -3.0), torch.float32, CPU)


def shard_cache(
    parts: Parts, prompt: int, context: int, settings: ShardSettings = SHARD, *, interleaved: bool = False
) -> ShardCache:
    """An empty cache in fp32."""
    shape = KvShape(all_heads(GROUPS), WIDTH, frequencies(), interleaved)
    return parts.shard(shape, settings, prompt, context, torch.float32, CPU)


def steps(cache: CodaCache, drawn: Drawn) -> Tensor:
    """Outputs of the tokens, one step each."""
    rows = (slice(i, i + 1) for i in range(len(drawn.q)))
    return torch.cat([step(cache, Tokens(drawn.q[i], drawn.k[i], drawn.v[i], None, None), None) for i in rows])


def calls(cache: ShardCache, drawn: Drawn, sizes: int, stop: int | None = None) -> Tensor:
    """Outputs of the tokens that the cache does not have, in calls of `sizes`."""
    parts = torch.arange(cache.count, len(drawn.q) if stop is None else stop).split(sizes)
    return torch.cat([cache.attend(drawn.q[part], drawn.k[part], drawn.v[part]) for part in parts])


# --- grouped-query layers: exact where they say so, alike however tokens come


def gqa_exact(parts: Parts, length: int, seed: int) -> Iterator[Finding]:
    """As long as nothing is evicted or compressed, both are the full cache."""
    every, window, largest = draw(max(length, FEW), seed), length // 3, "the largest output"
    drawn, short = every.rows(0, length), every.rows(0, FEW)
    given, wanted = Tokens(drawn.q, drawn.k, drawn.v, None, None), attended(drawn)
    ways = {
        f"blocks of {n}": prefill(coda_cache(parts, length, 8, 8), given, None, n) for n in (1, 3, length, 2 * length)
    }
    ways["steps"] = steps(coda_cache(parts, length, 8, 8), drawn)
    what = f"GQA, coda, window {length} and {length} tokens: distance from the full cache"
    yield _worst(what, {name: off(out, wanted) for name, out in ways.items()}, largest)
    what = f"GQA, coda, window {window} without banks: distance from attention to {window} tokens"
    yield _worst(what, {"steps": off(steps(coda_cache(parts, window), drawn), attended(drawn, window))}, largest)
    wanted = attended(short)
    prompts = {f"prompt of {n}": off(calls(shard_cache(parts, n, FEW), short, 7), wanted) for n in (0, FEW // 2, FEW)}
    yield _worst(f"GQA, shard, {FEW} tokens, no more than sinks and window: distance", prompts, largest)


def gqa_exact_at(parts: Parts, lengths: Sequence[int], draws: int, seed: int) -> Iterator[Finding]:
    """Coda as long as nothing is evicted, of several draws: a largest error is one number of many, and is drawn too."""
    for length in lengths:
        distances: dict[str, float] = {}
        for other in range(seed, seed + draws):
            drawn = draw(length, other)
            given, wanted = Tokens(drawn.q, drawn.k, drawn.v, None, None), attended(drawn)
            for n in (CALL, 4 * CALL, length):
                out = prefill(coda_cache(parts, length, 8, 8), given, None, n)
                distances[f"draw {other}, blocks of {n}"] = off(out, wanted)
        what = f"GQA, coda, {draws} draws of {length} tokens in a window of as many: distance from the full cache"
        found = _worst(what, distances, "the largest output")
        least = min(distances.values())
        yield replace(found, evidence=found.evidence | {"least": least})


def _worst(what: str, distances: Mapping[str, float], of: str) -> Finding:
    worst = max(distances, key=lambda name: distances[name] if distances[name] >= 0 else math.inf)  # NaN is worst
    return judged(what, distances[worst], SAME, of=of, worst=worst)


def gqa_cut_alike(parts: Parts, cuts: Sequence[int], prompt: int, seed: int) -> Iterator[Finding]:
    """What is stored does not depend on how tokens are grouped into calls."""
    length = max(prompt, FEW) + max(cuts)
    drawn = draw(length, seed)  # of very different lengths, so that a norm that tokens share would show
    size = torch.logspace(-1, 1, length)[torch.randperm(length, generator=torch.Generator().manual_seed(seed))]
    drawn = drawn._replace(k=drawn.k * size[:, None, None], v=drawn.v * size.flip(0)[:, None, None])
    kept: dict[int, dict[str, Tensor]] = {}
    for cut in cuts:
        cache = shard_cache(parts, prompt, length)
        if prompt:
            calls(cache, drawn, cut, prompt)
        calls(cache, drawn, cut)
        kept[cut] = {name: part.clone() for name, part in cache.tensors(length).items()}
    yield differing(f"GQA, shard, calls of {', '.join(map(str, cuts))}: stored tensors that differ", kept)
    stop = FEW + SHARD.window
    alone = shard_cache(parts, 0, stop)
    calls(alone, drawn, stop, stop)
    norms = alone.tensors(stop)["stream.values.norm"].float()
    true = drawn.v[SHARD.sinks : SHARD.sinks + len(norms) // GROUPS].norm(dim=-1).flatten()
    largest = float(((norms - true).abs() / true).max())
    yield judged("GQA, shard, length stored with a row, off the row's own, largest", largest, LENGTH)


def differing(what: str, kept: Mapping[int, Mapping[str, Tensor]], layer: int | None = None) -> Finding:
    """Count the tensors that differ from those of the first cut."""
    first, *others = kept.values()
    names = [
        f"{name}, calls of {cut}"
        for cut, other in zip(list(kept)[1:], others, strict=True)
        for name in first
        if not torch.equal(first[name], other[name])
    ]
    evidence: dict[str, JSON] = {"first": names[0]} if names else {}
    return judged(what, len(names), exactly(0), layer=layer, tensors=len(first) * len(others), **evidence)


def gqa_restored(parts: Parts, prompts: Sequence[int], seed: int, more: int = 24) -> Iterator[Finding]:
    """A restored cache continues bit for bit; shard's is saved in the middle of a prompt, at its end, and later."""
    cases = [("coda", CODA[0] - 10, 0), ("coda", 3 * CODA[0] + 17, 0)]
    cases += [("shard", p, prompt) for prompt in prompts for p in (prompt - 30, prompt, prompt + FEW + 17) if p > 0]
    drawn = draw(max(position for _, position, _ in cases) + more, seed)
    for name, position, prompt in cases:

        def new(name: str = name, prompt: int = prompt) -> CodaCache | ShardCache:
            return coda_cache(parts, *CODA) if name == "coda" else shard_cache(parts, prompt, prompt + 2 * FEW)

        def run(cache: CodaCache | ShardCache, low: int = position, high: int = position + more) -> Tensor:
            part = drawn.rows(low, high)
            return steps(cache, part) if isinstance(cache, CodaCache) else calls(cache, drawn, 5, high)

        saved, other = new(), new()
        run(saved, 0, position)
        yield put_back(f"GQA, {name}", position, [(saved, other)], partial(run, saved), partial(run, other))


def put_back(
    of: str, position: int, caches: Sequence[tuple[Any, Any]], run: Callable[[], Tensor], other: Callable[[], Tensor]
) -> Finding:
    """Caches that are saved, and put back into others: rows [n, ...] in which the two go on otherwise."""
    what = f"{of}, saved at {position} and put back: rows that differ"
    try:
        for saved, empty in caches:
            empty.restore(position, {part: tensor.clone() for part, tensor in saved.tensors(position).items()})
    except StateError as error:  # what a cache gave, a cache does not take
        return broken(what, str(error))
    wrong = (run() != other()).flatten(1).any(1)
    return judged(what, int(wrong.sum()), exactly(0), of=len(wrong))


@dataclass(frozen=True)
class Drift:
    """Divergence from the full cache as a sequence goes on."""

    name: str
    of_tokens: Tensor  # [n] float64
    what: str = DIVERGENCE

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Positions, and the mean of the tokens since the last."""
        size = max(1, len(self.of_tokens) // 32)
        return [(float((i + 1) * size), float(part.mean())) for i, part in enumerate(self.of_tokens.split(size))]

    @property
    def growth(self) -> float:
        """Median of the last quarter's tokens over that of the second's, whose first fill the window."""
        quarters = self.of_tokens.chunk(4)
        return float(quarters[-1].median() / quarters[1].median())

    def grown(self, of: str, layer: int | None = None) -> Finding:
        """An error that builds up shows at the end; of tokens that are drawn."""
        return judged(f"{of}: {self.what}, median of the last quarter over that of the second", self.growth, GROWTH,
                      layer=layer, largest=float(self.of_tokens.max()))  # fmt: skip

    def told(self, of: str, tokens: str) -> Finding:
        """A number to know."""
        what = f"{of}, {self.name}, {tokens}: {self.what}, mean of the last quarter"
        return measured(what, float(self.of_tokens.chunk(4)[-1].mean()), largest=float(self.of_tokens.max()))


def gqa_drifts(parts: Parts, count: int, seed: int, *, coda: bool) -> Iterator[Drift]:
    """Decode `count` tokens with shard, and perhaps with coda, one by one and from nothing."""
    drawn = draw(count, seed)
    whole = attended(drawn)
    yield Drift("shard, 8 bits", divergence(whole, calls(shard_cache(parts, 0, count), drawn, 64)))
    if coda:
        yield Drift("coda, {}+{}+{}".format(*CODA), divergence(whole, steps(coda_cache(parts, *CODA), drawn)))


# --- what shard's codes rest on


def identity(parts: Parts, seed: int) -> Iterator[Finding]:
    """Scores through the distance of positions are those of rotated keys and queries, in float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n, rank, at, first = 400, 48, 977, 9  # no key stands where the query does
    q, c, basis, mean = normal(HEADS, WIDTH), normal(n, rank), normal(GROUPS * WIDTH, rank), 3 * normal(GROUPS * WIDTH)
    freqs, positions = frequencies().double(), torch.arange(first, first + n, dtype=torch.float64)
    for layout, interleaved in LAYOUTS.items():
        plain = (c @ basis.mT + mean).unflatten(1, (GROUPS, WIDTH))
        keys = rotated(plain, positions[:, None] * freqs, interleaved=interleaved)
        wanted = scores_of(rotated(q[None], torch.tensor([[at]]) * freqs, interleaved=interleaved)[0], keys)
        angle = (positions - at)[:, None] * freqs
        found = parts.relative_scores(q, c, basis, mean, angle.cos(), angle.sin(), interleaved=interleaved)
        what = f"GQA, shard, relative identity in float64, pairs of {layout}: largest error over the scores' RMS"
        yield judged(what, off_rms(found, wanted), IDENTITY, rms=float(wanted.square().mean().sqrt()))


def rebuilt(parts: Parts, seed: int, prompt: int) -> Iterator[Finding]:
    """Keys that the cache rebuilds are those of its codes, and those that it was given, as far as int4 holds them."""
    settings = ShardSettings(rank=GROUPS * WIDTH)  # all components: what is lost is lost to the codes
    for layout, interleaved in LAYOUTS.items():
        drawn = draw(prompt, seed, interleaved=interleaved)
        cache = shard_cache(parts, prompt, prompt, settings, interleaved=interleaved)
        calls(cache, drawn, prompt)
        assert cache.middle is not None, "a prompt beyond sinks and window has a middle"
        n = prompt - cache.exact
        found = shard_cpu.middle_keys(cache.middle, 0, n).double()
        true, query = drawn.k[settings.sinks :][:n].double(), drawn.q[-1]
        error = off_rms(scores_of(query, found), scores_of(query, _decoded(cache, interleaved=interleaved)))
        what = f"GQA, shard, scores of rebuilt keys, pairs of {layout}: largest error over their RMS"
        yield judged(what, error, SCORES, tokens=n)
        lost = float((found - true).square().sum() / (true - true.mean(0)).square().sum())
        what = f"GQA, shard, rebuilt keys, all components, pairs of {layout}: share of their variance that is lost"
        yield judged(what, lost, INT4, tokens=n)


def _decoded(cache: ShardCache, *, interleaved: bool) -> Tensor:
    """Keys of the middle as the stored codes say, rotated: [n, GROUPS, WIDTH] float64. The layer's layout, not its."""
    assert cache.middle is not None, "see `rebuilt`"
    keys = cache.middle.keys
    low, high = (keys.codes & 15).double() - 8, (keys.codes >> 4).double() - 8
    c = torch.stack((low, high), -1).flatten(1) * keys.scale.double()
    plain = c @ (keys.basis.double() * keys.basis_scale.double()).mT + keys.mean.double()
    first = cache.settings.sinks
    positions = torch.arange(first, first + len(plain), dtype=torch.float32)
    return rotated(plain.unflatten(1, (GROUPS, WIDTH)), positions[:, None] * frequencies(), interleaved=interleaved)


def codebooks(parts: Parts) -> Iterator[Finding]:
    """Every codebook is the best there is, to 1 %."""
    for bits, optimum in OPTIMUM.items():
        error = distortion(parts.codebook(bits, CPU).double())
        what = f"codebook of {bits} bits: squared error on N(0, 1), off the optimum, relative"
        yield judged(what, abs(error / optimum - 1), at_most(0.01), bits=bits, error=error, optimum=optimum)


def distortion(centroids: Tensor) -> float:
    """``sum_i int (x - c_i)^2 phi(x) dx`` over the cells between midpoints, by the moments of N(0, 1), in float64."""
    inner, gone = (centroids[1:] + centroids[:-1]) / 2, centroids.new_tensor([math.inf])
    edges = torch.cat((-gone, inner, gone))
    density = (-edges.square() / 2).exp() / math.sqrt(2 * math.pi)
    mass, first = torch.special.ndtr(edges).diff(), -density.diff()
    second = mass - (edges * density).nan_to_num(nan=0.0).diff()
    return float((second - 2 * centroids * first + centroids.square() * mass).sum())


# --- bytes held, and scratch


def published(parts: Parts) -> Iterator[Finding]:
    """The published figures, from tensors; those of shard on the meta device, where nothing is allocated."""
    layers, heads, d = LLAMA
    shape = KvShape(all_heads(heads), d, torch.zeros(d // 2, device="meta"), interleaved=False)
    for tokens, figure in ARTICLE.items():
        cache = parts.shard(shape, ShardSettings(), tokens, tokens, torch.bfloat16, torch.device("meta"))
        held, full = layers * cache.nbytes() / MIB, layers * 2 * tokens * heads * d * 2 / MIB
        what = f"GQA, shard, Llama-3.1-8B, {tokens} tokens: held, off the article's {figure}"
        yield judged(what, abs(held - figure), TWO_DECIMALS, "MiB", tokens=tokens, held=held, full_bf16=full)
    settings = CodaSettings.published(window=256, exact=64, summary=64, rope="half")
    formula = 2 * heads * 384 * d * 2 + 4 * heads * 128 + 4 * 256 + 384 + 8 * 64
    for name, one, wanted in (
        ("as published, off the package's", settings, PACKAGE),
        ("with inverse norms, off the formula's", replace(settings, inverse_norms=True, lf_layout="pairs"), formula),
    ):
        coda = parts.coda(one, all_heads(heads), d, torch.zeros(heads), torch.bfloat16, CPU)
        what = f"GQA, coda, 256 + 64 + 64 slots of 8 heads of 128 {name} {wanted}"
        yield judged(what, coda.nbytes() - wanted, exactly(0), "B")


def gqa_counted(parts: Parts, seed: int) -> Iterator[Finding]:
    """`nbytes` is what was written to, once enough has come to fill every buffer."""
    drawn, context = draw(2 * sum(CODA), seed), 108
    coda, shard = coda_cache(parts, *CODA), shard_cache(parts, 100, context)
    of = "bytes told, off those of the tensors that a run has written to"
    yield counted(f"GQA, coda: {of}", coda, lambda: steps(coda, drawn))
    yield counted(f"GQA, shard: {of}", shard, lambda: calls(shard, drawn, 64, context))


def counted(
    what: str,
    part: CodaCache | ShardCache | RowCache[Rows | Slots],
    run: Callable[[], object],
    layer: int | None = None,
) -> Finding:
    """Bytes that a cache tells, off the memory of every tensor that a run of it has written to.

    Constants (signs, frequencies, rates) do not change and are not counted; every buffer does, once enough has come.
    """
    before = snapshot(part)
    run()
    held = sum(len(content) for place, content in snapshot(part).items() if before.get(place) != content)
    return judged(what, part.nbytes() - held, exactly(0), "B", layer=layer, held=held)


Snapshot = dict[int | str, bytes]  # by place in memory, or by the name of a list


def snapshot(part: object) -> Snapshot:
    """The bytes of every tensor, and every list of integers, that is reached from `part`."""
    return dict(_reached(part, "", set()))


def _reached(part: object, name: str, seen: set[int]) -> Iterator[tuple[int | str, bytes]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        if part.numel():
            flat = torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
            yield part.untyped_storage().data_ptr(), flat.cpu().numpy().tobytes()
    elif isinstance(part, list) and all(isinstance(item, int) for item in part):
        yield name, b"".join(item.to_bytes(INTEGER, "little", signed=True) for item in part)
    elif isinstance(part, list | tuple):
        for place, item in enumerate(part):
            yield from _reached(item, f"{name}.{place}", seen)
    elif hasattr(part, "__dict__") and type(part).__module__.startswith("fathom."):
        for key, item in vars(part).items():
            yield from _reached(item, f"{name}.{key}", seen)


def gqa_scratch(parts: Parts, contexts: tuple[int, int], seed: int) -> Iterator[Finding]:
    """Attend from one token to noise in shard's form: scratch depends on how much there is, not on what."""
    assert shard_cpu.KEYS % (GROUPS * WIDTH) == 0, "a tile of whole tokens"
    token = draw(1, seed)

    def attend(segment: str, n: int) -> Callable[[], object]:
        g = torch.Generator().manual_seed(seed)
        cache = shard_cache(parts, n if segment == "middle" else 0, n + 4)
        cache.restore(n, {name: 9 * torch.rand(shape, generator=g) for name, shape in cache.shapes(n).items()})
        return partial(cache.attend, *token)

    for segment in ("middle", "stream"):
        of = f"GQA, shard, scratch of a decoded token over the {segment}"
        yield from one_tile(of, "tokens", contexts, partial(attend, segment), shard_cpu.KEYS, GQA_TILES)


def scratch(ops: Ops, device: torch.device, heads: int, width: int, bits: int) -> Iterator[Finding]:
    """Attending to codes of V4's entries takes one tile, however many entries there are."""
    g = torch.Generator().manual_seed(0)
    q, ring, sink = (
        x.to(device)
        for x in (torch.randn(1, heads, width, generator=g), torch.randn(4, width, generator=g), torch.zeros(heads))
    )

    def attend(count: int) -> Callable[[], object]:
        data = coded_rows.allocate(count, width, bits, device, SIGNS)
        data.codes.copy_(torch.randint(256, data.codes.shape, generator=g))
        data.norm.fill_(1.0)
        return lambda: ops.attend(q, ring, count - 1, 4, data, 1, None, sink)

    first = keys_per_tile(1, heads, width)
    of = "V4, shard, scratch of a decoded token over entries"
    yield from one_tile(of, "entries", (first, MORE * first), attend, KEYS, V4_TILES)


def one_tile(
    of: str, unit: str, sizes: tuple[int, int], attend: Callable[[int], Callable[[], object]], numbers: int, most: float
) -> Iterator[Finding]:
    """What attending to so many allocates: no more for many than for few, and no more than so many tiles of keys."""
    peaks = []
    for count in sizes:
        run = attend(count)
        run()  # tables that stay
        peaks.append(peak_alive(run))
    few, many = sizes
    what = f"{of}, {many} {unit} against {few}: growth"
    yield judged(what, peaks[1] - peaks[0], exactly(0), "B", sizes=list(sizes), peaks=peaks)
    what = f"{of}, tiles of keys of {numbers} numbers"
    yield judged(what, peaks[1] / (4 * numbers), at_most(most), tile_bytes=4 * numbers)


# --- rows of V4's layers: what is drawn goes into the caches that a model makes


def caches(state: State) -> Iterator[tuple[int, HcaCache]]:
    """The first cache of each kind with entries, and its layer: given the same rows, another does the same."""
    seen = set()
    for layer, cache in enumerate(state.layers):
        if isinstance(cache, HcaCache) and type(cache) not in seen:
            seen.add(type(cache))
            yield layer, cache


def _parts_of(cache: HcaCache) -> dict[str, RowCache[Rows | Slots]]:
    return {"entries": cache.entries} | ({"keys": cache.keys} if isinstance(cache, CsaCache) else {})


def new_state(model: Transformer, count: int) -> State:
    """A state that takes `count` entries in every layer, and as many at a time as any test appends."""
    ratio = max(model.config.compress_ratios)
    return model.new_state(ratio * count, ratio * min(count, max(CUTS)))


def clustered(count: int, width: int, seed: int) -> Tensor:
    """Rows around a few directions, so that some are alike and some are not, of very different lengths."""
    g = torch.Generator().manual_seed(seed)
    around = torch.randn(6, width, generator=g)[torch.randint(6, (count,), generator=g)]
    lengths = torch.logspace(-1, 1, count)[torch.randperm(count, generator=g)]
    return (around + 0.4 * torch.randn(count, width, generator=g)) * lengths[:, None]


def fed(part: RowCache[Rows | Slots], given: Tensor, cut: int) -> None:
    """Append the rows, `cut` at a time."""
    for appended in given.split(cut):
        part.append(appended)
        part.evict()


def rows_kept(
    model: Transformer,
    name: str,
    cuts: Sequence[int],
    count: int,
    seed: int,
    make: Callable[[Transformer, int], State] = new_state,
    in_a_basis: Tensor | None = None,
) -> Iterator[Finding]:
    """What is stored does not depend on how many rows come at a time, takes the bytes it says, and loses what it must.

    What codes of a width must lose is a share of each row's own length. Rows are drawn, but entries `in_a_basis`
    [count, head_dim]: what these lose and take is of the basis.
    """
    states = {cut: make(model, count) for cut in cuts}
    for layer, cache in caches(states[cuts[0]]):
        kept: dict[int, dict[str, Tensor]] = {cut: {} for cut in cuts}
        for place in _parts_of(cache):
            for cut, state in states.items():
                part = _parts_of(dict(caches(state))[layer])[place]
                given = clustered(count, int(rows.width(part.data)), seed)
                given = given if in_a_basis is None or place == "keys" else in_a_basis
                what = f"V4, {name}, {place}: bytes told, off those of the tensors that rows were written to"
                of_bytes = counted(what, part, partial(fed, part, given.to(model.device), cut), layer)
                saved = part.tensors(count * cache.frontier.ratio)
                kept[cut] |= {f"{place}.{plane}": tensor for plane, tensor in saved.items()}
            if in_a_basis is None:
                yield of_bytes
            if name == "shard":
                data, bits = part.view(), BITS[place]
                assert isinstance(data, coded_rows.CodedRows), f"{place} of layer {layer}: {type(data).__name__}"
                lost = (rows.read(data, 0, count).cpu() - given).square().sum(1) / given.square().sum(1)
                what = f"V4, shard, {place} of {bits} bits: squared error of a row over its squared length, mean"
                yield judged(what, float(lost.mean()), at_most(CODED * OPTIMUM[bits]), layer=layer, held=data.bits)
        what = f"V4, {name}, rows in turns of {', '.join(map(str, cuts))}: stored tensors that differ"
        yield differing(what, kept, layer)


def attention(q: Tensor, keys: Tensor, sink: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention with a sink in float64: q [t, h, d] to keys [n, d], of which [t, n] are hidden.

    Returns the output [t, h, d], and log-weights [t, h, 1 + n], of the sink [h] first.
    """
    scores = q.double() @ keys.double().mT * q.shape[-1] ** -0.5
    scores = scores if hidden is None else scores.masked_fill(hidden[:, None], -torch.inf)
    weights = torch.cat((sink.double()[:, None].expand(*q.shape[:2], 1), scores), -1).log_softmax(-1)
    return weights[..., 1:].exp() @ keys.double(), weights


def attentions(model: Transformer, count: int, seed: int) -> Iterator[Finding]:
    """Attention, the sink included, is spread over entries of `LOSSLESS` bits as over those that were coded."""
    g, sink = torch.Generator().manual_seed(seed), torch.linspace(-2, 2, INDEX_HEADS)
    for layer, cache in caches(new_state(model, count)):
        width = int(rows.width(cache.entries.data))
        # normed, as a model's entries and queries are: logits are near N(0, 1)
        given, q = (
            x * width**0.5 / x.norm(dim=-1, keepdim=True)
            for x in (torch.randn(count, width, generator=g), torch.randn(4, INDEX_HEADS, width, generator=g))
        )
        fed(cache.entries, given.to(model.device), CUTS[-1])
        data = cache.entries.view()
        assert isinstance(data, coded_rows.CodedRows), f"entries of layer {layer}: {type(data).__name__}"
        scores = (rows.query_as_stored(data, q.to(model.device)) @ rows.read_as_stored(data, 0, count).mT).cpu()
        of_sink = sink.double()[:, None].expand(4, INDEX_HEADS, 1)
        wanted, found = attention(q, given, sink)[1], torch.cat((of_sink, scores.double() * width**-0.5), -1)
        kl = (wanted.exp() * (wanted - found.log_softmax(-1))).sum(-1)  # [4, INDEX_HEADS]
        what = f"V4, shard at {LOSSLESS} bits, {count} entries: KL of attention from that to exact entries, mean"
        yield judged(what, float(kl.mean()), KL, layer=layer, held=data.bits, largest=float(kl.max()))


def masses(model: Transformer, count: int, seed: int) -> Iterator[Finding]:
    """Every entry seen is behind some row, and behind one alone: what rows weigh adds up to their number."""
    for layer, cache in caches(new_state(model, count)):
        entries = cache.entries
        assert isinstance(entries, BankedEntries), f"layer {layer}: {type(entries).__name__}"
        wrong = 0.0
        for appended in clustered(count, int(rows.width(entries.data)), seed).to(model.device).split(CUTS[1]):
            fed(entries, appended, CUTS[1])
            bias = entries.view().bias
            mass = 0.0 if bias is None else float(bias.double().exp().sum())
            wrong = max(wrong, abs(mass - entries.count))
        what = f"V4, coda, {count} entries: mass of all rows, off the entries seen, most at any time"
        yield judged(what, wrong, MASS, layer=layer, evicted=entries.evicted)


def attend_last(
    model: Transformer, entries: RowCache[Rows | Slots], q: Tensor, ring: Tensor, sink: Tensor, first: int
) -> Tensor:
    """What the model's op returns for q [1, h, d] at position `first`, which sees the ring and every entry."""
    given = (q.to(model.device), ring.to(model.device), first, len(ring), entries.view(), entries.ratio, None)
    return model.arithmetic.ops.attend(*given, sink.to(model.device))[0].cpu()


def means(model: Transformer, count: int, seed: int) -> Iterator[Finding]:
    """Attention to means of equal entries is attention to all of them: in float64, with a sink."""
    sink = torch.linspace(-2, 2, model.config.num_attention_heads)
    for layer, cache in caches(new_state(model, count)):
        g, width = torch.Generator().manual_seed(seed), int(rows.width(cache.entries.data))
        kinds = 3 * functional.normalize(torch.randn(KINDS, width, generator=g), dim=1)
        given = kinds[torch.arange(count) % KINDS]
        fed(cache.entries, given.to(model.device), CUTS[1])
        q, ring = 2 * torch.randn(1, len(sink), width, generator=g), torch.randn(WINDOW, width, generator=g)
        found = attend_last(model, cache.entries, q, ring, sink, cache.entries.ratio * count - 1)
        wanted = attention(q, torch.cat((ring, given)), sink)[0][0]
        what = f"V4, coda, {count} entries of {KINDS} kinds: attention to their means, off that to all of them"
        yield judged(what, off(found, wanted), SAME, layer=layer, rows=cache.entries.used)


def drifts(model: Transformer, count: int, seed: int) -> Iterator[Finding]:
    """Entries come one by one and are attended to: what their codes lose does not build up."""
    layer, cache = next(caches(new_state(model, count)))
    g, width, sink, out = torch.Generator().manual_seed(seed), int(rows.width(cache.entries.data)), torch.zeros(4), []
    given, ring = torch.randn(count, width, generator=g), torch.randn(WINDOW, width, generator=g)
    q = 2 * torch.randn(count, len(sink), width, generator=g)
    for i in range(count):
        fed(cache.entries, given[i : i + 1].to(model.device), 1)
        first = cache.entries.ratio * (i + 1) - 1
        out.append(attend_last(model, cache.entries, q[i : i + 1], ring, sink, first))
    hidden = torch.arange(-WINDOW, count) > torch.arange(count)[:, None]
    wanted = attention(q, torch.cat((ring, given)), sink, hidden)[0]
    one = Drift("shard", divergence(wanted, torch.stack(out)))
    yield one.grown(f"V4, shard, {count} entries one by one", layer)


def recalls(model: Transformer, count: int, k: int, others: Sequence[int], seed: int) -> Iterator[Finding]:
    """Selections from normal keys, as the cache of the run holds them (judged), and at other widths (measured)."""
    g, device = torch.Generator().manual_seed(seed), model.device
    width, tokens = model.config.index_head_dim, 4
    q = torch.randn(tokens, INDEX_HEADS, width, generator=g)
    weights, keys = torch.randn(tokens, INDEX_HEADS, generator=g), torch.randn(count, width, generator=g)
    scores = torch.einsum("th,thn->tn", weights.double(), (q.double() @ keys.double().T).relu())
    best = scores.topk(k).indices

    def recall(data: coded_rows.CodedRows) -> tuple[float, float]:
        # each token stands behind the last key
        chosen = model.arithmetic.ops.select(q.to(device), weights.to(device), data, count - 1, 1, k).cpu()
        shares = torch.stack([torch.isin(a, b).double().mean() for a, b in zip(best, chosen, strict=True)])
        return float(shares.mean()), float(shares.min())

    for layer, cache in caches(new_state(model, count)):
        if isinstance(cache, CsaCache):
            fed(cache.keys, keys.to(device), CUTS[-1])
            held = cache.keys.view()
            assert isinstance(held, coded_rows.CodedRows), f"keys of layer {layer}: {type(held).__name__}"
            mean, worst = recall(held)
            what = f"V4, shard, index keys: recall of {k} of {count} against fp32 keys, mean over rows"
            yield judged(what, mean, RECALL, layer=layer, bits=held.bits, worst_row=worst)
            for bits in others:
                data = coded_rows.allocate(count, width, bits, device, SIGNS)
                coded_rows.write(data, 0, keys.to(device))
                mean, worst = recall(data)
                what = f"V4, shard, index keys of {bits} bits: recall of {k} of {count}, mean over rows"
                yield measured(what, mean, layer=layer, bits=bits, worst_row=worst)


# --- entries in a basis (`shard:basis=`), around a mean as large as what varies


def without_basis(config: ModelConfig) -> str | None:
    """Why rows of the model's widths have no basis, None where they have one."""
    rope = config.qk_rope_head_dim
    nope = config.head_dim - rope
    if rope & (rope - 1) == 0 and rope >= 8 and basis_fit.group_of(nope):
        return None
    return f"Entries in a basis: {nope} columns and {rope} that carry a position cannot be divided."


def around_a_mean(count: int, width: int, seed: int) -> Tensor:
    """Rows [count, width] around a mean of N(0, 1), with directions along which they vary more than along others."""
    g = torch.Generator().manual_seed(seed)
    mix, _ = torch.linalg.qr(torch.randn(width, width, generator=g))
    mean, x = torch.randn(width, generator=g), torch.randn(count, width, generator=g)
    deviation = DECAY ** -torch.arange(width, dtype=torch.float32)
    out: Tensor = mean + (x * deviation * (width / deviation.square().sum()).sqrt()) @ mix.mT
    return out


def in_a_basis(model: Transformer, count: int, cuts: Sequence[int], seed: int) -> Iterator[Finding]:
    """Attention with sinks of every size, and what is stored of rows that come so many at a time.

    A basis is fitted to some rows as `runtime.basis` fits one to a text's; others go into the caches that a model with
    this basis has. What is stored is decoded by the equation and attended to in float64.
    """
    config, kinds = model.config, model.config.layer_kinds
    drawn = around_a_mean(FITTED + count, config.head_dim, seed)
    nobody = basis_fit.Sample(drawn[:FITTED], drawn.new_zeros(0, 1, config.head_dim), torch.ones(0, FITTED).bool())
    found = basis_fit.fit(nobody, config.qk_rope_head_dim, BITS["entries"], SHARED)
    assert found.fit is not None, f"no basis for {FITTED} rows of {config.head_dim}"
    shard = Shard(basis=Basis("drawn", found.fit, found.rope_bits))
    variants = tuple(Full() if kind is LayerKind.SWA else shard for kind in kinds)
    formats, ratio = model.arithmetic.formats._replace(variants=variants), max(config.compress_ratios)

    def make(model: Transformer, count: int) -> State:
        return State(config, ratio * count, ratio * min(count, max(CUTS)), formats, model.device)

    for layer, cache in caches(make(model, count)):
        fed(cache.entries, drawn[FITTED:].to(model.device), CUTS[-1])
        yield _attention_in_a_basis(model, cache.entries, seed, layer)
    yield from rows_kept(model, "shard in a basis", cuts, count, seed, make, drawn[FITTED:])


def _attention_in_a_basis(model: Transformer, entries: RowCache[Rows | Slots], seed: int, layer: int) -> Finding:
    data, heads = entries.view(), model.config.num_attention_heads
    assert isinstance(data, BasisRows), f"layer {layer}: {type(data).__name__}"
    g, (count, width) = torch.Generator().manual_seed(seed + 1), data.shape
    q, ring = 2 * torch.randn(1, heads, width, generator=g), torch.randn(WINDOW, width, generator=g)
    keys, errors, mass = torch.cat((ring.double(), decode(data).cpu().double())), {}, {}
    for sink in SINKS:
        sinks = torch.full((heads,), sink)
        wanted, weights = attention(q, keys, sinks)
        out = attend_last(model, entries, q, ring, sinks, entries.ratio * count - 1)
        errors[sink] = off_rms(out, wanted[0])
        mass[f"{sink:g}"] = float(weights[..., 1 + WINDOW :].exp().sum(-1).mean())
    worst = max(errors, key=lambda sink: errors[sink] if errors[sink] >= 0 else math.inf)  # NaN is worst
    what = (
        f"V4, shard in a basis, {count} entries with a mean, sinks to {SINKS[-1]:g}: attention, largest error over RMS"
    )
    return judged(what, errors[worst], SUM, layer=layer, sink=worst, mass_of_entries=mass)


# --- runs of the model


def kept_whole(config: ModelConfig, length: int) -> tuple[str, ...]:
    """Rules by which coda's windows hold just the entries of `length` tokens, layer by layer."""
    layers = [layer for layer, kind in enumerate(config.layer_kinds) if kind is not LayerKind.SWA]
    fits = {layer: max(1, length // config.ratio(layer)) for layer in layers}
    return tuple(f"{layer}=coda:window={window},exact=4,summary=4" for layer, window in fits.items())


def logits(model: Transformer, ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits [t, vocab] of a sequence that comes in calls of these sizes."""
    state = model.new_state(len(ids), max(sizes))
    return torch.cat([model.logits(model(part, state)) for part in ids.split(list(sizes))])


def orders(length: int, chunks: Sequence[int], tail: int) -> dict[str, list[int]]:
    """Ways to cut a prompt: calls of each size, and single tokens at its end."""
    ways = {f"calls of {n}": [len(part) for part in torch.empty(length).split(n)] for n in chunks if n > 1}
    return ways | {f"one call, then {tail} steps": [length - tail, *[1] * tail]}


def exact(full: Transformer, coda: Transformer, ids: Tensor, chunks: Sequence[int], tail: int) -> Finding:
    """While no entry has left a window, coda is the full cache, however the prompt comes."""
    ways = orders(len(ids), chunks, tail).items()
    distances = {name: off(logits(coda, ids, sizes), logits(full, ids, sizes).double()) for name, sizes in ways}
    what = f"V4, coda, windows of all entries of {len(ids)} tokens: logits, distance from the full cache"
    return _worst(what, distances, "the largest logit")


def restored(model: Transformer, name: str, ids: Tensor, tail: int) -> Finding:
    """A state that is put back goes on to the bit."""
    position = len(ids) - tail
    state, other = (model.new_state(len(ids), CALL) for _ in range(2))
    for part in ids[:position].split(CALL):
        model(part, state)
    other.position = position

    def run(state: State) -> Tensor:
        return torch.cat([model(one, state) for one in ids[position:].split(1)])

    pairs = list(zip(state.layers, other.layers, strict=True))
    return put_back(f"V4, {name}", position, pairs, partial(run, state), partial(run, other))


# --- the page


def _summary(findings: Sequence[Finding], drawn: Drift) -> str:
    same = max(f.measured for f in findings if "distance" in f.what and f.measured is not None)
    scores = max(f.measured for f in findings if "relative identity" in f.what and f.measured is not None)
    held = " / ".join(f"{f.evidence['held']:.2f}" for f in findings if "full_bf16" in f.evidence)
    of_keys = [f for f in findings if "worst_row" in f.evidence and f.bound is not None]
    kept = ""
    if of_keys:
        last = of_keys[-1]
        kept = f" With index keys in {last.evidence['bits']} bits {last.measured:.1%} of a selection stays the same."
    return (
        f"Until something is evicted or compressed, CoDA and Shard are within {same:.1e} of the full cache. Shard's"
        f" scores by relative position are right to {scores:.0e} in float64. Its cache of Llama-3.1-8B takes {held}"
        f" MiB, by length of the prompt.{kept} Over {drawn.curve[-1][0]:.0f} decoded random tokens the distance of"
        f" Shard's outputs from the full cache's changes by a factor of {drawn.growth:.2g}."
    )


def _parts(
    findings: Sequence[Finding], drawn: Sequence[Drift], read: Sequence[Drift], left: list[str]
) -> tuple[Part, ...]:
    held = [f.evidence for f in findings if "full_bf16" in f.evidence]
    rows = [(e["tokens"], e["held"], e["full_bf16"], e["full_bf16"] / e["held"]) for e in held]
    note = (
        "32 layers of 8 KV heads of 128, just after a prompt of this length, counted from the tensors' shapes and"
        " dtypes. The article's MB are MiB."
    )
    columns = ("tokens", "held, MiB", "full cache in bf16, MiB", "ratio")
    parts: list[Part] = [Table("Shard's bytes for Llama-3.1-8B", columns, rows, note)]
    for of, curves in (("drawn tokens", drawn), ("this checkpoint", read)):
        if curves:
            shown: dict[str, Sequence[tuple[float, float]]] = {
                one.name: [(x, y) for x, y in one.curve if y > 1e-12] for one in curves
            }  # below: rounding of fp32
            y = f"{curves[0].what}, mean since the last point"
            parts.append(Plot(f"Divergence from the full cache, {of}", "tokens so far", y, shown, log_y=True))
    return (*parts, *([Text("What was left out", " ".join(left))] if left else []))


FULL = Variants()
QUICK = Variants(
    tokens=139,
    chunks=(),
    tail=6,
    length=48,
    published=(),
    cuts=(1, 128),
    entries=120,
    steps=512,
    read=0,
    prompt=120,
    prompts=(0,),
    keys=1024,
    widths=(),
    contexts=(8192, 16384),
)
