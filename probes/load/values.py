"""Every number that the model computes with, against the same number decoded from the file's bytes by numpy."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from model.checkpoint.census import Census
from model.transformer import Transformer
from probes.shared.file_bytes import FileBytes, Numbers
from probes.shared.held import Held, find, used

WHOLE = 256 << 20  # bytes of tensor data up to which every number is compared
ROWS = 128  # rows of a matrix compared beyond that: one row of FP8 blocks
TILE = 1 << 22  # numbers decoded at once: 32 MiB of fp64


@dataclass(slots=True)
class Compared:
    """What became of one parameter."""

    name: str
    numbers: int = 0  # compared
    differing: int = 0
    zeros: int = 0  # in the file, of those compared
    largest: float = 0.0  # magnitude in the file, of those compared
    first: str = ""  # the first number that differs


def sample(names: Sequence[str], files: FileBytes, experts: int, seed: int) -> list[str]:
    """The parameters to compare: all of a small checkpoint; of a large one, one routed expert a layer and the rest."""
    if files.data_bytes <= WHOLE:
        return list(names)

    def chosen(name: str) -> bool:
        parts = name.split(".")  # layers, 3, ffn, experts, 17, w1, weight
        return ".experts." not in name or int(parts[4]) == _drawn(f"{seed} {parts[1]}", experts)

    return [name for name in names if chosen(name)]


def compare(
    model: Transformer, census: Census, files: FileBytes, names: Sequence[str], seed: int
) -> Iterator[Compared]:
    """Compare those parameters that the model holds.

    Whole, but for matrices of a large checkpoint: of these, `ROWS` rows drawn at random.
    """
    for name in names:
        held, shape = find(model, name), census.demanded[name].shape
        if held is None:
            continue
        height, width = shape[0], int(np.prod(shape[1:]))
        step, first, last = max(ROWS, TILE // width // ROWS * ROWS), 0, height
        if files.data_bytes > WHOLE and height > step:
            step = ROWS
            first = step * _drawn(f"{seed} {name}", -(-height // step))
            last = min(height, first + step)
        result = Compared(name)
        for low in range(first, last, step):
            high = min(low + step, last)
            _add(result, files.decode(census.mappings[name], low, high), held, model, low, high)
        yield result


def _drawn(key: str, count: int) -> int:
    return random.Random(key).randrange(count)  # noqa: S311 -- a sample, not a secret


def _add(result: Compared, file: Numbers, held: Held, model: Transformer, low: int, high: int) -> None:
    """Compare rows `low` to `high`, which hold `file`."""
    result.numbers += file.size
    result.zeros += int((file == 0).sum())
    result.largest = max(result.largest, float(np.abs(file).max()))
    wanted = file.astype(np.float32)  # the one rounding there is, of products with an fp32 scale
    for column, numbers in used(model.arithmetic.ops, held, model.config.o_groups, low, high):
        got = numbers.double().cpu().numpy()
        part = wanted if wanted.ndim == 1 else wanted[:, column : column + got.shape[1]]
        if got.shape != part.shape:
            result.differing += part.size
            result.first = f"{list(got.shape)} numbers, the file holds {list(part.shape)}"
            continue
        wrong = ~(got == part)  # a NaN is a fault, in the file as in the model
        if wrong.any() and not result.first:
            place = tuple(int(axis[0]) for axis in np.nonzero(wrong))
            shown = [place[0] + low, *(axis + column for axis in place[1:])]
            result.first = f"{shown} is {got[place]:.6g}, the file holds {part[place]:.6g}"
        result.differing += int(wrong.sum())
