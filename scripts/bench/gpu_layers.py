"""Layers of V4 on one GPU, and a whole V4-Flash with as many of them as fit: a decoded token, and calls of a prompt.

Weights are drawn. The whole model's layers are the first of the published ones, but route by score where these route by
a table.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Weight, member, stack
from fathom.kernels.ops import Ops
from fathom.model.block import Block
from fathom.model.cache.layers import CACHES
from fathom.model.call import Call
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.names import parameters
from fathom.model.checkpoint.published import published_configs, published_tensors
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError
from fathom.model.observe.observer import PLACES, install
from fathom.model.ranks.ranks import ALONE, Ranks
from fathom.model.rope import Rotation, layer_frequencies
from fathom.model.transformer import Transformer
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.memory import machine_memory
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.planner import Planner, most
from fathom.runtime.sharding import sharding_plan
from fathom.scripts.bench import gpu_cases as kernels
from fathom.scripts.bench.gpu_cases import (
    E4M3,
    E8M0,
    FLASH,
    MILLION,
    RATIOS,
    ROOFS,
    STREAMS,
    V4,
    VOCABULARY,
    Draw,
    layer_costs,
    linear_cost,
)
from fathom.scripts.bench.turns import Case, Measures, Rounds, Side, constant
from fathom.scripts.make.values import E4M3_DEVIATION, moments

PUBLISHED: Final = "deepseek-v4-flash"
AFTER: Final = 8192  # tokens that are there before anything is timed
CHUNK: Final = 4096
CALLS: Final = 3  # of a prompt that are timed, at most: each takes a second and more
SCALES: Final = {"entries.scale": -7, "indexer_keys.scale": -2}  # powers of two that make rows of about unit size


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
        run(draw.tokens(min(chunk, after - state.position), vocabulary))
    yield case(f"{chunk} tokens", chunk, lambda: run(draw.tokens(chunk, vocabulary)), calls)
    token = draw.tokens(1, vocabulary)
    yield case("1 token, eager", 1, lambda: run(token), rounds)
    step = device.captured_step(model, state)
    yield case("1 token, captured", 1, lambda: step(7), rounds)


def whole_floor(shape: V4, config: ModelConfig, context: int, tokens: int, roof: tuple[float, float]) -> float:
    """Microseconds that the layers and the head of one token take at least."""
    kinds = [kind.name for kind in config.layer_kinds]
    head = linear_cost("bf16", config.vocab_size, shape.hidden, 1).floor_us(roof)
    return head + sum(layer_floor(shape, kind, context, tokens, roof) for kind in kinds)


def limits(
    device: Any, floor_us: Callable[[tuple[float, float]], float], asked: float | None = None
) -> dict[str, Side]:
    """What a time is held against: what was asked for, on an H200; the floor, on a device whose roof is known."""
    found: dict[str, Side] = {}
    if asked is not None and kernels.ASKED_OF in device.name:
        found["asked for"] = constant(us=asked)
    roof = next((roof for part, roof in ROOFS.items() if part in device.name), None)
    return found if roof is None else found | {"floor": constant(us=floor_us(roof))}


class DrawnWeights(Weights):
    """Random parameters in their published forms, made when they are asked for."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        self.demanded, self.drawn = parameters(config), draw

    def forms(self, names: Iterable[str]) -> set[Form]:
        """FP4 for routed experts, FP8 for the rest."""
        return {Form.FP4 if ".ffn.experts." in name else Form.FP8 for name in names}

    def here(self, names: Iterable[str]) -> list[str]:
        """All."""
        return list(names)

    def matrix(self, name: str) -> Weight:
        """Random, of the form that `forms` says."""
        form = "fp4" if self.forms([name]) == {Form.FP4} else "fp8"
        return self.drawn.weight(form, *self.demanded[name].shape)

    def matrices(self, names: Sequence[str], *, together: bool) -> list[Weight]:
        """As `matrix` each; `together`: one behind another in memory."""
        made = [self.matrix(name) for name in names]
        if not together:
            return made
        stacked = stack(made)
        return [member(stacked, index) for index in range(len(names))]

    def vector(self, name: str) -> Tensor:
        """As `scripts.make_checkpoint` draws it."""
        parameter = self.demanded[name]
        mean, deviation = moments(name, parameter.shape[-1])
        dtype = torch.float32 if parameter.kind == "f32" else torch.bfloat16
        return self.drawn.normal(*parameter.shape, dtype=dtype, scale=deviation).add_(mean)

    def operand(self, name: str) -> Tensor:
        """As `vector`."""
        return self.vector(name)


def layer_floor(shape: V4, kind: str, context: int, tokens: int, roof: tuple[float, float]) -> float:
    """Microseconds that a layer takes at least: parts one after the other, each at its own limit."""
    return sum(part.floor_us(roof) for part in layer_costs(shape, kind, context, tokens).values())


@torch.inference_mode()
def layers(
    shape: V4, device: Any, ops: Ops, rounds: Rounds, contexts: dict[str, int], chunk: int
) -> Iterator[Case]:  # fmt: skip
    """Time the two layers after every context; each call begins from the same cache."""
    config = ModelConfig.from_json(config_json(shape), shape.name)
    options = RunOptions(device=device.device.type, entry_format="fp8", key_format="fp4", prefill_chunk=chunk)
    numerics = arithmetic(options, ops, Ranks(ALONE, sharding_plan(config, 1).ranks[0]), config)
    draw, most = Draw(device.device, 0), max(contexts.values()) + chunk

    @torch.inference_mode()
    def side(given: Any, context: int, saved: dict[str, Tensor], time: Callable[[], float]) -> tuple[Measures, None]:
        given[2].restore(context, saved)
        return {"us": time()}, None

    for layer, kind in enumerate(RATIOS):
        rotation = Rotation(layer_frequencies(config, config.layer_kind(layer)).to(device.device))
        block = Block(config, layer, DrawnWeights(config, draw), numerics, rotation)
        for (after, context), tokens in product(contexts.items(), (1, chunk)):
            cache = CACHES[config.layer_kind(layer)](config, layer, most, chunk, numerics.formats, device.device)
            sizes, dtypes = cache.shapes(context), cache.dtypes()
            saved = {name: filling(name, size, dtypes[name], draw) for name, size in sizes.items()}
            cache.restore(context, saved)
            ids = torch.zeros(tokens, dtype=torch.int64, device=device.device)
            first = torch.tensor(context, device=device.device) if tokens == 1 else context  # on the device: captured
            given = (draw.normal(tokens, STREAMS, shape.hidden), Call(ids, first, numerics), cache)
            run, why = partial(block, *given), ""
            timed = partial(device.wall_us, run)
            if tokens == 1:
                work, why = device.captured([run])
                timed = partial(device.us, work)
            floor = limits(device, partial(layer_floor, shape, kind, context, tokens))
            label = f"{shape.name}, {kind}, {tokens} tokens at {after}" + (why and f", launched: {why}")
            sides: dict[str, Side] = {"triton": partial(side, given, context, saved, timed), **floor}
            yield Case("whole layers", label, sides, rounds)


def filling(name: str, shape: tuple[int, ...], dtype: torch.dtype, draw: Draw) -> Tensor:
    """Random content of a part of a cache, as a saved state would bring it."""
    if dtype == E8M0:
        return draw.scales(*shape, power=SCALES[name])
    if dtype == torch.uint8:
        return draw.bytes(*shape)
    return draw.normal(*shape, dtype=dtype, scale=E4M3_DEVIATION if dtype == E4M3 else 1.0)


def config_json(shape: V4) -> dict[str, Any]:
    """A config.json in DeepSeek's dialect: one CSA layer, then one HCA layer, and the experts that a GPU holds."""
    return {
        "model_type": "deepseek_v4", "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "vocab_size": kernels.VOCABULARY,
        "max_position_embeddings": MILLION, "hidden_size": shape.hidden, "num_hidden_layers": 2,
        "compress_ratios": list(RATIOS.values()), "compress_rope_theta": 160000, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
        },
        "head_dim": kernels.HEAD_DIM, "num_attention_heads": shape.heads, "num_key_value_heads": 1,
        "qk_rope_head_dim": kernels.ROPE, "q_lora_rank": shape.q_lora, "o_groups": shape.o_groups,
        "o_lora_rank": shape.o_lora, "sliding_window": kernels.WINDOW, "index_head_dim": kernels.INDEX_DIM,
        "index_n_heads": kernels.INDEX_HEADS, "index_topk": shape.index_topk, "rms_norm_eps": kernels.EPS,
        "hc_eps": kernels.EPS, "hc_mult": STREAMS, "hc_sinkhorn_iters": kernels.SINKHORN,
        "moe_intermediate_size": shape.intermediate, "n_routed_experts": shape.experts, "n_shared_experts": 1,
        "num_experts_per_tok": kernels.CHOSEN, "num_hash_layers": 0, "num_nextn_predict_layers": 0,
        "expert_dtype": "fp4", "norm_topk_prob": True, "routed_scaling_factor": shape.routed_scaling,
        "scoring_func": "sqrtsoftplus", "swiglu_limit": kernels.LIMIT, "topk_method": "noaux_tc",
    }  # fmt: skip
