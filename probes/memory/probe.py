"""Probe: whether the caches are as large as predicted and written where they should be, and nothing else grows."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.ops import CPU
from model.cache.formats import CacheFormats
from model.cache.layers import Components
from model.checkpoint.weights import HASHED_WHOLE
from model.config import ModelConfig
from model.errors import Tripwire
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Site
from model.state import State
from model.transformer import Transformer
from probes.finding import Finding, Part, Report, Text, broken, exactly, judged, tripped
from probes.memory import page, peak
from probes.memory.plan import IN_DTYPE, ITEM_BYTES, cache_bytes, call_bytes, layer_bytes, naive_bytes, shaped
from probes.memory.rows import Rows, Written, look, poison
from probes.probe import Probe, Progress, one_rank, room
from probes.subject import Subject
from runtime.plan.planner import Plan, Planner

DECODED = 5  # of the tokens, one by one at the end


@dataclass(frozen=True)
class Memory(Probe):
    """Count the bytes by hand, in the buffers, and in a process."""

    name: ClassVar[str] = "memory"
    question: ClassVar[str] = "Do the caches take what the arithmetic says, and does nothing else grow with the prompt?"
    reads: ClassVar[tuple[Site, ...]] = (sites.KV, sites.ENTRY, sites.INDEX_KEY_USED)
    of_fathom: ClassVar[bool] = True
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
grew by different amounts until every large tensor was mapped on its own.

What one call takes does grow with the context at first, until every tile is full, and then no more (see also
long-context.md). Most of the peak itself was there before the first token: torch."""

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
        return max(self.tokens, once_round, 2 * max(config.compress_ratios)) + DECODED

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Allocated and touched in this process, the peak in another, unless a tripwire ended the run here."""
        config, model, item = subject.config, subject.model, ITEM_BYTES[subject.options.dtype]
        formats = (subject.options.entry_format, subject.options.key_format)
        tokens, chunk = subject.tokens(self._count(config)), subject.options.prefill_chunk
        progress(0.0, "caches")
        state = model.new_state(len(tokens) + _spare(config), self.chunk)
        layers = _allocated(config, state, self.chunk, item, formats)
        figures = _figures(config)
        findings = [*page.allocation_findings(layers), _whole_context(subject), *page.figure_findings(figures)]
        progress(0.05, f"a prompt of {len(tokens)} tokens in poisoned caches")
        rows: list[Rows] = []
        trip = _touch(model, state, tokens, self.chunk, rows)
        findings += [trip] if trip else page.row_findings(rows)
        parts: list[Part] = [page.caches_table(layers, rows), page.figures_table(figures)]
        parts += [page.million_table(config, chunk, item, formats), page.context_plot(config, chunk, item, formats)]
        process = None
        if self.prompts is not None and trip is None:
            if why := peak.cannot_carry(subject):
                parts.append(Text("Peak of a process", f"Not measured: {why}."))
            else:
                progress(0.2, "a process of its own")
                process, ended = self._process(subject, self.prompts)
                findings += page.process_findings(process) if process else [broken("tripwire in the process", ended)]
                parts += [page.process_table(process)] if process else []
                progress(0.6, "a process of its own against the memory plan")
                self._against_plan(subject, findings, parts)
        progress(1.0, "done")
        said = page.summary(layers, rows, process, None if trip is None else str(trip.evidence["why"]))
        return Report(said, tuple(findings), tuple(parts), page.NOT_CLAIMED)

    def _process(self, subject: Subject, prompts: tuple[int, int]) -> tuple[page.Process | None, str]:
        """What the process took, or the tripwire that ended it."""
        config, chunk, item = subject.config, subject.options.prefill_chunk, ITEM_BYTES[subject.options.dtype]
        formats = (subject.options.entry_format, subject.options.key_format)
        room = config.max_position_embeddings - peak.DECODED - chunk
        each = naive_bytes(config, 1, chunk, item)["streams of the whole prompt"]
        short = min(prompts[0], room // 8)
        long = min(max(prompts[1], short + 3 * page.SLACK // (2 * each)), room)  # were they kept, it would show
        far = min(self.far, config.max_position_embeddings) - chunk
        taken = peak.measure(subject, (short, long), far)
        if isinstance(taken, str):
            return None, taken
        process = page.Process(
            (short, long),
            far,
            taken,
            sum(cache_bytes(config, long + peak.DECODED + chunk, chunk, item, formats).values()),
            call_bytes(config, chunk, item),
            each * (long - short),
            subject.ops.name == CPU.name,
            # the fingerprint of a small checkpoint reads all of it while loading
            subject.options.device != "cpu" or subject.load().census.nbytes <= HASHED_WHOLE,
        )
        return process, ""

    def _against_plan(self, subject: Subject, findings: list[Finding], parts: list[Part]) -> None:
        """Hold a process against what `runtime.plan` says of it."""
        loaded, options = subject.load(), subject.options
        on_cpu = options.device == "cpu"
        if subject.ops.name != CPU.name:
            parts.append(Text("The memory plan", f"Not measured: it is of the cpu ops, not of {subject.ops.name}."))
            return
        if on_cpu and loaded.census.nbytes > HASHED_WHOLE:
            why = (
                f"of more than {HASHED_WHOLE >> 20} MiB not all is read while loading, so what is resident is not known"
            )
            parts.append(Text("The memory plan", f"Not measured: {why}."))
            return
        context = min(self.planned[0], subject.config.max_position_embeddings)
        chunk = min(self.planned[1], context // 2)
        planner = Planner(subject.config, loaded.census, loaded.sharding, options, 0, subject.ops.name)
        mapped = loaded.census.nbytes if on_cpu else 0
        sizes = _planned(planner.plan(context, chunk), mapped)
        while sum(sizes.values()) < page.SHOWN_BY and 4 * chunk <= context:  # narrow layers: more tokens show it
            chunk *= 2
            sizes = _planned(planner.plan(context, chunk), mapped)
        taken = peak.beyond_base(subject, context, chunk)
        if isinstance(taken, str):
            findings.append(broken("tripwire in the process", taken))
            return
        process = page.Planned(context, chunk, taken, sizes)
        findings.append(page.plan_finding(process))
        parts.append(page.plan_table(process))


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


def _spare(config: ModelConfig) -> int:
    """Positions beyond the tokens, so that every cache has rows that nothing may touch."""
    return max(128, *config.compress_ratios)


def _allocated(
    config: ModelConfig, state: State, chunk: int, item: int, formats: tuple[str, str] = IN_DTYPE
) -> list[page.Allocated]:
    """The three counts of each layer's bytes."""
    context = state.max_context
    return [
        page.Allocated(layer_bytes(config, layer, context, chunk, item, formats), _storages(cache), cache.nbytes())
        for layer, cache in enumerate(state.layers)
    ]


def _storages(cache: Components) -> dict[str, int]:
    """Bytes of the storages behind a cache's tensors, by component; a storage that two share counts once."""
    names = {"ring": "window", "keys": "indexer_keys", "key_frontier": "indexer_frontier"}
    seen: set[int] = set()
    found: dict[str, int] = {}
    for attribute, part in vars(cache).items():
        if isinstance(part, Mapping):
            continue  # the same parts again, by name
        values = [held if isinstance(held, tuple) else (held,) for held in vars(part).values()]
        for tensor in itertools.chain.from_iterable(values):  # the planes of a narrow form are a tuple
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage()).data_ptr() not in seen:
                seen |= {storage.data_ptr()} if storage.nbytes() else set()
                name = names.get(attribute, attribute)
                found[name] = found.get(name, 0) + storage.nbytes()
    return found


def _whole_context(subject: Subject) -> Finding:
    """A state for all positions that the model has, made on torch's meta device."""
    config, chunk = subject.config, subject.options.prefill_chunk
    positions, options = config.max_position_embeddings, subject.options
    claimed = State(config, positions, chunk, subject.model.arithmetic.formats, torch.device("meta")).nbytes()
    formats = (options.entry_format, options.key_format)
    wanted = cache_bytes(config, positions, chunk, ITEM_BYTES[options.dtype], formats)
    what = f"bytes of a state for {positions} positions"
    return judged(what, sum(claimed.values()), exactly(sum(wanted.values())), "B", predicted=wanted, claimed=claimed)


def _figures(config: ModelConfig) -> list[page.Figure]:
    """Figures of published models, all of them for BF16; MB and GB are powers of ten. One of them was published."""
    arithmetic, pro = "by hand from config.json", "that vLLM published"

    def state(csa: int, hca: int, swa: int, context: int) -> dict[str, int]:
        published = shaped(config, csa, hca, swa)
        return State(
            published, context, 1, CacheFormats(torch.bfloat16, "dtype", "dtype"), torch.device("meta")
        ).nbytes()

    def compressed(sizes: dict[str, int]) -> int:
        return sizes["entries"] + sizes["indexer_keys"]

    csa, hca = state(1, 0, 0, page.MILLION), state(0, 1, 0, page.MILLION)
    whole, pro_20, flash_20 = state(30, 31, 0, page.MILLION), state(30, 31, 0, 1 << 20), state(21, 20, 2, 1 << 20)
    everything = compressed(whole) + whole["window"]
    return [
        page.Figure("entries of a CSA layer, 1,000,000 tokens", 256, csa["entries"] / 1e6, "MB", 0, arithmetic),
        page.Figure("index keys of a CSA layer, 1,000,000 tokens", 64, csa["indexer_keys"] / 1e6, "MB", 0, arithmetic),
        page.Figure("entries of an HCA layer, 1,000,000 tokens", 8, hca["entries"] / 1e6, "MB", 0.5, arithmetic),
        page.Figure("KV of V4-Pro, 1,000,000 tokens", 9.86, everything / 1e9, "GB", 0.005, arithmetic),
        page.Figure("V4-Pro by the token", 9848, compressed(pro_20) / (1 << 20), "B", 0, arithmetic),
        page.Figure("V4-Flash by the token", 6880, compressed(flash_20) / (1 << 20), "B", 0, arithmetic),
        page.Figure("KV of V4-Pro, 2^20 tokens", 9.62, compressed(pro_20) / (1 << 30), "GiB", 0.005, pro),
    ]


def _touch(model: Transformer, state: State, tokens: list[int], chunk: int, rows: list[Rows]) -> Finding | None:
    """Run in poisoned caches; looks at all rows after the first call and after the last, returns what ended the run."""
    poison(state)
    written = Written(len(state.layers))
    ids = torch.tensor(tokens, device=model.device)
    calls = (*ids[:-DECODED].split(chunk), *ids[-DECODED:].split(1))
    try:
        with listening(model, written.listeners()):
            for call, part in enumerate(calls):
                model(part, state)
                if call in (0, len(calls) - 1):
                    rows += look(state, written)
    except Tripwire as trip:
        return tripped(trip)
    return None


FULL = Memory()
QUICK = Memory(prompts=None)
