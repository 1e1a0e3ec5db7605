"""A checkpoint directory to a model that runs."""

import hashlib
import platform
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from fathom.kernels.ops import CPU, Ops
from fathom.model.architectures import Config, Model
from fathom.model.arithmetic import Arithmetic
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.census import census as v4_census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import Head
from fathom.model.checkpoint.weights import Weights, fingerprint, headers_digest, open_weights
from fathom.model.choices import OFF
from fathom.model.config import ModelConfig
from fathom.model.draft import DraftHead, build_head
from fathom.model.errors import CheckpointError, ConfigError
from fathom.model.llama.adapters import adapters_fingerprint, read_adapters
from fathom.model.llama.census import census as llama_census
from fathom.model.llama.census import check_tied_head
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.trained import check_learnt, check_trained
from fathom.model.llama.transformer import LlamaTransformer
from fathom.model.observe.observer import LLAMA_PLACES, install, places_of
from fathom.model.ranks.dispatch import tables
from fathom.model.ranks.mailbox import Table
from fathom.model.ranks.ranks import ALONE, Group, Ranks, evenly, splits
from fathom.model.transformer import Transformer
from fathom.model.v41 import TransformerV41
from fathom.runtime.arithmetic import arithmetic, cache_formats
from fathom.runtime.drafting import bound, check_head
from fathom.runtime.kernels import prepare_kernels
from fathom.runtime.kv import check_bases, variants
from fathom.runtime.loops import prepare_loops
from fathom.runtime.memory import check_fits
from fathom.runtime.options import RunOptions, check_ranks, checked_config
from fathom.runtime.plan.experts import Choice, Work, faster
from fathom.runtime.plan.gpus import named
from fathom.runtime.plan.planner import Planner
from fathom.runtime.sharding import ShardingPlan, sharding_plan, tokens_of_ranks
from fathom.runtime.text.alike import numbers_of

M = TypeVar("M")


class Loaded(NamedTuple, Generic[M]):
    """A model and where it came from."""

    model: M
    census: Census
    weights_fingerprint: str  # see `model.checkpoint.weights.fingerprint`; of the adapters too, where there are some
    directory: Path
    sharding: ShardingPlan
    held: dict[str, int]  # bytes of this rank's part of each parameter, as stored
    experts: Choice | None  # how they lie on several ranks, and why; None: on one, or there are none
    head: DraftHead | None = None  # what drafts tokens for it, where it is asked for


LoadedV4: TypeAlias = Loaded[Transformer]
LoadedLlama: TypeAlias = Loaded[LlamaTransformer]
AnyLoaded: TypeAlias = Loaded[Transformer] | Loaded[LlamaTransformer]


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have: ConfigError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device on this machine")


def read_config(directory: Path, options: RunOptions) -> ModelConfig:
    """Read the config of a V4 checkpoint that these options can run here; ConfigError where they cannot."""
    ModelConfig.from_file(directory / "config.json")  # what it is not is said in its words
    config = read_any_config(directory, options)
    assert isinstance(config, ModelConfig), "read as one"
    return config


def read_any_config(directory: Path, options: RunOptions) -> Config:
    """Read the config of a checkpoint of either architecture that these options can run here, as `read_config`."""
    config = checked_config(directory, options)
    check_device(options.device)
    variants(options.kv, config)
    return config


def load_any(
    directory: Path,
    options: RunOptions,
    ops: Ops = CPU,
    group: Group = ALONE,
    *,
    context: int | None = None,
    work: Work | None = None,
    follow: Callable[[Ranks], None] = lambda _: None,
) -> AnyLoaded:
    """Load a checkpoint of the architecture that its config.json names; otherwise `load`."""
    return _load(read_any_config(directory, options), directory, options, ops, group, context, work, follow)


def load(
    directory: Path,
    options: RunOptions,
    ops: Ops = CPU,
    group: Group = ALONE,
    *,
    context: int | None = None,
    work: Work | None = None,
    follow: Callable[[Ranks], None] = lambda _: None,
) -> LoadedV4:
    """Read config, census and weights of a V4 checkpoint, strictly, and build this rank's part of the model.

    ConfigError or CheckpointError, with one line, for everything that is wrong with the directory; RankDisagreement
    when ranks found different configs or files. CapacityError, before any weight is read, when a `context` of so many
    positions does not fit the machine (None: not known yet; one must). `work` decides how experts lie on several ranks,
    where the options leave it open (None: a prompt of one call). Nothing is converted: weights stay as stored,
    memory-mapped on the CPU, and of those that other ranks hold no byte is read (but by rank 0, for what
    `model.checkpoint.weights.fingerprint` covers). `follow` is given the ranks before the first exchange among them.
    """
    loaded = _load(read_config(directory, options), directory, options, ops, group, context, work, follow)
    assert isinstance(loaded.model, Transformer), "the config is of V4"
    return loaded


def _load(
    config: Config,
    directory: Path,
    options: RunOptions,
    ops: Ops,
    group: Group,
    context: int | None,
    work: Work | None,
    follow: Callable[[Ranks], None],
) -> AnyLoaded:
    """`load`, of either architecture: they differ in config, census and model."""
    check_ranks(config, group.size, directory)
    if isinstance(config, ModelConfig) and config.v41 is not None and ops.name == "triton":
        raise ConfigError(f"{directory}: --ops triton is not built for DeepSeek-V4.1")
    checkpoint = Checkpoint.open(directory)
    counted = _census(checkpoint, config, str(directory), options.draft)
    device = torch.device(options.device)
    if ops.name == CPU.name:
        prepare_loops(counted, options.dtype, say=group.rank == 0)
    sharding = sharding_plan(config, group.size, options.experts)
    before = Ranks(group, sharding.ranks[group.rank])  # while it is open how experts lie
    follow(before)
    here, experts = _ranks_here(before, device), None
    if group.size > 1 and isinstance(config, ModelConfig):
        connected = device.type == "cuda" and here == group.size  # by NVLink, perhaps
        gpu = named(torch.cuda.get_device_name()) if connected else None
        experts = faster(config, counted, options, group.size, gpu, work or Work(options.prefill_chunk))
        options = replace(options, experts=experts.way)
        sharding = sharding_plan(config, group.size, experts.way)
    ranks = Ranks(group, sharding.ranks[group.rank], tokens_of_ranks(config, options.rank_tokens))
    follow(ranks)
    ranks.record("options of the run", None, _digits(_options_digest(options, ops, config, context), device))
    ranks.record("config.json", None, _digits(config.fingerprint, device))
    ranks.record("headers of the checkpoint's files", None, _digits(headers_digest(checkpoint), device))
    ranks.verify()
    planner = Planner(config, counted, sharding, options, group.rank, ops.name)
    check_fits(planner, context or 1, str(directory), processes=here)
    if here == ranks.size:
        ranks.connect(device, _tables(config, options, ranks))
    weights = open_weights(checkpoint, counted, device, held=lambda name, rows: sharding.rows(name, rows, group.rank))
    numerics = arithmetic(options, ops, ranks, config)
    found = _fingerprint(checkpoint, ranks, device)
    check_bases(options.kv, found)
    with weights.filling():  # what is copied to a device arrives while the model is built
        model, marks = _built(config, directory, weights, numerics, options, found)
        head = None if counted.head is None else _head(counted.head, model, weights)
    if unread := weights.unread():  # a parameter that no layer asked for is a layer that was not built
        raise CheckpointError(f"{directory}: the model never asked for {len(unread)} parameters, first {unread[0]}")
    install(model, LLAMA_PLACES if isinstance(config, LlamaConfig) else places_of(config))
    if ops.name == "triton" and device.type == "cuda":  # while other ranks wait longer
        prepare_kernels(model, options.prefill_chunk, context, say=group.rank == 0)
    if head is not None:
        install(head, places_of(head.config), head.config.num_hidden_layers)
    for mark in marks:
        ranks.record("adapters", None, _digits(mark, device))  # of a V4.1 there is one rank
        found = hashlib.sha256(f"{found} {mark}".encode()).hexdigest()
    ranks.verify()
    return cast("AnyLoaded", Loaded(model, counted, found, directory, sharding, weights.handed(), experts, head))


def _tables(config: Config, options: RunOptions, ranks: Ranks) -> list[Table]:
    """What ranks send each other of calls whose tokens go to whole experts; none where none do."""
    if not ranks.shards.experts.split or not splits(options.rank_tokens, options.prefill_chunk, ranks.size):
        return []
    assert isinstance(config, ModelConfig), "other models have no experts"
    row = config.hidden_size * (4 if options.dtype == "fp32" else 2)
    return tables(options.prefill_chunk, ranks.size, config.num_experts_per_tok, config.n_routed_experts, row)


def _census(checkpoint: Checkpoint, config: Config, where: str, draft: str = OFF) -> Census:
    """The census of a checkpoint of either architecture, with the draft head that is asked for; CheckpointError."""
    if not isinstance(config, LlamaConfig):
        counted = v4_census(checkpoint.shapes(), config, where=where, head=bound(draft))
        check_head(counted, draft, where)
        return counted
    counted = llama_census(checkpoint.shapes(), config, where=where)
    check_tied_head(checkpoint, counted)
    return counted


def _built(
    config: Config, directory: Path, weights: Weights, numerics: Arithmetic, options: RunOptions, mark: str
) -> tuple[Model, list[str]]:
    """The model over weights of this fingerprint, and of what it has beside them: adapters, V4.1's numbers of ids."""
    if not isinstance(config, LlamaConfig):
        if config.v41 is None:
            return Transformer(config, weights, numerics), []
        alike = torch.tensor(numbers_of(directory, config))
        mark = hashlib.sha256(alike.numpy().tobytes()).hexdigest()  # a saved state has numbers of tokens
        return TransformerV41(config, weights, numerics, alike), [mark]
    variants = numerics.formats.variants
    if options.coda_adapters is None:
        check_learnt(variants, None)
        return LlamaTransformer(config, weights, numerics), []
    path = Path(options.coda_adapters)
    check_trained(path, variants, config, mark)
    adapters = read_adapters(path, config, torch.device(options.device), numerics.ranks.shards)
    check_learnt(variants, [adapter.eta_logit is not None for adapter in adapters])
    return LlamaTransformer(config, weights, numerics, adapters), [adapters_fingerprint(path)]


def _head(kind: Head, model: Model, weights: Weights) -> DraftHead:
    assert isinstance(model, Transformer), "the census is of V4"
    return build_head(kind, model, weights)


def _options_digest(options: RunOptions, ops: Ops, config: Config, context: int | None) -> str:
    """SHA-256 of what every rank is asked, as 64 hex digits: on several machines it is typed several times.

    Variants are told as well as their rules: a rule may name a file, of which every machine has its own.
    """
    kinds = [str(variant) for variant in cache_formats(options, config).variants]
    return hashlib.sha256(repr((options, ops.name, kinds, context, torch.__version__)).encode()).hexdigest()


def _fingerprint(checkpoint: Checkpoint, ranks: Ranks, device: torch.device) -> str:
    """The checkpoint's fingerprint: rank 0 reads what it covers, the others are told."""
    found = _digits(fingerprint(checkpoint) if ranks.rank == 0 else "0" * 64, device)
    return bytes(ranks.of_first(found).tolist()).hex()


def _ranks_here(ranks: Ranks, device: torch.device) -> int:
    """Ranks on this machine, which share its memory."""
    machine = torch.tensor([zlib.crc32(platform.node().encode())], device=device)
    return int((ranks.whole(machine, 0, evenly(ranks.size, ranks.rank, ranks.size)) == machine).sum())


def _digits(digest: str, device: torch.device) -> Tensor:
    """64 hex digits as [32] uint8."""
    return torch.tensor(list(bytes.fromhex(digest)), dtype=torch.uint8, device=device)
