"""Probe: whether the caches are as large as predicted and written where they should be, and nothing else grows.

What caches and a call must take is worked out here by hand, from the config: none of those formulas asks the model, and
none is the memory plan's. What a process takes is measured in one of its own (`probes.child`), because a peak never
falls: another probe's past would hide it.
"""

import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Final, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.autograd.profiler import profile  # torch.profiler imports torch's compiler first, which takes 3 s

from fathom.kernels.formats import rows as stored
from fathom.kernels.ops import CPU
from fathom.model.cache.components import Components
from fathom.model.cache.entries import Entries
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.frontier import Frontier
from fathom.model.cache.layers import CsaCache, HcaCache, LayerCache
from fathom.model.cache.shared import SharedCache
from fathom.model.checkpoint.weights import HASHED_WHOLE
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.child import call
from fathom.probes.finding import (
    JSON,
    Bars,
    Finding,
    Part,
    Report,
    Table,
    Text,
    at_most,
    exactly,
    judged,
    measured,
    tripped,
    vacuous,
)
from fathom.probes.probe import Probe, Progress, one_rank, room
from fathom.probes.subject import Subject, cannot_travel
from fathom.runtime.allocator import M_MMAP_THRESHOLD, of_libc
from fathom.runtime.load import load
from fathom.runtime.plan.planner import Plan, Planner
from fathom.runtime.report import peak_memory

ITEM_BYTES: Final = {"bf16": 2, "fp32": 4}
IN_DTYPE: Final = ("dtype", "dtype")  # how entries and index keys are stored where nothing else was asked for
F32: Final = 4
I64: Final = 8
MIB: Final = 1 << 20
MILLION: Final = 1_000_000

TOUCHED_DECODED: Final = 5  # of the tokens in poisoned caches, one by one at the end
DECODED: Final = 4  # tokens after each prompt of a process, one by one
NOISE: Final = 4096  # rows of noise at once: less than a call takes, or it would be the peak
BALLAST: Final = 64 * MIB  # that the process takes at the end, to see that its peak shows them
# What a process may take beside tensors that torch allocates: Python's own objects, tensors too small to be mapped one
# by one, pages that are not full. In the demo this is 1 MiB; streams kept of the longer prompt would be 7.
SLACK: Final = 4 * MIB
OFF_PLAN: Final = 5.0  # per cent that a process may be off the memory plan
# Of planned bytes, from which that is more than what a process differs by from run to run, and than what depends on the
# scores in a selection and a plan cannot know: 2.7 MiB, of a plan in which it took the most.
SHOWN_BY: Final = 64 * MIB
# What one op of the backend cpu takes beside its operands and its result, whatever the context. A linear decodes
# tiles of 2^20 weights at up to 12 bytes each; attention and indexer keep theirs, 1 and 2 MiB each, below that.
TILES: Final = 16 * MIB
PR_SET_THP_DISABLE: Final = 41  # linux/prctl.h
CLEAR_REFS: Final = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Memory(Probe):
    """Count the bytes by hand, in the buffers, and in a process."""

    name: ClassVar[str] = "memory"
    question: ClassVar[str] = "Do the caches take what the arithmetic says, and does nothing else grow with the prompt?"
    reads: ClassVar[tuple[Site, ...]] = (sites.KV, sites.ENTRY, sites.INDEX_KEY_USED)
    of_fathom: ClassVar[bool] = True
    of_v41: ClassVar[bool] = True
    background: ClassVar[str] = """\
V4's promise is a million tokens in a few gigabytes: a layer keeps the KV of its window, one entry for every 4 tokens
(CSA) or 128 (HCA), and in CSA layers an index key beside each entry. What breaks the promise is seldom the arithmetic.
One runtime had index keys four times too wide, and nothing failed. Others ran out of memory because their plan left out
the indexer's scores, which are [chunk, context / 4] in fp32 where nothing tiles them: 2 GiB for 2048 tokens at a
million.

Four things are compared. **Predicted**: a formula of this probe's own, from the config. **Allocated**: the storage
behind each tensor of each cache, and what the cache says of itself. **Touched**: the buffers are filled with NaN before
a run, so that afterwards each row shows whether it was written, and reading one too early ends the run; each row must
hold, bit for bit, what the model showed when it wrote it. **Peak**: a process of its own runs a short and a long
prompt, and may grow by the longer one's caches, by the tiles that were not full before, and by no more."""
    noticed: ClassVar[str] = """\
At these lengths an HCA layer is mostly its frontier: values and gates of the open window in fp32 take far more than its
entries. Width drops out of the comparison, so it holds for V4-Pro too.

The process was predicted closely, once two things were out of the way. Linux lets a child inherit its parent's
`ru_maxrss`, so a peak read there can be another program's. And glibc keeps what is freed: two runs of the same code
grew by different amounts until every large tensor was mapped on its own, and until what was free in the heap was given
back before a run was measured: a large tensor goes there too where it fits.

What one call takes does grow with the context at first, until every tile is full, and then no more (see also
long-context.md). Most of the peak itself was there before the first token: torch."""
    not_claimed: ClassVar[str] = """\
That nothing leaks more slowly than the slack allows: 500 bytes a token would pass. What one call takes is that of this
op set on this machine. Processes are measured without transparent huge pages: where a system always has them, it rounds
tensors up to 2 MiB, which no plan counts. Of the rows of an open window it is only asked that they are there; what they
hold, the `bits` probe compares."""

    tokens: int = 300  # touched: two windows of HCA, and a ring that goes round
    chunk: int = 96  # of the same run: less than a window of HCA, so that not all of its frontier is written at first
    prompts: tuple[int, int] | None = (1024, 8192)  # for the peak of a process; None: it is not measured
    far: int = 65536  # where one call is measured too, with noise in the caches before it
    planned: tuple[int, int] = (65536, 4096)  # positions and tokens of a call of the process held against the plan

    def needs(self, subject: Subject) -> str | None:
        """A process of its own that holds all of the model."""
        why = one_rank(subject, "it measures a process that runs the model alone")
        return why or room(subject, self._count(subject.config) + _spare(subject.config))

    def _count(self, config: ModelConfig) -> int:
        once_round = config.sliding_window + self.chunk
        return max(self.tokens, once_round, 2 * max(config.compress_ratios)) + TOUCHED_DECODED

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Allocated and touched in this process, the peak in another, unless a tripwire ended the run here."""
        config, model, item = subject.config, subject.model, ITEM_BYTES[subject.options.dtype]
        formats = (subject.options.entry_format, subject.options.key_format)
        tokens = subject.tokens(self._count(config))
        state = model.new_state(len(tokens) + _spare(config), self.chunk)
        layers = allocations(config, state, self.chunk, item, formats)
        findings = [*allocation_findings(layers), _whole_context(subject), *figure_findings(config)]
        progress(0.05, f"a prompt of {len(tokens)} tokens in poisoned caches")
        rows: list[Rows] = []
        said = [_caches_said(layers)]
        parts: list[Part] = []
        try:
            _touch(model, state, tokens, self.chunk, rows)
            findings += row_findings(rows)
            said.append(_rows_said(rows))
            if self.prompts is not None:
                self._processes(subject, progress, findings, parts, said)
        except Tripwire as trip:
            findings.append(tripped(trip))
            said.append(f"then a tripwire ended the run: {trip}")
        parts.append(_caches_table(layers, rows))
        progress(1.0, "done")
        return Report(f"{'; '.join(said)}.", tuple(findings), tuple(parts), self.not_claimed)

    def _processes(
        self, subject: Subject, progress: Progress, findings: list[Finding], parts: list[Part], said: list[str]
    ) -> None:
        """Measure processes that run the model alone: one for what grows with a prompt, one beside the memory plan."""
        if why := cannot_travel(subject):
            parts.append(Text("Peak of a process", f"Not measured: {why}."))
            return
        progress(0.2, "a process of its own")
        process = self._grown(subject)
        findings += process_findings(process)
        parts.append(_process_table(process))
        said.append(_process_said(process))
        progress(0.6, "a process of its own against the memory plan")
        planned = self._beside_plan(subject)
        if isinstance(planned, str):
            parts.append(Text("The memory plan", f"Not measured: {planned}."))
        else:
            findings.append(plan_finding(planned))
            parts.append(_plan_bars(planned))

    def _grown(self, subject: Subject) -> "Process":
        """What a process took for a short and a long prompt."""
        assert self.prompts is not None
        config, chunk, item = subject.config, subject.options.prefill_chunk, ITEM_BYTES[subject.options.dtype]
        formats = (subject.options.entry_format, subject.options.key_format)
        most = config.max_position_embeddings - DECODED - chunk
        streams = config.hc_mult * config.hidden_size * item  # of a token
        short = min(self.prompts[0], most // 8)
        long = min(max(self.prompts[1], short + 3 * SLACK // (2 * streams)), most)  # were they kept, it would show
        far = min(self.far, config.max_position_embeddings) - chunk
        return Process(
            (short, long),
            far,
            call(peak_of_prompts, subject, (short, long), far, torch.get_num_threads()),
            sum(cache_bytes(config, long + DECODED + chunk, chunk, item, formats).values()),
            call_bytes(config, chunk, item),
            streams * (long - short),
            bounded=subject.ops.name == CPU.name,
            # the fingerprint of a small checkpoint reads all of it while loading
            weights_read=subject.options.device != "cpu" or subject.load().census.nbytes <= HASHED_WHOLE,
        )

    def _beside_plan(self, subject: Subject) -> "Planned | str":
        """A process beside what `runtime.plan` says of it, or why that cannot be."""
        loaded, options = subject.load(), subject.options
        on_cpu = options.device == "cpu"
        if subject.ops.name != CPU.name:
            return f"it is of the cpu ops, not of {subject.ops.name}"
        if on_cpu and loaded.census.nbytes > HASHED_WHOLE:
            return f"of more than {HASHED_WHOLE >> 20} MiB not all is read while loading, what is resident is not known"
        context = min(self.planned[0], subject.config.max_position_embeddings)
        chunk = min(self.planned[1], context // 2)
        planner = Planner(subject.config, loaded.census, loaded.sharding, options, 0, subject.ops.name)
        mapped = loaded.census.nbytes if on_cpu else 0
        sizes = _planned(planner.plan(context, chunk), mapped)
        while sum(sizes.values()) < SHOWN_BY and 4 * chunk <= context:  # narrow layers: more tokens show it
            chunk *= 2
            sizes = _planned(planner.plan(context, chunk), mapped)
        taken = call(peak_beyond_base, subject, context, chunk, torch.get_num_threads())
        return Planned(context, chunk, taken, sizes)


def _spare(config: ModelConfig) -> int:
    """Positions beyond the tokens, so that every cache has rows that nothing may touch."""
    return max(128, *config.compress_ratios)


# ---- by hand, from the config


def entry_bytes(config: ModelConfig, item: int, form: str) -> int:
    """Bytes of one entry. In FP8: E4M3, rope dims in BF16, a scale per 64 columns, filled up to a multiple of 8."""
    d, rope = config.head_dim, config.qk_rope_head_dim
    narrow = (d - rope) + 2 * rope + (d - rope) // 64
    return {"dtype": d * item, "fp8": (narrow + 7) // 8 * 8}[form]


def key_bytes(config: ModelConfig, item: int, form: str) -> int:
    """Bytes of one index key. In FP8 an fp32 scale is beside it, in FP4 a byte of scale per 32 columns."""
    di = config.index_head_dim
    return {"dtype": di * item, "fp8": di + F32, "fp4": di // 2 + di // 32}[form]


def layer_bytes(
    config: ModelConfig, layer: int, context: int, chunk: int, item: int, formats: tuple[str, str] = IN_DTYPE
) -> dict[str, int]:
    """Bytes of each component of a layer's cache, for `context` positions in calls of `chunk` tokens.

    A ring holds the window of a call's first token and the whole call: window + chunk - 1 rows. A compressed layer has
    an entry for each closed window of `ratio` tokens, and keeps values and gates of the open one in fp32, so that the
    pooling does not depend on where calls end. In a CSA layer windows overlap: each token brings two series, and the
    tokens of the last closed window are kept as well; and beside every entry lies an index key, `index_head_dim` wide,
    one for all index heads, with a frontier of its own. `formats` are those of entries and of keys.

    In V4.1 few layers have entries and index keys, both of one frontier, in which windows do not overlap; a layer with
    n-grams keeps the numbers of the tokens that one reaches over, as it keeps its window.
    """
    d, di, ratio = config.head_dim, config.index_head_dim, config.ratio(layer)
    sizes = {"window": (config.sliding_window + min(chunk, context) - 1) * d * item}
    if config.v41 is not None:
        rows = context // config.ratio(layer) if config.makes_entries(layer) else 0
        return sizes | _more_of_v41(config, layer, min(chunk, context), rows, item, formats)
    kind = config.layer_kind(layer)
    if kind is LayerKind.SWA:
        return sizes
    rows = 2 * 2 * ratio if kind is LayerKind.CSA else ratio  # windows, and series of each of their tokens
    entry, key = entry_bytes(config, item, formats[0]), key_bytes(config, item, formats[1])
    sizes |= {"entries": context // ratio * entry, "frontier": 2 * rows * d * F32}
    if kind is LayerKind.CSA:
        sizes |= {"indexer_keys": context // ratio * key, "indexer_frontier": 2 * rows * di * F32}
    return sizes


def _more_of_v41(
    config: ModelConfig, layer: int, tokens: int, rows: int, item: int, formats: tuple[str, str]
) -> dict[str, int]:
    """What a layer has beside its window, where a call has so many tokens, and it makes so many rows."""
    assert config.v41 is not None, "of its config"
    sizes, tables = dict[str, int](), config.v41.engram
    if layer in tables.layer_ids:
        sizes["tokens"] = (tables.max_ngram + tokens - 1) * I64
    if config.makes_entries(layer):
        sizes["entries"] = rows * entry_bytes(config, item, formats[0])
        sizes["indexer_keys"] = rows * key_bytes(config, item, formats[1])
        sizes["frontier"] = 2 * config.ratio(layer) * config.head_dim * F32
    return sizes


def cache_bytes(
    config: ModelConfig, context: int, chunk: int, item: int, formats: tuple[str, str] = IN_DTYPE
) -> dict[str, int]:
    """`layer_bytes` summed over layers."""
    total: dict[str, int] = {}
    for layer in range(config.num_hidden_layers):
        for component, size in layer_bytes(config, layer, context, chunk, item, formats).items():
            total[component] = total.get(component, 0) + size
    return total


def call_bytes(config: ModelConfig, chunk: int, item: int) -> int:
    """At most what a call of `chunk` tokens holds at once beside weights and caches; the context is not in it.

    Alive through a layer: streams before and after each of the two sublayers, their input and output, and the fp32 sum
    over experts. Beside these the widest of: queries or index queries (stored twice, and twice in fp32 where they are
    normed, rotated or rounded), values and gates of both compressors in fp32 (and again where they are pooled), the
    activations of one expert that got every token. And one op's tiles.
    """
    D, s = config.hidden_size, config.hc_mult
    always = 3 * s * D * item + 2 * D * (item + F32)
    copies = 2 * item + 2 * F32
    queries = config.num_attention_heads * config.head_dim * copies
    indexed = config.index_n_heads * config.index_head_dim * copies + queries // 2
    pooled = 2 * 2 * 2 * config.head_dim * F32 + queries // 2
    expert = config.moe_intermediate_size * config.n_shared_experts * (copies + F32)
    return chunk * (always + max(queries, indexed, pooled, expert)) + TILES


class Figure(NamedTuple):
    """A figure worked out by hand or published, which a state of this runtime must have for the same layers."""

    what: str
    layers: tuple[int, int, int]  # CSA, HCA, SWA
    context: int
    formats: tuple[str, str]
    components: tuple[str, ...]
    unit: str
    size: float  # bytes of the unit
    wanted: float
    within: float  # half a unit of the last digit that was written down; 0 where whole bytes were
    source: str = "by hand"


PRO, FLASH = (30, 31, 0), (21, 20, 2)  # config.json of DeepSeek-V4-Pro and DeepSeek-V4-Flash
KV, WINDOW_TOO = ("entries", "indexer_keys"), ("entries", "indexer_keys", "window")
FP8, FP4_KEYS = ("fp8", "fp8"), ("fp8", "fp4")
POSITIONS: Final = 1 << 20
FIGURES: Final = (  # MB and GB are powers of ten
    Figure("entries of a CSA layer, 1,000,000 tokens", (1, 0, 0), MILLION, IN_DTYPE, KV[:1], "MB", 1e6, 256, 0),
    Figure("index keys of a CSA layer, 1,000,000 tokens", (1, 0, 0), MILLION, IN_DTYPE, KV[1:], "MB", 1e6, 64, 0),
    Figure("entries of an HCA layer, 1,000,000 tokens", (0, 1, 0), MILLION, IN_DTYPE, KV[:1], "MB", 1e6, 8, 0.5),
    Figure("KV of V4-Pro, 1,000,000 tokens", PRO, MILLION, IN_DTYPE, WINDOW_TOO, "GB", 1e9, 9.86, 0.005),
    Figure("KV of V4-Pro, 2^20 tokens", PRO, POSITIONS, IN_DTYPE, KV, "GiB", 1 << 30, 9.62, 0.005, "published by vLLM"),
    Figure("KV of V4-Pro by the token, BF16", PRO, POSITIONS, IN_DTYPE, KV, "B", POSITIONS, 9848, 0),
    Figure("KV of V4-Pro by the token, FP8", PRO, POSITIONS, FP8, KV, "B", POSITIONS, 5511, 0.5),
    Figure("KV of V4-Pro by the token, FP8 with FP4 keys", PRO, POSITIONS, FP4_KEYS, KV, "B", POSITIONS, 5031, 0.5),
    Figure("KV of V4-Flash by the token, BF16", FLASH, POSITIONS, IN_DTYPE, KV, "B", POSITIONS, 6880, 0),
    Figure("KV of V4-Flash by the token, FP8", FLASH, POSITIONS, FP8, KV, "B", POSITIONS, 3850, 0.5),
    Figure("KV of V4-Flash by the token, FP8 with FP4 keys", FLASH, POSITIONS, FP4_KEYS, KV, "B", POSITIONS, 3514, 0.5),
)


def figure_findings(config: ModelConfig) -> list[Finding]:
    """How far a state of this runtime is off `FIGURES`; on torch's meta device it takes no memory."""
    return [_figure_finding(figure, config) for figure in FIGURES]


def _figure_finding(figure: Figure, config: ModelConfig) -> Finding:
    formats = CacheFormats(torch.bfloat16, *figure.formats)
    sizes = State(_published(config, figure.layers), figure.context, 1, formats, torch.device("meta")).nbytes()
    value = sum(sizes[component] for component in figure.components) / figure.size
    what = f"{figure.what}: off {figure.wanted:g} {figure.unit}, {figure.source}"
    return judged(what, abs(value - figure.wanted), at_most(figure.within), figure.unit, allocated=value)


def _published(config: ModelConfig, layers: tuple[int, int, int]) -> ModelConfig:
    """A config whose caches are those of so many CSA, HCA and SWA layers of a published V4.

    V4-Pro and V4-Flash both have head_dim 512, index_head_dim 128, ratios 4 and 128, window 128; nothing else of them
    enters a cache.
    """
    kinds, ratios = (LayerKind.CSA, LayerKind.HCA, LayerKind.SWA), (4, 128, 0)
    return replace(
        config,
        v41=None,
        num_hidden_layers=sum(layers),
        layer_kinds=tuple(kind for kind, count in zip(kinds, layers, strict=True) for _ in range(count)),
        compress_ratios=tuple(ratio for ratio, count in zip(ratios, layers, strict=True) for _ in range(count)),
        num_hash_layers=0,
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        sliding_window=128,
        max_position_embeddings=1 << 20,
    )


# ---- allocated


class Allocated(NamedTuple):
    """The cache of one layer, three times in bytes by component."""

    predicted: dict[str, int]
    stored: dict[str, int]  # in the storages behind its tensors
    claimed: dict[str, int]  # by its own account


def allocations(
    config: ModelConfig, state: State, chunk: int, item: int, formats: tuple[str, str] = IN_DTYPE
) -> list[Allocated]:
    """The three counts of each layer's bytes."""
    context = state.max_context
    return [
        Allocated(layer_bytes(config, layer, context, chunk, item, formats), _storages(cache), cache.nbytes())
        for layer, cache in enumerate(state.layers)
    ]


def _storages(cache: Components) -> dict[str, int]:
    """Bytes of the storages behind a cache's tensors, by component; a storage that two share counts once."""
    names = {"ring": "window", "keys": "indexer_keys", "key_frontier": "indexer_frontier"}
    theirs: tuple[str, ...] = ()
    if isinstance(cache, SharedCache):
        names["key_frontier"] = "frontier"
        theirs = () if cache.own else ("entries", "keys", "key_frontier")
    seen: set[int] = set()
    sizes: dict[str, int] = {}
    for attribute, part in vars(cache).items():
        if isinstance(part, Mapping | int | NoneType) or attribute in theirs:
            continue  # the same parts again, by name; no part; one of another layer
        values = [held if isinstance(held, tuple) else (held,) for held in vars(part).values()]
        for tensor in itertools.chain.from_iterable(values):  # the planes of a narrow form are a tuple
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in seen:
                seen |= {storage.data_ptr()} if storage.nbytes() else set()
                name = names.get(attribute, attribute)
                sizes[name] = sizes.get(name, 0) + storage.nbytes()
    return sizes


def allocation_findings(layers: Sequence[Allocated]) -> list[Finding]:
    """Bytes of each layer, and what the caches say of themselves."""
    findings, lies = [], {}
    for layer, sizes in enumerate(layers):
        off = _differences("predicted", sizes.predicted, sizes.stored)
        held, wanted = sum(sizes.stored.values()), exactly(sum(sizes.predicted.values()))
        findings.append(judged("bytes allocated", held, wanted, "B", layer=layer, **_if_any("off", off)))
        if lie := _differences("claimed", sizes.claimed, sizes.stored):
            lies[f"layer {layer}"] = lie
    what = "caches that claim other bytes than they hold"
    return [*findings, judged(what, len(lies), exactly(0), **_if_any("lies", lies))]


def _differences(name: str, wanted: dict[str, int], stored: dict[str, int]) -> JSON:
    return {
        component: {name: wanted.get(component, 0), "stored": stored.get(component, 0)}
        for component in sorted(wanted.keys() | stored.keys())
        if wanted.get(component, 0) != stored.get(component, 0)
    }


def _if_any(name: str, evidence: JSON) -> dict[str, JSON]:
    return {name: evidence} if evidence else {}


def _whole_context(subject: Subject) -> Finding:
    """A state for all positions that the model has, made on torch's meta device."""
    config, options = subject.config, subject.options
    positions, chunk = config.max_position_embeddings, options.prefill_chunk
    claimed = State(config, positions, chunk, subject.model.arithmetic.formats, torch.device("meta")).nbytes()
    formats = (options.entry_format, options.key_format)
    wanted = cache_bytes(config, positions, chunk, ITEM_BYTES[options.dtype], formats)
    what = f"bytes of a state for {positions} positions"
    return judged(what, sum(claimed.values()), exactly(sum(wanted.values())), "B", predicted=wanted, claimed=claimed)


# ---- touched


@dataclass(frozen=True, slots=True)
class Rows:
    """One buffer of one layer at a moment of a run."""

    layer: int
    component: str
    position: int  # of the state
    allocated: int
    expected: int  # rows that must hold something
    written: int  # rows that were ever written
    row_bytes: int  # as stored
    wrong: list[int]  # rows that are missing, or beyond, or hold something else


class Written:
    """Keeps what the model says it writes, in order, per layer: the rows that the caches must hold."""

    def __init__(self, layers: int) -> None:
        self.kv: list[list[Tensor]] = [[] for _ in range(layers)]
        self.entries: list[list[Tensor]] = [[] for _ in range(layers)]
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]

    def listeners(self) -> dict[Site, Listener]:
        """What to attach."""

        def keep(into: list[list[Tensor]]) -> Listener:
            def listener(layer: int | None, rows: Tensor) -> None:
                assert layer is not None
                into[layer].append(rows.clone())

            return listener

        return {
            sites.KV: keep(self.kv),
            sites.ENTRY: keep(self.entries),
            sites.INDEX_KEY_USED: keep(self.keys),
        }


def poison(state: State) -> None:
    """Fill every row, none of which anything may read before it is written, with NaN, which would end the run."""
    for cache in state.layers:
        assert isinstance(cache, LayerCache)
        buffers = [cache.ring.data]
        for part in _compressed(cache).values():
            buffers += [part.kv, part.gate] if isinstance(part, Frontier) else stored.planes(part.data).values()
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every dtype here; of E2M1, which has none, in its scales


def _touch(model: Transformer, state: State, tokens: list[int], chunk: int, rows: list[Rows]) -> None:
    """Run in poisoned caches, and look at all rows after the first call and after the last."""
    poison(state)
    written = Written(len(state.layers))
    ids = torch.tensor(tokens, device=model.device)
    calls = (*ids[:-TOUCHED_DECODED].split(chunk), *ids[-TOUCHED_DECODED:].split(1))
    with listening(model, written.listeners()):
        for number, part in enumerate(calls):
            model(part, state)
            if number in (0, len(calls) - 1):
                rows += look(state, written)


def look(state: State, written: Written) -> list[Rows]:
    """Every buffer of a poisoned state, at its position."""
    rows, position = [], state.position
    for layer, cache in enumerate(state.layers):
        assert isinstance(cache, LayerCache)
        ring = cache.ring.data
        oldest = max(0, position - len(ring))
        recent = {p % len(ring): row for p, row in enumerate(torch.cat(written.kv[layer])) if p >= oldest}
        rows.append(_rows(layer, "window", position, ring, recent))
        for name, part in _compressed(cache).items():
            if isinstance(part, Frontier):
                rows.append(_frontier(layer, name, position, part))
            else:
                shown = written.entries if name == "entries" else written.keys
                rows.append(_rows(layer, name, position, part.data, _in_order(shown[layer])))
    return rows


def _compressed(cache: LayerCache) -> dict[str, Any]:
    """What a cache has of its own beside its window, by component: rows, and frontiers."""
    found: dict[str, Any] = {}
    if isinstance(cache, SharedCache) and cache.own:
        found |= {"entries": cache.entries, "indexer_keys": cache.keys, "frontier": cache.key_frontier}
    if isinstance(cache, HcaCache):
        found |= {"entries": cache.entries, "frontier": cache.frontier}
    if isinstance(cache, CsaCache):
        found |= {"indexer_keys": cache.keys, "indexer_frontier": cache.key_frontier}
    return found


def _in_order(parts: list[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(torch.cat(parts))) if parts else {}


def _rows(layer: int, component: str, position: int, held: stored.Rows, rows: dict[int, Tensor]) -> Rows:
    """A buffer that must hold these rows, bit by bit, and poison everywhere else; a narrow form is decoded."""
    buffer = stored.read(held, 0, stored.length(held))
    wanted = torch.full_like(buffer, torch.nan)
    if rows:
        values = torch.stack(list(rows.values())).to(buffer.dtype)
        wanted[torch.tensor(list(rows), device=buffer.device)] = values
    same = ((buffer == wanted) | (buffer.isnan() & wanted.isnan())).all(1)
    written = int((~buffer.isnan()).any(1).sum())
    wrong, row_bytes = (~same).nonzero()[:, 0].tolist(), stored.nbytes(stored.first(held, 1))
    return Rows(layer, component, position, len(buffer), len(rows), written, row_bytes, wrong)


def _frontier(layer: int, component: str, position: int, frontier: Frontier) -> Rows:
    """Tokens to be pooled must be there; rows that no token was ever put in must be poison, the others may be old."""
    count, windows = len(frontier.kv), position // frontier.ratio - (1 if frontier.overlap else 0)
    needed = {at % count for at in range(max(0, windows * frontier.ratio), position)}
    touched = ~(frontier.kv.isnan() | frontier.gate.isnan()).any(1)
    wrong = [
        row for row, there in enumerate(touched.tolist()) if (not there if row in needed else there and row >= position)
    ]
    row_bytes = frontier.kv[:1].nbytes + frontier.gate[:1].nbytes
    return Rows(layer, component, position, count, len(needed), int(touched.sum()), row_bytes, wrong)


def row_findings(rows: Sequence[Rows]) -> list[Finding]:
    """One finding for each layer."""
    findings = []
    for layer in sorted({buffer.layer for buffer in rows}):
        buffers = [buffer for buffer in rows if buffer.layer == layer]
        wrong = {f"{buffer.component} at {buffer.position}": buffer.wrong[:8] for buffer in buffers if buffer.wrong}
        count = sum(len(buffer.wrong) for buffer in buffers)
        what = "rows that are missing, beyond, or hold something else"
        findings.append(judged(what, count, exactly(0), layer=layer, **_if_any("rows", wrong)))
    return findings


# ---- processes of their own


class Peak(NamedTuple):
    """What a process took that ran prompts; bytes."""

    steady: bool  # whether freed memory goes back to the system at once, so that differences of peaks mean something
    base: int  # peak after loading
    peaks: list[int]  # after each prompt, its own and all earlier states still there
    calls: list[int]  # at most held at once in one more call after each prompt, beyond what was there
    far: int  # the same at the far position
    ballast: int  # peak after `BALLAST` more


class Beyond(NamedTuple):
    """What a process took for one call, beyond what it held before and after everything was let go; bytes."""

    steady: bool
    base: int
    peak: int


def peak_of_prompts(subject: Subject, contexts: Sequence[int], far: int, threads: int) -> Peak:
    """In a process of its own: run prompts of `contexts` tokens, ascending, one after the other; then a call at `far`.

    Raises
    ------
    Tripwire
        One ended a run.

    """
    steady = _give_back_at_once()
    torch.set_num_threads(threads)
    model, chunk, device = subject.model, subject.options.prefill_chunk, subject.options.device
    tokens = torch.tensor(subject.tokens(max(contexts) + DECODED + chunk), device=device)
    base, peaks, states = peak_memory(device), [], []
    for context in (contexts[0], *contexts):  # the first time, torch's libraries take what they keep
        state = model.new_state(context + DECODED + chunk, chunk)
        for part in (*tokens[:context].split(chunk), *tokens[context:][:DECODED].split(1)):
            model.logits(model(part, state)[-1:])
        states.append(state)
        peaks.append(peak_memory(device))
    ballast = torch.ones(BALLAST, dtype=torch.uint8, device=device)
    after = peak_memory(device)
    del ballast
    calls = [live_bytes(model, state, tokens[-chunk:]) for state in states[1:]]
    distant = live_bytes(model, noise_up_to(model, far, chunk), tokens[-chunk:])
    return Peak(steady, base, peaks[1:], calls, distant, after)


def peak_beyond_base(subject: Subject, context: int, chunk: int, threads: int) -> Beyond:
    """In a process of its own: load and run one call of `chunk` tokens at the end of `context` positions, twice.

    The first time, the system and torch's libraries take what they keep; the second is measured. Raises Tripwire.
    """
    steady, device = _give_back_at_once(), subject.options.device
    torch.set_num_threads(threads)
    base = peak = 0
    for _ in range(2):
        # all that was held the time before is let go here
        base, model = _held_now(device), load(subject.directory, subject.options, subject.ops).model
        if subject.fault is not None:
            subject.fault.inject(model)
        state = noise_up_to(model, context - chunk, chunk)
        texts = [n for n in range(model.config.vocab_size) if n not in model.config.of_images]
        tokens = torch.tensor(texts, device=device)[torch.arange(chunk, device=device) % len(texts)]
        model(tokens, state)
        peak = peak_memory(device)
        del model, state, tokens
        gc.collect()
    return Beyond(steady, base, peak)


def _held_now(device: str) -> int:
    """Bytes that this process holds at the moment; from here on, a peak is that of what comes.

    What was freed within glibc's heap is given back first: a large tensor is put there where there is room for it,
    whatever the threshold, and would then take nothing that was not held before (3 to 4 MiB in the demo).
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    if (trim := of_libc("malloc_trim")) is not None:
        trim(0)
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5", encoding="ascii")  # man proc_pid_clear_refs: resets the peak
    return int(psutil.Process().memory_info().rss)


def _give_back_at_once() -> bool:
    """Let glibc map every large tensor on its own, so that freeing it lowers the resident set; whether that worked.

    Otherwise it keeps what was freed for later, more of it or less from run to run (7 MiB in the demo). And let the
    system use no huge pages, which would round a tensor up to 2 MiB where they are always on.
    """
    if (prctl := of_libc("prctl")) is not None:
        prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    mallopt = of_libc("mallopt")
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, 1 << 16) == 1


def live_bytes(model: Transformer, state: State, part: Tensor) -> int:
    """The largest sum of tensors alive at one moment of a call, beyond those from before, as torch allocates them."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(part, state)
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        model(part, state)
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in events]
    return max(itertools.accumulate(sizes))


def noise_up_to(model: Transformer, position: int, chunk: int) -> State:
    """A state at `position` whose caches hold noise: what a call takes there depends on how much, not on what."""
    state = model.new_state(position + chunk, chunk)
    for cache in state.layers:
        for component in cache.components.values():
            if isinstance(component, Entries):  # by value: noise in a plane of scales would be NaN
                count, width = position // component.ratio, component.data.shape[1]
                for low in range(0, count, NOISE):
                    component.append(torch.randn(min(NOISE, count - low), width).to(model.device))
            else:
                shapes = component.shapes(position)
                component.restore(position, {name: torch.randn(shape) for name, shape in shapes.items()})
    state.position = position
    return state


class Process(NamedTuple):
    """What a process was asked for, should take, and took."""

    contexts: tuple[int, int]
    far: int
    peak: Peak
    caches: int  # predicted, of the longer prompt's state
    plan: int  # predicted, of one call at most
    kept: int  # bytes by which keeping all streams of the prompt would grow
    bounded: bool  # whether the op set says that its memory does not grow with the context
    weights_read: bool  # whether all weights were read before the first prompt


def process_findings(process: Process) -> list[Finding]:
    """What one call takes, and what a longer prompt adds."""
    peak, (short, long) = process.peak, process.contexts
    what = f"bytes held at most in a call at position {process.far}, beside weights and caches"
    far = judged(what, peak.far, at_most(process.plan), "B") if process.bounded else measured(what, peak.far, "B")
    added = peak.peaks[1] - peak.peaks[0]
    rest = added - process.caches - (peak.calls[1] - peak.calls[0])
    evidence: dict[str, JSON] = {"grown": added, "caches": process.caches, "call": peak.calls[1] - peak.calls[0]}
    what = f"bytes that the process grew by from {short} to {long} tokens, beside caches and call"
    if not (peak.steady and process.weights_read):
        return [far, measured(what, rest, "B", **evidence)]
    if process.kept <= SLACK:
        why = f"a prompt whose streams are all kept would add {process.kept} bytes, within the slack of {SLACK}"
        return [far, vacuous(what, why)]
    if peak.ballast - peak.peaks[1] < BALLAST - peak.calls[1] - SLACK:
        why = f"the peak rose by {peak.ballast - peak.peaks[1]} bytes when {BALLAST} more were taken: it shows nothing"
        return [far, vacuous(what, why)]
    return [far, judged(what, rest, at_most(SLACK), "B", **evidence)]


class Planned(NamedTuple):
    """A process beside what `runtime.plan` says of it."""

    context: int
    chunk: int
    taken: Beyond
    parts: dict[str, int]  # planned, of what comes on top of the process's base

    @property
    def planned(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def took(self) -> int:
        """Bytes at the peak, beyond the base."""
        return self.taken.peak - self.taken.base


def _planned(plan: Plan, mapped: int) -> dict[str, int]:
    """What a plan adds up, in words; nothing of what takes nothing."""
    sizes = {
        "weights, mapped": mapped,
        "weights, converted" if mapped else "weights": plan.own_weights,
        "caches": plan.cache_bytes,
        f"a call, most at: {plan.typical_call.name}": plan.typical_call.nbytes,
        "positions in the rings": plan.host,
    }
    return {name: size for name, size in sizes.items() if size}


def plan_finding(process: Planned) -> Finding:
    """How far the process is off the plan; beside a plan of a few MiB it is not judged."""
    off = abs(process.took / process.planned - 1) * 100
    evidence: dict[str, JSON] = {"planned": dict(process.parts), "took": process.took}
    what = f"process that holds {process.context} positions, off the memory plan"
    if process.taken.steady and process.planned >= SHOWN_BY:
        return judged(what, off, at_most(OFF_PLAN), "%", **evidence)
    return measured(what, off, "%", **evidence)


# ---- what the page shows


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _caches_said(layers: Sequence[Allocated]) -> str:
    held = sum(sum(sizes.stored.values()) for sizes in layers)
    return f"Caches take {held:,} bytes, predicted {sum(sum(sizes.predicted.values()) for sizes in layers):,}"


def _rows_said(rows: Sequence[Rows]) -> str:
    wrong, asked = sum(len(buffer.wrong) for buffer in rows), sum(buffer.allocated for buffer in rows)
    return f"{wrong} of {asked} checked rows of caches are missing, unexpected or wrong"


def _process_said(process: Process) -> str:
    peak, (short, long) = process.peak, process.contexts
    grown = f"With {long:,} instead of {short:,} tokens a process needs {_mib(peak.peaks[1] - peak.peaks[0])} MiB more"
    return f"{grown}: {_mib(process.caches)} for caches, {_mib(peak.calls[1] - peak.calls[0])} for a call"


def _caches_table(layers: Sequence[Allocated], rows: Sequence[Rows]) -> Table:
    """Predicted, allocated and touched, by component."""
    lines: list[list[float | str | None]] = []
    last = max((buffer.position for buffer in rows), default=0)
    for component in sorted({name for sizes in layers for name in sizes.predicted.keys() | sizes.stored.keys()}):
        buffers = [buffer for buffer in rows if buffer.component == component and buffer.position == last]
        touched = [
            sum(buffer.allocated for buffer in buffers),
            sum(buffer.expected for buffer in buffers),
            sum(buffer.written for buffer in buffers),
            sum(buffer.written * buffer.row_bytes for buffer in buffers),
        ]
        holding = sum(component in sizes.stored for sizes in layers)
        predicted = sum(sizes.predicted.get(component, 0) for sizes in layers)
        held = sum(sizes.stored.get(component, 0) for sizes in layers)
        name = component.replace("_", " ")
        lines.append([name, holding, predicted, held, *(touched if buffers else [None] * 4)])
    note = (
        "Of a frontier the tokens must be there that an entry is yet to pool: those of the open window, in CSA layers"
        " of the last closed one too. Others may be left in it."
    )
    heads = ("component", "layers", "bytes predicted", "allocated", "rows", "must be there", "written", "bytes written")
    return Table(f"Caches after {last} tokens", heads, lines, note)


def _process_table(process: Process) -> Table:
    """What the process took, stage by stage."""
    peak, (short, long) = process.peak, process.contexts
    lines: list[list[float | str | None]] = [
        ["after loading", _mib(peak.base), None],
        [f"after {short} tokens", _mib(peak.peaks[0]), _mib(peak.calls[0])],
        [f"after {long} tokens more, in a state of their own", _mib(peak.peaks[1]), _mib(peak.calls[1])],
        [f"at position {process.far}", None, _mib(peak.far)],
        ["one call at most, as planned", None, _mib(process.plan)],
    ]
    note = (
        f"Predicted for the caches of the longer prompt: {_mib(process.caches)} MiB. Calls are measured by torch's"
        " profiler: the most bytes of tensors alive at one moment, beyond those from before."
    )
    return Table("Peak of a process", ("stage", "peak, MiB", "one call, MiB"), lines, note)


def _plan_bars(process: Planned) -> Bars:
    """The plan's parts on each other, beside what the process took."""
    series: dict[str, Sequence[float]] = {
        f"{name}: {_mib(size)}": (size / MIB, 0.0) for name, size in process.parts.items()
    }
    note = (
        f"Taken: beyond the {_mib(process.taken.base)} MiB that the process held before, when it had done the same once"
        " and let go of it. All of a small checkpoint's files is read while loading, to hash it."
    )
    title = f"A call of {process.chunk:,} tokens at the end of {process.context:,} positions"
    series[f"taken: {_mib(process.took)}"] = (0.0, process.took / MIB)
    return Bars(title, "MiB", ("planned", "taken"), series, note=note)


FULL = Memory()
QUICK = Memory(prompts=None)
