"""The memory plan of a Llama-family model, for `python -m scripts.plan`: one rank, and fewer kinds of everything."""

from pathlib import Path
from typing import Any

from model.checkpoint.binding import Form
from model.checkpoint.census import Census
from model.checkpoint.checkpoint import Checkpoint
from model.errors import CapacityError, ConfigError
from model.llama.adapters import check_adapters
from model.llama.census import census, parameters
from model.llama.config import LlamaConfig
from runtime.op_sets import planned
from runtime.options import RunOptions, check_options
from runtime.plan.planner import Planner
from runtime.sharding import WHOLE


def llama_planner(config: LlamaConfig, checkpoint: Path | None, options: RunOptions, ranks: int) -> Planner:
    """Return the planner of a checkpoint's files, or of BF16 weights without them; ConfigError for several ranks."""
    where = Path(config.model_type) if checkpoint is None else checkpoint
    check_options(config, options, where)
    if ranks > 1:
        raise ConfigError(f"--ranks {ranks}: a {config.model_type} model runs on one")
    if options.coda_adapters is not None:
        check_adapters(Path(options.coda_adapters), config)
    return Planner(config, _counted(config, checkpoint), WHOLE, options, 0, planned(options, config))


def _counted(config: LlamaConfig, checkpoint: Path | None) -> Census:
    if checkpoint is not None:
        return census(Checkpoint.open(checkpoint).shapes(), config, where=str(checkpoint))
    return census({name: (Form.BF16.name, part.shape) for name, part in parameters(config).items()}, config)


def llama_summary(planner: Planner, source: str, context: int, memory: int | None) -> dict[str, Any]:
    """Everything that is shown, as JSON values; CapacityError for a context beyond the model's positions."""
    if context > (most := planner.config.max_position_embeddings):
        raise CapacityError(f"--context {context}: beyond the model's max_position_embeddings {most}")
    plan = planner.plan(context)
    return {
        "config_fingerprint": planner.config.fingerprint,
        "weights_from": source,
        "options": planner.options.to_json(),
        "ranks": 1,
        "context": plan.context,
        "chunk": plan.chunk,
        "weights": {"mapped": plan.mapped_weights, "own": plan.own_weights},
        "caches": plan.cache_bytes,
        "call": {"moment": plan.call.name, "bytes": plan.call.nbytes, "parts": dict(plan.call.parts)},
        "reserve": plan.reserve,
        "needed": plan.needed,
        "memory": memory,
        "fits": None if memory is None else plan.needed <= memory,
        "largest_context": None if memory is None else planner.largest_context(memory),
    }


def llama_rows(data: dict[str, Any]) -> list[tuple[str, int]]:
    """What needs memory, in the order in which it is shown, and the bytes of it."""
    rows = [("weights", data["weights"]["own"]), ("caches", data["caches"])]
    rows += [(f"a call, at most: {name}", size) for name, size in data["call"]["parts"].items()]
    return [*rows, ("beside tensors, assumed", data["reserve"]), ("needed", data["needed"])]
