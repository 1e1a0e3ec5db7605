"""Which rows of V4.1's n-gram tables a token looks up.

Ids that spell alike are one (`numbers`). The last 2, 3, ... of them are multiplied each by a number of its place and
mixed by xor; the remainder by a prime, of each order and head another, is a row of that head's part of the table.

Source: DeepSeek's inference code for V4.1-Flash, engram.py at dba1be0a.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fathom.model.errors import ConfigError

if TYPE_CHECKING:
    from fathom.model.config import ModelConfig


SEED = 10007  # times the layer


@cache
def primes(config: "ModelConfig") -> list[list[int]]:
    """Of each layer with tables, a prime for each order and head, [layers][columns]; ConfigError for other tables."""
    assert config.v41 is not None, "of its config"
    tables, candidate = config.v41.engram, config.v41.engram.first_prime
    found: list[list[int]] = []
    for layer, rows in zip(tables.layer_ids, tables.rows, strict=True):
        of_layer: list[int] = []
        while len(of_layer) < tables.columns:
            if _is_prime(candidate):
                of_layer.append(candidate)
            candidate += 1
        if sum(of_layer) != rows:
            raise ConfigError(
                f"engram_num_embeddings is {rows} for layer {layer}; the primes from {tables.first_prime} on say"
                f" {sum(of_layer)}"
            )
        found.append(of_layer)
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))


def multipliers(config: "ModelConfig", layer: int) -> list[int]:
    """An odd number for each place of an n-gram, the newest token first, [max_ngram]."""
    assert config.v41 is not None, "of its config"
    tables = config.v41.engram
    most = (2**63 - 1) // tables.compressed_vocab // 2
    drawn = np.random.default_rng(SEED * layer).integers(0, most, tables.max_ngram)
    return [int(x) * 2 + 1 for x in drawn]


def table_rows(
    config: "ModelConfig",
    layer: int,
    tokens: Tensor,
    numbers: Tensor,
    at: Tensor,
    start: Tensor | None = None,
    *,
    blank: int | None = None,
) -> Tensor:
    """Rows of a layer's table that tokens look up, [n, columns] int64.

    Parameters
    ----------
    config
        Of V4.1.
    layer
        That has a table.
    tokens
        [t] int64, the prompt; no part of an image among them.
    numbers
        [vocab] int64: the number of each id, alike ones have the same.
    at
        [n] int64: positions.
    start
        [t] int64: how far back the n-gram of each position reaches; None: to the first token.
    blank
        The number of what stands before that; None: that of the id which pads.

    """
    assert config.v41 is not None, "of its config"
    tables = config.v41.engram
    none = numbers[tables.pad_token_id] if blank is None else torch.tensor(blank)
    alike = torch.cat((none.expand(tables.max_ngram - 1), numbers[tokens]))
    first = torch.zeros_like(tokens) if start is None else start
    mixed, found, offset = torch.zeros(len(at), dtype=torch.int64), [], 0
    own = primes(config)[tables.layer_ids.index(layer)]
    for back, factor in enumerate(multipliers(config, layer)):
        of_token = alike[at + tables.max_ngram - 1 - back].where(at - back >= first[at], none)
        mixed = mixed ^ of_token * factor
        for prime in own[(back - 1) * tables.heads : back * tables.heads] if back else ():
            found.append(mixed % prime + offset)
            offset += prime
    return torch.stack(found, 1)
