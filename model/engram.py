"""Engram: rows of n-gram tables, which V4.1 adds to the streams before some layers.

The last 2, 3, ... tokens say which rows: ids that spell alike are one number, each is multiplied by a number of its
place, and they are mixed by xor; of that the remainder by a prime, of each order and head another, is a row of that
head's part of the table. A token looks up a few rows of some hundred million: they are read from the mapped file.

Source: DeepSeek's inference code for V4.1-Flash, engram.py at dba1be0a.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from fathom.kernels.formats.reference import looked_up
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.window import WindowRing
from fathom.model.call import Call
from fathom.model.checkpoint.config_fields import Engram as Tables
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.linear import Linear

SEED: Final = 10007  # times the layer
LEAST: Final = 1e-6  # of what a square root is taken of


class Hash:
    """Which rows of a layer's table tokens look up.

    Parameters
    ----------
    tables
        As config.json has them.
    layer
        That has one.
    device
        Where tokens are.

    Raises
    ------
    ConfigError
        When the primes, one for each order and head, do not add up to the rows of the tables.

    """

    def __init__(self, tables: Tables, layer: int, device: torch.device) -> None:
        primes = dict(zip(tables.layer_ids, table_primes(tables), strict=True))[layer]
        self.primes = torch.tensor(primes, device=device).view(tables.max_ngram - 1, tables.heads)
        self.starts = (self.primes.flatten().cumsum(0) - self.primes.flatten()).view_as(self.primes)
        most = (2**63 - 1) // tables.compressed_vocab // 2  # so that a product is an int64
        drawn = np.random.default_rng(SEED * layer).integers(0, most, tables.max_ngram)
        self.multipliers = torch.from_numpy(drawn * 2 + 1).to(device)  # newest token first

    def __call__(self, numbers: Tensor) -> Tensor:
        """N-grams [t, max_ngram] of tokens' numbers, newest first, to rows [t, (max_ngram - 1) * heads], int64."""
        terms = numbers * self.multipliers
        mixed = terms[:, 0]
        rows = []
        for order in range(1, terms.shape[1]):
            mixed = mixed ^ terms[:, order]
            rows.append(mixed[:, None] % self.primes[order - 1] + self.starts[order - 1])
        return torch.cat(rows, 1)


def table_primes(tables: Tables) -> list[list[int]]:
    """Of each layer with a table the next primes, of which no two are the same; ConfigError where it has other rows."""
    found, candidate = [], tables.first_prime
    for layer, rows in zip(tables.layer_ids, tables.rows, strict=True):
        primes: list[int] = []
        while len(primes) < tables.columns and sum(primes) < rows:
            if candidate > 1 and all(candidate % d for d in range(2, int(candidate**0.5) + 1)):
                primes.append(candidate)
            candidate += 1
        if len(primes) < tables.columns or sum(primes) != rows:
            raise ConfigError(
                f"engram_num_embeddings is {rows} for layer {layer}, which {tables.columns} primes from"
                f" engram_vocab_size {tables.first_prime} on do not add up to"
            )
        found.append(primes)
    return found


class Engram:
    """The n-grams of one layer.

    Parameters
    ----------
    config, layer, weights, arithmetic
        Of the layer.
    alike
        [vocab] int64: the number of each id; those that spell alike have the same.

    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, alike: Tensor
    ) -> None:
        assert config.v41 is not None, "of its config"
        prefix, tables = f"{config.prefix(layer)}.engram", config.v41.engram
        self.table = weights.rows(f"{prefix}.embed.weight")  # [rows, head_dim]
        self.wkv = Linear(weights.matrix(f"{prefix}.wkv.weight"), arithmetic)  # [(s + 1) * hidden, columns * head_dim]
        self.q_weight, self.k_weight = (weights.vector(f"{prefix}.{name}").float() for name in ("q_weight", "k_weight"))
        self.hash, self.alike, self.arithmetic = Hash(tables, layer, alike.device), alike, arithmetic
        self.order, self.blank = tables.max_ngram, alike[tables.pad_token_id]
        self.streams, self.eps, self.scale = config.hc_mult, config.rms_norm_eps, config.hidden_size**-0.5

    def __call__(self, streams: Tensor, call: Call, tokens: WindowRing) -> Tensor:
        """Add the n-grams that end in a call's tokens to its streams [t, s, hidden]: ``X_j <- X_j + a_j value``."""
        keys, value = self.key_and_value(self.rows(call, tokens))
        gate = self.gate(streams, keys)
        return self.write(streams, gate, value)

    def rows(self, call: Call, tokens: WindowRing) -> Tensor:
        """Rows of the table, side by side [t, columns * head_dim]; `tokens` are those before the call, and take its."""
        assert isinstance(call.first, int), "the position is needed on the host"
        tokens.write(call.first, self.alike[call.tokens][:, None])
        behind = self.order - 1
        known = tokens.last(call.first + call.count, call.count + behind)[:, 0]
        blank = self.blank.expand(call.count + behind - len(known))  # before the first token
        grams = torch.cat((blank, known)).unfold(0, self.order, 1).flip(1)
        return looked_up(self.table, self.hash(grams), self.arithmetic.dtype).flatten(1)

    def key_and_value(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A key for each stream [t, s, hidden], and one value for all [t, hidden]."""
        out = self.wkv(rows).unflatten(-1, (self.streams + 1, -1))
        return out[:, :-1], out[:, -1]

    def gate(self, streams: Tensor, keys: Tensor) -> Tensor:
        """How much of the value each stream takes: ``sigmoid(sign(g) sqrt |g|)`` [t, s] float32.

        ``g = <X w, key> hidden^-0.5`` of a stream and a key that are both normed, in fp32; w [s, hidden] is that of
        the query times that of the key.
        """
        x, keys, weight = streams.float(), keys.float(), self.q_weight * self.k_weight
        norms = torch.rsqrt(x.square().mean(-1) + self.eps) * torch.rsqrt(keys.square().mean(-1) + self.eps)
        g = (x * weight * keys).sum(-1) * norms * self.scale
        root = g.sign() * g.abs().clamp_min(LEAST).sqrt()
        # In fp32, rows that fill no vector of the processor differ by a bit.
        return torch.sigmoid(root.double()).float()

    def write(self, streams: Tensor, gate: Tensor, value: Tensor) -> Tensor:
        """Streams [t, s, hidden] with the value [t, hidden] in each."""
        return (streams.float() + gate[..., None] * value.float()[:, None]).to(streams.dtype)
