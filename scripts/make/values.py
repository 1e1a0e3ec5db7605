"""Random weights as a published checkpoint stores them: each tensor by itself, a block of bytes at a time.

A tensor's bytes follow from the seed and its name, so any one can be made again alone. Inputs of unit mean square leave
a linear with unit mean square; embeddings, sinks and logits are near unit scale; so activations neither vanish nor
explode, and every router, pool and softmax has something to tell apart.

- FP4: random bytes. All sixteen codes are equally frequent, -0 among them; their mean square is 8.5625.
- FP8, BF16, F32: 16 random bits pick one of the 65,536 quantiles of the normal distribution, rounded to the stored
  type beforehand. E4M3 has deviation 96: the largest value is 416, in the range (224, 448] where DeepSeek's scale rule
  leaves the largest of a block, and the NaN codes 0x7F and 0xFF do not occur.
- Block scales: one of two neighbouring powers of two, in the proportion that gives the linear unit gain.
- `tid2eid`: in each row distinct experts, every choice equally likely.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from fathom.model.checkpoint.checkpoint import TORCH_DTYPES
from fathom.model.checkpoint.tensor_mapping import Stored

BLOCK: Final = 1 << 22  # values at a time; what they take stays below 64 MiB
LEVELS: Final = 1 << 16  # values that 16 random bits tell apart
E4M3_DEVIATION: Final = 96.0
E2M1_MEAN_SQUARE: Final = (0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8
E8M0_BIAS: Final = 127

# Mean and deviation of what is no linear, by the end of its name without `.weight`.
_MOMENTS: Final = {
    "embed": (0.0, 1.0),
    "norm": (1.0, 0.1),
    "attn_sink": (0.0, 1.0),
    "ape": (0.0, 0.5),
    "gate.bias": (0.0, 0.2),
    "gate.bias_vl": (0.0, 0.2),
    "engram.q_weight": (1.0, 0.1),
    "engram.k_weight": (1.0, 0.1),
    "_base": (0.0, 0.5),  # of mHC
    "_scale": (0.5, 0.1),  # of mHC
}


def blocks(name: str, tensors: Mapping[str, Stored], seed: int) -> Iterator[NDArray[Any]]:
    """The values of one stored tensor, in order.

    Parameters
    ----------
    name : str
        Official stored name.
    tensors : Mapping[str, tuple[str, Sequence[int]]]
        Stored name -> dtype as safetensors writes it, and shape; also of the tensors beside `name`.
    seed : int
        Another seed gives other values, whatever the tensor.

    Yields
    ------
    NDArray
        1-d, at most `BLOCK` values; an integer type of the same width stands for types that numpy lacks.
    """
    dtype, shape = tensors[name]
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    random = np.random.PCG64(int.from_bytes(key, "little"))  # its raw stream is the same in every version of numpy
    if dtype == "I64":
        experts = tensors[f"{name.rpartition('.')[0]}.weight"][1][0]  # rows of the gate beside it
        yield distinct_experts(random, shape[0], shape[1], experts).reshape(-1)
        return
    values = None if dtype == "I8" else _levels(name, tensors)
    count = math.prod(shape)
    for start in range(0, count, BLOCK):
        length = min(BLOCK, count - start)
        yield _bits(random, length, np.uint8) if values is None else values[_bits(random, length, np.uint16)]


def distinct_experts(random: np.random.PCG64, rows: int, chosen: int, experts: int) -> NDArray[np.int64]:
    """Rows of distinct expert ids [rows, chosen] in random order.

    The j-th of a row is drawn from the `experts - j` that are left: a rank among them, moved up past each expert
    already taken.
    """
    table = np.empty((rows, chosen), np.int64)
    for j in range(chosen):
        # the modulo's bias is below 2^-50
        drawn = (random.random_raw(rows) % np.uint64(experts - j)).astype(np.int64)  # [rows]
        for taken in np.sort(table[:, :j], axis=1).T:
            drawn += drawn >= taken
        table[:, j] = drawn
    return table


def _bits(random: np.random.PCG64, count: int, width: type[np.uint8 | np.uint16]) -> NDArray[Any]:
    """The stream's next values of 8 or 16 bits; what is left of the last 64 bits is dropped."""
    per_word = 8 // np.dtype(width).itemsize
    words = random.random_raw(-(-count // per_word)).astype("<u8", copy=False)
    return words.view(width)[:count]


def _levels(name: str, tensors: Mapping[str, Stored]) -> NDArray[Any]:
    """The 65,536 values, not all different, that the values of a stored tensor are drawn from."""
    dtype, shape = tensors[name]
    if name.endswith(".scale"):
        weight, matrix = tensors[f"{name.removesuffix('.scale')}.weight"]
        mean_square, columns = (E2M1_MEAN_SQUARE, 2 * matrix[1]) if weight == "I8" else (_e4m3_mean_square(), matrix[1])
        return _scales(dtype, 1 / (columns * mean_square))
    if dtype == "F8_E4M3":
        return _normal(dtype, 0.0, E4M3_DEVIATION)
    return _normal(dtype, *moments(name, shape[-1]))


def moments(name: str, columns: int) -> tuple[float, float]:
    """Mean and deviation of the values of a parameter that is stored wide.

    What no name is known of are linears that are never quantised, mHC's and the router's too.
    """
    ending = name.removesuffix(".weight")
    return next((found for end, found in _MOMENTS.items() if ending.endswith(end)), (0.0, columns**-0.5))


@cache
def _normal(dtype: str, mean: float, deviation: float) -> NDArray[Any]:
    """Quantiles of a normal distribution, rounded to a stored dtype."""
    middles = (torch.arange(LEVELS, dtype=torch.float64) + 0.5) / LEVELS
    values = (mean + deviation * torch.special.ndtri(middles)).to(TORCH_DTYPES[dtype])
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize]
    levels: NDArray[Any] = values.view(same_width).numpy()
    return levels


@cache
def _scales(dtype: str, mean_square: float) -> NDArray[Any]:
    """Two neighbouring powers of two, as often as it takes for this mean square."""
    low = math.floor(math.log2(mean_square) / 2)
    of_high = (mean_square / 4.0**low - 1) / 3
    exponents = low + (np.arange(LEVELS) < of_high * LEVELS)
    return np.exp2(exponents).astype(np.float32) if dtype == "F32" else (exponents + E8M0_BIAS).astype(np.uint8)


@cache
def _e4m3_mean_square() -> float:
    codes = torch.from_numpy(_normal("F8_E4M3", 0.0, E4M3_DEVIATION)).view(torch.float8_e4m3fn)
    return float(codes.double().square().mean())
