"""Whole layers of V4 on one GPU, as the model runs them: weights drawn there, caches filled with random rows."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.formats.stored import Weight
from kernels.ops import Ops
from model.block import Block
from model.cache.layers import CACHES
from model.call import Call
from model.checkpoint.names import parameters
from model.checkpoint.weights import Weights
from model.config import ModelConfig
from model.ranks.ranks import ALONE, Ranks
from model.rope import Rotation, layer_frequencies
from runtime.arithmetic import arithmetic
from runtime.options import RunOptions
from runtime.sharding import sharding_plan
from scripts.bench.device import counts
from scripts.bench.device.counts import Cost
from scripts.bench.device.draw import E4M3, E8M0, Draw
from scripts.bench.device.shapes import MILLION, RATIOS, STREAMS, V4, config_json
from scripts.make.values import E4M3_DEVIATION, moments

CHUNK = 4096  # tokens of a prefill
KINDS = ("CSA", "HCA")  # layers 0 and 1 of `config_json`
CONTEXTS = {"4K": 4096, "128K": 131072, "1M": MILLION - CHUNK}  # the last such that a chunk still fits
SCALES = {"entries.scale": -7, "indexer_keys.scale": -2}  # powers of two that make rows of about unit size


class Wall(Protocol):
    """What times a whole layer."""

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...

    def draw(self, seed: int) -> Draw:
        """Where inputs come from."""
        ...

    def wall(self, work: Any) -> float:
        """Us of the clock on the wall until all that `work` launches is done, with nothing of its inputs in L2."""
        ...


class LayerRow(NamedTuple):
    """One row of the table of layers."""

    model: str
    kind: str
    context: str
    tokens: int
    bytes: int
    flops: int
    floors: dict[str, float]  # us by device: parts one after the other, each at its own limit
    us: list[float]


class DrawnWeights(Weights):
    """Random parameters in their published forms, made when they are asked for."""

    def __init__(self, config: ModelConfig, draw: Draw) -> None:
        self.demanded, self.drawn = parameters(config), draw

    def matrix(self, name: str) -> Weight:
        """FP4 for routed experts, FP8 for the rest."""
        out, columns = self.demanded[name].shape
        return self.drawn.weight("fp4" if ".ffn.experts." in name else "fp8", out, columns)

    def vector(self, name: str) -> Tensor:
        """As `scripts.make_checkpoint` draws it."""
        parameter = self.demanded[name]
        mean, deviation = moments(name, parameter.shape[-1])
        dtype = torch.float32 if parameter.kind == "f32" else torch.bfloat16
        return self.drawn.normal(*parameter.shape, dtype=dtype, scale=deviation).add_(mean)


def costs(shape: V4, kind: str, context: int, tokens: int) -> tuple[Cost, dict[str, float]]:
    """Bytes and FLOPs of a layer, and its floor in us by device."""
    parts = counts.layer(shape, kind, context, tokens).values()
    total = Cost(sum(part.bytes for part in parts), sum(part.flops for part in parts))
    return total, {name: sum(part.floor_us(roof) for part in parts) for name, roof in counts.DEVICES.items()}


def planned(contexts: dict[str, int], chunk: int) -> Iterator[tuple[str, tuple[str, int], int]]:
    """Kind, a context's name and tokens, and tokens of the call."""
    return itertools.product(KINDS, contexts.items(), (1, chunk))


def rows_without_times(shape: V4) -> list[LayerRow]:
    """What a layer takes at least, where nothing can be measured."""
    found = []
    for kind, (name, context), tokens in planned(CONTEXTS, CHUNK):
        cost, floors = costs(shape, kind, context, tokens)
        found.append(LayerRow(shape.name, kind, name, tokens, *cost, floors, []))
    return found


@torch.inference_mode()
def measured_layers(
    shape: V4, gpu: Wall, ops: Ops, replays: int, contexts: dict[str, int], chunk: int
) -> Iterator[LayerRow]:
    """Time the two layers at every context; each call begins from the same cache, and its result is finite."""
    config = ModelConfig.from_json(config_json(shape), shape.name)
    options = RunOptions(device=gpu.device.type, entry_format="fp8", key_format="fp4", prefill_chunk=chunk)
    numerics = arithmetic(options, ops, Ranks(ALONE, sharding_plan(config, 1).ranks[0]), config)
    draw = gpu.draw(0)
    blocks: dict[str, Block] = {}
    for kind, (name, context), tokens in planned(contexts, chunk):
        layer = KINDS.index(kind)
        if kind not in blocks:
            blocks.clear()  # of the other kind: weights of both may not fit
            rotation = Rotation(layer_frequencies(config, config.layer_kind(layer)).to(gpu.device))
            blocks[kind] = Block(config, layer, DrawnWeights(config, draw), numerics, rotation)
        most = max(contexts.values()) + chunk
        cache = CACHES[config.layer_kind(layer)](config, layer, most, chunk, numerics.formats, gpu.device)
        saved = filling(cache.shapes(context), cache.dtypes(), draw)
        streams = draw.normal(tokens, STREAMS, shape.hidden)
        ids = torch.zeros(tokens, dtype=torch.int64, device=gpu.device)

        def step(block: Block = blocks[kind], context: int = context, given: Any = (streams, ids, cache)) -> None:
            block(given[0], Call(given[1], context, numerics), given[2])

        times = []
        for _ in range(replays + 1):
            cache.restore(context, saved)
            times.append(gpu.wall(step))
        cost, floors = costs(shape, kind, context, tokens)
        yield LayerRow(shape.name, kind, name, tokens, *cost, floors, times[1:])  # the first compiles


def filling(
    shapes: dict[str, tuple[int, ...]], dtypes: dict[str, torch.dtype], draw: Draw
) -> dict[str, Tensor]:  # fmt: skip
    """Random content of a cache, as a saved state would bring it."""
    found = {}
    for name, shape in shapes.items():
        match dtypes[name]:
            case dtype if dtype == E4M3:
                found[name] = draw.normal(*shape, dtype=dtype, scale=E4M3_DEVIATION)
            case dtype if dtype == E8M0:
                found[name] = draw.scales(*shape, power=SCALES[name])
            case torch.uint8:
                found[name] = draw.bytes(*shape)
            case dtype:
                found[name] = draw.normal(*shape, dtype=dtype)
    return found


assert set(KINDS) == set(RATIOS)
