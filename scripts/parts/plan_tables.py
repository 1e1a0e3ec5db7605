"""What `scripts.plan` shows of a run of one context: the memory that each rank needs, part by part."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

from fathom.model.architectures import Config, config_from_file
from fathom.model.checkpoint.census import Census, census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.config_json import read_json
from fathom.model.checkpoint.filling import HOST_BYTES
from fathom.model.checkpoint.mtp import announced
from fathom.model.checkpoint.published import EXPERT_DTYPES, Experts, published_tensors, released_scale
from fathom.model.checkpoint.tensor_mapping import Form, Stored
from fathom.model.choices import OFF
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.llama.adapters import check_adapters
from fathom.model.llama.census import census as llama_census
from fathom.model.llama.census import parameters
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import GroupedShard
from fathom.runtime.drafting import bound, check_draft, check_head
from fathom.runtime.kv import variants
from fathom.runtime.memory import machine_memory
from fathom.runtime.op_sets import planned
from fathom.runtime.options import DEMO, NEW_TOKENS, RunOptions, check_options, check_ranks
from fathom.runtime.output import write_json
from fathom.runtime.plan.exchanges import EXCHANGE
from fathom.runtime.plan.experts import Choice, Work, faster
from fathom.runtime.plan.gpus import GPUS, named
from fathom.runtime.plan.planner import DRAFTING, LOADED, Plan, Planner
from fathom.runtime.plan.token import LAUNCH, Token
from fathom.runtime.sharding import ShardingPlan, sharding_plan
from fathom.scripts.console import Console
from fathom.scripts.flags import run_options
from fathom.scripts.parts import plan_experts

GIB: Final = 1 << 30
HOME: Final = "b200"  # whose bandwidth a token's arithmetic takes where no GPU is named
DOES_NOT_FIT: Final = 1
TELL: Final = "--prompt-tokens tells its length"
RANKS: Final = (1, 2, 4, 8, 16, 32, 64)  # that are tried; each divides the next, so that a rank never gets more


def show_plan(args: argparse.Namespace, config: Config) -> int:
    """Show the plan for a model of this config; returns the exit status."""
    options = run_options(args)
    check_options(config, options, where := args.config or args.model or DEMO)
    check_ranks(config, args.ranks or 1, where)
    check_prompt(args, options, config, args.context)
    subject = read_subject(args.model, args.config, args.expert_dtype, args.headers, options.draft, args.prompt_tokens)
    if args.context > (most := subject.config.max_position_embeddings):
        raise CapacityError(f"--context {args.context}: beyond the model's max_position_embeddings {most}")
    choice = chosen(args, subject, options, args.ranks or 1)
    planners = ranked(subject, options if choice is None else replace(options, experts=choice.way), args.ranks or 1)
    plans = [planner.plan(args.context) for planner in planners]
    worst = max(range(len(plans)), key=lambda rank: plans[rank].needed)
    memory = memory_of_rank(args, options, len(plans))
    data = summary(subject, planners[worst], plans, memory)
    if memory is not None and options.device == "cuda":  # ranks on a CPU share one memory
        fitting = (n for n, planner in by_ranks(args, subject, options) if planner.plan(args.context).needed <= memory)
        data["fits_from_ranks"] = next(fitting, None)
    gpu = estimated_on(args)
    if gpu is not None and (rates := GPUS[gpu].rates) is not None:
        data["token"] = _token(planners[worst].token(args.context, rates))
    data["experts"] = None
    if choice is not None:
        ways = plan_experts.both_ways(planners[0], len(planners))
        data["experts"] = plan_experts.summary(choice, asked(args, options), gpu, ways)
    console = Console()
    console.say(*_verdict(data))
    for table in _tables(data, gpu):
        console.print(table)
    for line in _remarks(data):
        console.say(line)
    if args.json is not None:
        write_json(args.json, data)
    return DOES_NOT_FIT if data["fits"] is False else 0


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned for."""

    config: Config
    counted: Census
    source: str  # where the weights' sizes are from
    prompt: int | None = None  # tokens of the prompt, where that is told


def check_prompt(args: argparse.Namespace, options: RunOptions, config: Config, context: int) -> bool:
    """Whether a cache depends on the prompt.

    ConfigError for a prompt or an answer that is told where nothing depends on it, CapacityError for a prompt that is
    longer than the context.
    """
    prompted = any(isinstance(variant, GroupedShard) for variant in variants(options.kv, config))
    laid_out = isinstance(config, ModelConfig) and (args.ranks or 1) > 1
    prompt = args.prompt_tokens
    if prompt is not None and not prompted and not laid_out:
        raise ConfigError(
            f"--prompt-tokens {prompt}: no cache depends on it, but --kv shard of a Llama-family model's; where experts"
            " lie does, on several --ranks (V4)"
        )
    if args.new_tokens is not None and not laid_out:
        raise ConfigError(f"--new-tokens {args.new_tokens}: where experts lie depends on it, on several --ranks (V4)")
    if prompt is not None and prompt > context:
        raise CapacityError(f"--prompt-tokens {prompt}: the context has {context} positions")
    return prompted


def read_subject(
    model: Path | None,
    config: Path | None,
    experts: Experts | None,
    headers: Mapping[str, Stored] | None = None,
    draft: str = OFF,
    prompt: int | None = None,
) -> Subject:
    """Read a checkpoint's headers, or a config.json alone; ConfigError or CheckpointError naming what is wrong.

    `headers` are those that the hub told, where the files are not here. `draft` is what drafts tokens, `prompt` how
    many the prompt has.
    """
    if config is not None:
        facts = config_from_file(config)
        if isinstance(facts, LlamaConfig):
            return replace(_published_llama(facts), prompt=prompt)
        return _published(facts, config, experts, draft)
    directory = model or DEMO
    facts = config_from_file(directory / "config.json")
    stored = Checkpoint.open(directory).shapes() if headers is None else headers
    where, source = str(directory), "headers of the checkpoint's files"
    if isinstance(facts, LlamaConfig):
        return Subject(facts, llama_census(stored, facts, where), source, prompt)
    counted = census(stored, facts, where=where, head=bound(draft))
    check_head(counted, draft, where)
    return Subject(facts, counted, source)


def _published_llama(facts: LlamaConfig) -> Subject:
    tensors = {name: (Form.BF16.name, part.shape) for name, part in parameters(facts).items()}
    return Subject(facts, llama_census(tensors, facts), "every parameter in BF16")


def _published(facts: ModelConfig, path: Path, experts: Experts | None, draft: str) -> Subject:
    obj = read_json(path)
    said = obj.get("expert_dtype") if facts.v41 is None else obj["quantization_config"].get("expert_dtype")
    chosen = experts or next((form for form in EXPERT_DTYPES if form == said), None)
    if chosen is None:
        found = "no expert_dtype" if said is None else f"expert_dtype {said!r:.40}"
        raise ConfigError(f"{path}: {found}: say how routed experts are stored, with --expert-dtype fp4 or fp8")
    head = announced(facts) if bound(draft) else None
    tensors = published_tensors(facts, chosen, released_scale(chosen), head)
    told = "config.json" if experts is None else f"--expert-dtype, config.json says {said or 'nothing'}"
    without = f"with draft head {head}" if head else "without draft head"
    source = f"as DeepSeek publishes such a model, routed experts in {chosen} ({told}), {without}"
    counted = census(tensors, facts, head=head is not None)
    check_head(counted, draft, str(path))
    return Subject(facts, counted, source)


def estimated_on(args: argparse.Namespace) -> str | None:
    """The GPU whose rates times are estimated with: the one that is named, or is here; None: on a CPU nothing is."""
    if args.device != "cuda":
        return None
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return args.gpu or (HOME if here is None else named(here))


def asked(args: argparse.Namespace, options: RunOptions) -> Work:
    """For what work experts are laid on ranks: a prompt that is not told has the tokens of a call."""
    call = min(options.prefill_chunk, args.context or options.prefill_chunk)
    return Work(args.prompt_tokens or call, args.new_tokens or NEW_TOKENS)


def chosen(args: argparse.Namespace, subject: Subject, options: RunOptions, ranks: int) -> Choice | None:
    """How experts lie on so many ranks; None on one, and where there are none. ConfigError where they cannot lie so."""
    if not isinstance(subject.config, ModelConfig) or ranks == 1:
        return None
    return faster(subject.config, subject.counted, options, ranks, estimated_on(args), asked(args, options))


def ranked(subject: Subject, options: RunOptions, ranks: int) -> list[Planner]:
    """Return a planner for each rank; ConfigError for ranks, numerics, adapters or drafts that are not allowed."""
    if options.coda_adapters is not None:
        assert isinstance(subject.config, LlamaConfig), "other models have none"
        check_adapters(Path(options.coda_adapters), subject.config, variants(options.kv, subject.config))
    sharding = sharding_plan(subject.config, ranks, options.experts)
    return [_planner(subject, sharding, options, rank) for rank in range(ranks)]


def by_ranks(args: argparse.Namespace, subject: Subject, options: RunOptions) -> Iterator[tuple[int, Planner]]:
    """Numbers of ranks that the model can be on, and the planner of the first one, which needs the most."""
    for ranks in RANKS if options.device == "cuda" else (1,):
        try:
            choice = chosen(args, subject, options, ranks)
            sharding = sharding_plan(subject.config, ranks, options.experts if choice is None else choice.way)
        except ConfigError:  # experts that do not divide
            continue
        yield ranks, _planner(subject, sharding, options, 0)


def _planner(subject: Subject, sharding: ShardingPlan, options: RunOptions, rank: int) -> Planner:
    """Return a rank's planner; ConfigError for drafts that no run would make."""
    planner = Planner(subject.config, subject.counted, sharding, options, rank, planned(options), subject.prompt)
    check_draft(subject.config, options, planner.ops)
    return planner


def fits_from(needed: Mapping[int, int], memory: int) -> int | None:
    """From how many ranks on it fits, of what is needed by number of ranks; None where it does on none of these."""
    return min((ranks for ranks, size in needed.items() if size <= memory), default=None)


def summary(subject: Subject, planner: Planner, plans: Sequence[Plan], memory: int | None) -> dict[str, Any]:
    """Everything that is shown, as JSON values; `planner` is that of the rank which needs most."""
    plan = plans[planner.rank]
    return {
        "config_fingerprint": subject.config.fingerprint,
        "weights_from": subject.source,
        "options": planner.options.to_json(),
        "ranks": len(plans),
        "context": plan.context,
        "chunk": plan.chunk,
        "prompt": plan.prompt,
        "prompt_told": planner.prompt is not None,
        "rank": plan.rank,
        "weights": {
            kind.value: {"stored": part.stored, "mapped": part.mapped, "own": part.own, "on_every_rank": part.whole}
            for kind, part in plan.weights.items()
        },
        "caches": {str(kind): dict(parts) for kind, parts in plan.caches.items()},
        "call": {"moment": plan.call.name, "bytes": plan.call.nbytes, "parts": dict(plan.call.parts)},
        "typical_call": {"moment": plan.typical_call.name, "bytes": plan.typical_call.nbytes},
        "untiled_index_scores": plan.untiled,
        "graph": plan.graph,
        "host": plan.host,
        "reserve": plan.reserve,
        "load_seconds": plan.load_seconds if planner.options.device == "cuda" else None,
        "needed": plan.needed,
        "needed_by_rank": [one.needed for one in plans],
        "not_split": list(planner.sharding.replicated),
        "caches_split": planner.sharding.ranks[planner.rank].kv_heads.split,
        "memory": memory,
        "fits": None if memory is None else plan.needed <= memory,
        "largest_context": None if memory is None else planner.largest_context(memory),
        "largest_chunk": None if memory is None else planner.largest_chunk(memory, plan.context),
    }


def memory_of_rank(args: argparse.Namespace, options: RunOptions, ranks: int) -> int | None:
    """Bytes for each rank: a GPU's, or its part of this machine's, as a run of so many ranks here would be held to."""
    if args.gpu is not None:
        return int(GPUS[args.gpu].gib * GIB)
    if args.memory_gib is not None:
        return int(args.memory_gib * GIB)
    if options.device == "cuda" and not torch.cuda.is_available():
        return None
    memory = machine_memory(torch.device(options.device))
    return memory // ranks if options.device == "cpu" else memory


def _tables(data: dict[str, Any], gpu: str | None) -> list[Table]:
    tables = [_weight_table(data), _memory_table(data)]
    if data.get("token"):
        tables.append(_token_table(data, gpu))
    return tables if data["experts"] is None else tables + plan_experts.tables(data["experts"])


def _weight_table(data: dict[str, Any]) -> Table:
    table = Table("kind", title=f"weights of rank {data['rank']} of {data['ranks']}")
    for column in ("bytes", "", "share", "on every rank, as stored"):
        table.add_column(column, justify="right")
    sizes = {name: part["mapped"] + part["own"] for name, part in data["weights"].items()}
    whole = {name: part["on_every_rank"] for name, part in data["weights"].items()}
    everything = sum(sizes.values())
    for name, size in sizes.items():
        table.add_row(name, *_cells(size, everything), said(whole[name]) if whole[name] else "-")
    table.add_section()
    table.add_row("all weights", *_cells(everything, everything), said(sum(whole.values())))
    return table


def _memory_table(data: dict[str, Any]) -> Table:
    table = Table("what", title=f"memory for {data['context']:,} positions in calls of {data['chunk']:,} tokens")
    for column in ("bytes", "", "share"):
        table.add_column(column, justify="right")
    needed = data["needed"]
    own = sum(part["own"] for part in data["weights"].values())
    table.add_row("weights" if data["options"]["device"] == "cuda" else "converted weights", *_cells(own, needed))
    table.add_section()
    for kind, parts in data["caches"].items():
        for component, size in parts.items():
            layers = {"attention": "layers", DRAFTING: DRAFTING}.get(kind, f"{kind.upper()} layers")
            table.add_row(f"{layers}: {component.replace('_', ' ')}", *_cells(size, needed))
    table.add_section()
    for name, size in data["call"]["parts"].items():
        if size:
            table.add_row(f"a call, at most: {name}", *_cells(size, needed))
    if data["graph"]:
        table.add_row("a captured token: its graph's pool and buffers", *_cells(data["graph"], needed))
    table.add_section()
    table.add_row("beside tensors, assumed", *_cells(data["host"] + data["reserve"], needed))
    table.add_section()
    table.add_row("needed", *_cells(needed, needed))
    return table


def _token(token: Token | None) -> dict[str, Any] | None:
    if token is None:
        return None
    return {
        "read": dict(token.read),
        **plan_experts.of_token(token),
        "launches": token.launches,
        "bandwidth": token.rates.bandwidth,
        "link": token.rates.link,
        "caches_cut_from": token.cut_from,
        "caches_cut_spare": token.spared,
    }


def _token_table(data: dict[str, Any], gpu: str | None) -> Table:
    token = data["token"]
    seconds, bandwidth = token["seconds"], token["bandwidth"]
    table = Table(
        "what", title=f"a decoded token after {data['context']:,} positions, on {gpu}: by arithmetic, no drafts"
    )
    for column in ("count", "bytes of each", "microseconds"):
        table.add_column(column, justify="right")
    for name, size in token["read"].items():
        if size:
            table.add_row(f"read: {name}", "", f"{size:,}", f"{1e6 * size / bandwidth:,.1f}")
    table.add_section()
    for one in token["exchanges"]:
        taken = f"{1e6 * one['seconds']:,.1f}"
        table.add_row(f"exchange: {one['what']}", f"{one['times']:,}", f"{one['nbytes']:,}", taken)
    table.add_row("launches", f"{token['launches']:,}", "", f"{1e6 * seconds['launches']:,.1f}")
    table.add_section()
    table.add_row("one after the other", "", f"{sum(token['read'].values()):,}", f"{1e6 * seconds['all']:,.1f}")
    return table


def _cells(size: int, of: int) -> tuple[str, str, str]:
    return f"{size:,}", said(size), f"{100 * size / of:.1f} %"


def _remarks(data: dict[str, Any]) -> list[str]:
    lines = [f"weights: {data['weights_from']}"]
    if mapped := sum(part["mapped"] for part in data["weights"].values()):
        lines.append(f"mapped from files, {said(mapped)}: not counted, the system drops pages and reads them again")
    if data["load_seconds"] is not None:
        buffers = f"through {said(HOST_BYTES)} of pinned buffers on the host"
        lines.append(f"load at {LOADED / 1e9:g} GB/s, assumed: {data['load_seconds']:.2g} s for each rank, {buffers}")
    lines.append(_caches(data))
    call, typical = data["call"], data["typical_call"]
    lines.append(f"a call holds most at: {call['moment']}; no values of tensors make it more")
    if typical["bytes"] != call["bytes"]:
        lines.append(
            "where tokens spread evenly over experts and few entries pass the indexer's comparisons:"
            f" {said(typical['bytes'])} at: {typical['moment']}"
        )
    if data["untiled_index_scores"]:
        lines.append(f"index scores of a call made at once would take {said(data['untiled_index_scores'])} more")
    if data["ranks"] > 1:
        lines += _ranks(data)
    if token := data.get("token"):
        lines.append(
            f"a token's arithmetic assumes {token['bandwidth'] / 1e12:g} TB/s of memory, {token['link'] / 1e9:g} GB/s"
            f" between ranks, {1e6 * EXCHANGE:g} microseconds an exchange, {1e6 * LAUNCH:g} a launch: not measured"
        )
    return lines


def _ranks(data: dict[str, Any]) -> list[str]:
    """What is on every rank, where experts lie, and what cutting the caches would save."""
    lines = []
    if not data["caches_split"] and "attention" not in data["caches"]:  # of V4: kinds of layers
        lines.append("on every rank, because one KV head serves all attention heads: all caches")
    lines += [f"on every rank, because it cannot be split: {why}" for why in data["not_split"]]
    if data["experts"] is not None:
        lines.append(f"experts on ranks: {data['experts']['way']}, {data['experts']['why']}")
    if (token := data.get("token")) and token["caches_cut_from"] is not None:
        lines.append(
            "CSA's caches, cut over ranks instead of whole on each, would save a token time from"
            f" {token['caches_cut_from']:,} positions on, and each rank {said(token['caches_cut_spare'])}"
        )
    return lines


def _caches(data: dict[str, Any]) -> str:
    """How layers remember, and of which prompt where that matters."""
    caches = f"caches: {' '.join(data['options']['kv']) or 'all=full'}"
    if data["prompt"] is None:
        return caches
    caches += f", for a prompt of {data['prompt']:,} tokens"
    if data["prompt_told"]:
        return caches
    return f"{caches}, which of all takes most, and calls for one of {data['context']:,}; {TELL}"


def _verdict(data: dict[str, Any]) -> list[str]:
    memory, each = data["memory"], " on each rank" if data["ranks"] > 1 else ""
    if memory is None:
        return [f"needed{each}: {said(data['needed'])}; --memory-gib asks whether that fits"]
    gap = memory - data["needed"]
    fits = f"fits in {said(memory)}{each}, {said(gap)} to spare"
    lines = [fits if gap >= 0 else f"does not fit in {said(memory)}{each}: {said(-gap)} missing"]
    chunk = data["options"]["prefill_chunk"]
    if (ranks := data.get("fits_from_ranks")) is not None and (ranks > data["ranks"] or gap >= 0):
        lines.append(f"fits from {ranks} rank{'s' * (ranks > 1)} of {said(memory)} on")
    elif "fits_from_ranks" in data and gap < 0:
        lines.append(f"fits on none of {', '.join(map(str, RANKS))} ranks of {said(memory)}")
    largest = f"largest context that fits, in calls of {chunk:,} tokens: {data['largest_context']:,}"
    count = data["ranks"]
    lines.append(largest if data["largest_context"] else f"no context fits on {count} rank{'s' * (count > 1)}")
    if data.get("largest_chunk"):
        lines.append(f"longest call that fits, with {data['context']:,} positions: {data['largest_chunk']:,} tokens")
    return lines


def said(size: int) -> str:
    """Return a number of bytes as it is shown."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} B"
