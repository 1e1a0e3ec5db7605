"""A whole V4-Flash on one GPU, with as many layers as fit: a decoded token, and a prompt in calls of 4096.

Weights are drawn. The layers are the first of the published ones, but route by score where these route by a table.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from fathom.kernels.ops import Ops
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.published import published_configs, published_tensors
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError
from fathom.model.observe.observer import PLACES, install
from fathom.model.ranks.ranks import ALONE, Ranks
from fathom.model.transformer import Transformer
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.memory import machine_memory
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.planner import Planner, most
from fathom.runtime.sharding import sharding_plan
from fathom.scripts.bench.gpu import DrawnWeights, config_json, layer_floor, limits
from fathom.scripts.bench.gpu_cases import FLASH, V4, VOCABULARY, Draw, linear_cost
from fathom.scripts.bench.turns import Case, Measures, Rounds, Side

PUBLISHED: Final = "deepseek-v4-flash"
AFTER: Final = 8192  # tokens that are there before anything is timed
CHUNK: Final = 4096
CALLS: Final = 3  # of a prompt that are timed, at most: each takes a second and more


class Sizes(NamedTuple):
    """How long, and of how many tokens to choose from."""

    after: int = AFTER
    chunk: int = CHUNK
    vocabulary: int = VOCABULARY


def whole_json(shape: V4, layers: int) -> dict[str, Any]:
    """A config.json of the first `layers` of V4-Flash's, at the dimensions of `shape`."""
    ratios = json.loads(published_configs()[PUBLISHED].read_text(encoding="utf-8"))["compress_ratios"]
    return config_json(shape) | {"num_hidden_layers": layers, "compress_ratios": ratios[:layers]}


def published_layers() -> int:
    """How many V4-Flash has."""
    return int(json.loads(published_configs()[PUBLISHED].read_text(encoding="utf-8"))["num_hidden_layers"])


def options_of(device: str, chunk: int) -> RunOptions:
    """As V4 is served: FP8 entries, FP4 index keys."""
    return RunOptions(device=device, entry_format="fp8", key_format="fp4", prefill_chunk=chunk)


def fitting(shape: V4, memory: int, positions: int, chunk: int) -> int:
    """As many layers as the memory plan finds room for in so many bytes; CapacityError where not one."""

    def fits(layers: int) -> bool:
        config = ModelConfig.from_json(whole_json(shape, layers), shape.name)
        counted = census(published_tensors(config, "fp4"), config)
        planner = Planner(config, counted, sharding_plan(config, 1), options_of("cuda", chunk), 0, "triton")
        return planner.plan(positions, chunk).needed <= memory

    found = most(fits, published_layers())
    if not found:
        raise CapacityError(f"not one layer of {shape.name} fits in {memory} bytes")
    return found


@torch.inference_mode()
def whole(
    device: Any, ops: Ops, rounds: Rounds, layers: int | None, shape: V4 = FLASH, sizes: Sizes | None = None
) -> Iterator[Case]:
    """Time a call of a prompt and a decoded token, eager and captured; layers None: as many as fit.

    Each call follows the one before it in one sequence, so what is timed stands at positions that grow.
    """
    after, chunk, vocabulary = sizes or Sizes()
    calls = Rounds.exactly(min(rounds.least, CALLS))
    steps = 2 * (rounds.least + 8)
    positions = after + chunk * (calls.least + 2) + steps
    if layers is None:
        layers = fitting(shape, machine_memory(device.device) - device.buffer.nbytes, positions, chunk)
    config = ModelConfig.from_json(whole_json(shape, layers) | {"vocab_size": vocabulary}, shape.name)
    numerics = arithmetic(
        options_of(device.device.type, chunk), ops, Ranks(ALONE, sharding_plan(config, 1).ranks[0]), config
    )
    draw = Draw(device.device, 0)
    model = Transformer(config, DrawnWeights(config, draw), numerics)
    install(model, PLACES)
    state = model.new_state(positions, chunk)

    def ids(count: int) -> torch.Tensor:
        return draw.bytes(count, low=2).long() * (vocabulary // 256)

    @torch.inference_mode()
    def run(tokens: torch.Tensor) -> None:
        model.logits(model(tokens, state)[-1:])

    @torch.inference_mode()
    def timed(work: Callable[[], Any]) -> tuple[Measures, None]:
        return {"us": device.wall_us(work)}, None

    def case(label: str, tokens: int, work: Callable[[], Any], many: Rounds) -> Case:
        floor = limits(device, partial(whole_floor, shape, config, state.position, tokens))
        sides: dict[str, Side] = {"triton": partial(timed, work), **floor}
        return Case("whole model", f"{shape.name}, {layers} layers, {label} after {state.position}", sides, many)

    while state.position < after:
        run(ids(min(chunk, after - state.position)))
    yield case(f"{chunk} tokens", chunk, lambda: run(ids(chunk)), calls)
    token = ids(1)
    yield case("1 token, eager", 1, lambda: run(token), rounds)
    step = device.captured_step(model, state)
    yield case("1 token, captured", 1, lambda: step(7), rounds)


def whole_floor(shape: V4, config: ModelConfig, context: int, tokens: int, roof: tuple[float, float]) -> float:
    """Microseconds that the layers and the head of one token take at least."""
    kinds = [kind.name for kind in config.layer_kinds]
    head = linear_cost("bf16", config.vocab_size, shape.hidden, 1).floor_us(roof)
    return head + sum(layer_floor(shape, kind, context, tokens, roof) for kind in kinds)
