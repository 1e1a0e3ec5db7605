"""Experiment `memory-plan`: what a rank needs of published models, by ranks and context; nothing is measured."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from fathom.model.checkpoint.census import Census, census
from fathom.model.checkpoint.config_json import MAX_CONFIG_BYTES, read_json
from fathom.model.checkpoint.published import published_configs, published_tensors, released_scale
from fathom.model.choices import ROWS
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.files import read_bounded
from fathom.model.observe.sites import Site
from fathom.probes import memory_plan_experts as experts
from fathom.probes.finding import Bars, Finding, Part, Report, Table, Text, exactly, judged
from fathom.probes.memory import ITEM_BYTES, cache_bytes
from fathom.probes.probe import Probe, Progress, one_rank
from fathom.probes.subject import Subject
from fathom.runtime.op_sets import planned
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.planner import Plan, Planner
from fathom.runtime.plan.weights import WeightKind
from fathom.runtime.sharding import sharding_plan

GB: Final = 10**9
CONTEXTS: Final = {"8K": 1 << 13, "128K": 1 << 17, "1M": 1 << 20}
RANKS: Final = (1, 4, 8)
FORMATS: Final = {"bf16, bf16": ("dtype", "dtype"), "FP8, FP8": ("fp8", "fp8"), "FP8, FP4": ("fp8", "fp4")}

READING: Final = """\
- *weights*: as published, without the draft head, sharded over the ranks, experts by rows; norms, sinks and mHC in
  fp32, as the model holds them. Exact.
- *caches*: entries, index keys, windows and frontiers. All ranks hold all of them: one KV head serves all attention
  heads, so there is nothing to split. Exact.
- *a call*: what one call holds beside these at its largest moment, whatever the values: if all its tokens go to the
  experts of one rank, say. In brackets, if they spread evenly. A bound, from what each op keeps alive.
- *needed*: with {reserve} GB beside tensors (CUDA, NCCL, gaps between blocks), which is assumed and not measured.
- *largest context*: in the same calls, that fits {gpu:g} GB; the models end at 1,048,576 positions.

An index score for each token of a call and each entry, in fp32, would be {untiled} GB for {chunk:,} tokens at 1M:
reports of other runtimes that ran out of memory are of that. Here scores exist in tiles."""
NOT_CLAIMED: Final = """\
That a GPU was filled, or several connected: nothing here was measured on GPUs. The bytes of weights and caches are
compared with what is allocated, and a process on the CPU with the whole plan, on models of test size (memory.md, which
holds caches against published figures too). A call's bound has the scratch that the launch code of Triton's kernels
allocates; what libraries take inside of a sort or a collective is in the reserve. Of the checkpoint that the run was
given nothing is planned: the models are those of the tables."""


class Model(NamedTuple):
    """A published model, and its plans by ranks and context."""

    name: str
    digest: str  # SHA-256 of its config.json
    config: ModelConfig
    form: str  # how routed ones are stored: fp4 or fp8
    counted: Census
    plans: Mapping[tuple[int, str], Plan]
    largest: Mapping[int, int]  # context that fits, by ranks


@dataclass(frozen=True)
class MemoryPlan(Probe):
    """Plan published models by their config.json; the fields are knobs."""

    name: ClassVar[str] = "memory-plan"
    question: ClassVar[str] = "The memory plan: what does a rank need, by ranks and context?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    background: ClassVar[str] = """\
`python -m scripts.plan` makes such a table for any checkpoint or config.json, before anything is allocated, and a run
that does not fit is refused by the same numbers before a weight is read. GB are 10^9 bytes; activations are in BF16.
What is judged here is the plan's arithmetic, by formulas from config.json that it does not share: those that the probe
`memory` has for caches, the size of an expert's three matrices, and what ranks exchange for experts."""

    models: tuple[str, ...] = ("deepseek-v4-pro", "deepseek-v4-flash")  # files of model/published
    gpu_gb: float = 180.0  # of one GPU
    chunk: int = 8192  # tokens per call

    def needs(self, subject: Subject) -> str | None:
        """Names of published models, and one rank: all would say the same."""
        unknown = [name for name in self.models if name not in published_configs()]
        if unknown:
            return f"{unknown[0]}: no published model of this name; there are {', '.join(published_configs())}"
        return one_rank(subject, "it plans, and runs nothing")

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Plan each model for every number of ranks and every context."""
        del subject
        options, memory = RunOptions(device="cuda", prefill_chunk=self.chunk), int(self.gpu_gb * GB)
        models = []
        for at, name in enumerate(self.models):
            progress(at / len(self.models), name)
            models.append(_planned(published_configs()[name], options, memory))
        findings = [finding for model in models for finding in _findings(model, options)]
        on_ranks = [experts.ranked(model.name, model.config, model.counted, options) for model in models]
        findings += [finding for one in on_ranks for finding in experts.findings(one)]
        plans = [plan for model in models for plan in model.plans.values()]
        reading = READING.format(
            reserve=_gb(plans[0].reserve),
            gpu=self.gpu_gb,
            untiled=_gb(max(plan.untiled for plan in plans)),
            chunk=self.chunk,
        )
        parts: list[Part] = [
            *(_bars(model, memory) for model in models),
            *(_table(model, memory) for model in models),
            Text("How to read it", reading),
            _formats(models, options),
            *experts.parts(on_ranks),
        ]
        return Report(" ".join(_said(model, memory) for model in models), tuple(findings), tuple(parts), NOT_CLAIMED)


def _planned(path: Path, options: RunOptions, memory: int) -> Model:
    config = ModelConfig.from_file(path)
    digest = hashlib.sha256(read_bounded(path, MAX_CONFIG_BYTES, ConfigError)).hexdigest()
    form = read_json(path)["expert_dtype"]
    counted = census(published_tensors(config, form, released_scale(form)), config)
    planners = {ranks: _planner(config, counted, options, ranks) for ranks in RANKS}
    plans = {(ranks, name): planners[ranks].plan(context) for ranks in RANKS for name, context in CONTEXTS.items()}
    largest = {ranks: planner.largest_context(memory) for ranks, planner in planners.items()}
    return Model(path.stem, digest, config, form, counted, plans, largest)


def _planner(config: ModelConfig, counted: Census, options: RunOptions, ranks: int) -> Planner:
    """Of the first rank, which needs the most."""
    return Planner(config, counted, sharding_plan(config, ranks, ROWS), options, 0, planned(options))


def _findings(model: Model, options: RunOptions) -> Iterator[Finding]:
    """The plan's bytes by formulas that it does not share."""
    config, item, most = model.config, ITEM_BYTES[options.dtype], max(RANKS)
    for name, context in CONTEXTS.items():
        wanted = sum(cache_bytes(config, context, options.prefill_chunk, item).values())
        yield judged(f"{model.name}: caches at {name}", model.plans[1, name].cache_bytes, exactly(wanted), "B")
    weights = config.num_hidden_layers * config.n_routed_experts * 3 * config.hidden_size * config.moe_intermediate_size
    own, stored = weights // most, model.plans[most, "1M"].weights[WeightKind.ROUTED].own
    if model.form == "fp4":
        told, wanted = "FP4 and a byte of scale for 32 weights", own // 2 + own // 32
    else:
        told, wanted = "FP8 and four bytes of scale for 128 x 128 weights", own + own // 128**2 * 4
    yield judged(f"{model.name}: routed experts on each of {most} ranks, {told}", stored, exactly(wanted), "B")


def _said(model: Model, memory: int) -> str:
    """On how many ranks a million tokens of a model fit."""
    enough = [ranks for ranks in RANKS if model.plans[ranks, "1M"].needed <= memory]
    if not enough:
        return f"{model.name} with 1M tokens fits on none of {', '.join(map(str, RANKS))} GPUs of {memory / GB:g} GB."
    needed = _gb(model.plans[enough[0], "1M"].needed)
    gpus = f"{enough[0]} GPU{'s' * (enough[0] > 1)} of {memory / GB:g} GB"
    return f"{model.name} with 1M tokens fits on {gpus}: {needed} GB of each."


def _bars(model: Model, memory: int) -> Bars:
    plans = model.plans.values()
    series = {
        "weights": [plan.own_weights / GB for plan in plans],
        "caches": [plan.cache_bytes / GB for plan in plans],
        "a call": [plan.call.nbytes / GB for plan in plans],
        "beside tensors": [(plan.host + plan.reserve) / GB for plan in plans],
    }
    groups = tuple(f"{context}, {ranks} rank{'s' * (ranks > 1)}" for ranks, context in model.plans)
    title = f"{model.name}: what each rank needs"
    return Bars(title, "GB", groups, dict(series), limits={f"a GPU of {memory / GB:g} GB": memory / GB})


def _table(model: Model, memory: int) -> Table:
    most = max(RANKS)
    plan = model.plans[most, "1M"]
    kinds = ", ".join(f"{kind.value} {_gb(part.own)}" for kind, part in plan.weights.items())
    note = (
        f"In calls of {plan.chunk:,} tokens. Weights of one of {most} ranks, GB: {kinds}. A call at 1M on {most} ranks"
        f" holds most during: {plan.call.name}. SHA-256 of config.json: {model.digest}."
    )
    heads = ("ranks", "context", "weights", "caches", "a call", "needed", f"fits {memory / GB:g} GB", "largest context")
    return Table(model.name, heads, [*_rows(model, memory)], note)


def _rows(model: Model, memory: int) -> Iterator[list[float | str | None]]:
    for (ranks, context), plan in model.plans.items():
        gap = (memory - plan.needed) / GB
        yield [
            ranks,
            context,
            _gb(plan.own_weights),
            _gb(plan.cache_bytes),
            f"{_gb(plan.call.nbytes)} ({_gb(plan.typical_call.nbytes)})",
            _gb(plan.needed),
            f"yes, {gap:.1f} left" if gap >= 0 else f"no, {-gap:.1f} missing",
            f"{model.largest[ranks]:,}" if model.largest[ranks] else "none",
        ]


def _formats(models: list[Model], options: RunOptions) -> Table:
    rows: list[list[float | str | None]] = []
    for model in models:
        sizes = [_rows_bytes(model, replace(options, entry_format=e, key_format=k)) for e, k in FORMATS.values()]
        rows.append([model.name, *(f"{size / GB:.2f}" for size in sizes)])
    note = "Entries and index keys of all layers, in GB. In `deployed` numerics all forms give the same numbers."
    return Table("Cache formats at 1M", ("model", *FORMATS), rows, note)


def _rows_bytes(model: Model, options: RunOptions) -> int:
    caches = _planner(model.config, model.counted, options, 1).plan(CONTEXTS["1M"]).caches
    return sum(parts.get(name, 0) for parts in caches.values() for name in ("entries", "indexer_keys"))


def _gb(size: int) -> str:
    return f"{size / GB:.2f}" if size < 100 * GB else f"{size / GB:.1f}"


FULL = MemoryPlan()
QUICK = MemoryPlan(models=("deepseek-v4-flash",))
