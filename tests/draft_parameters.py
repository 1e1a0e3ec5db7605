"""Random draft heads as float64 tensors, which the oracle takes in place of a checkpoint's."""

from dataclasses import replace

import torch

from fathom.model.checkpoint.mtp import Head, head_parameters
from fathom.model.checkpoint.names import parameters
from fathom.model.config import Dspark, ModelConfig
from tests.make_checkpoint import random_values


class Given:
    """What `probes.judge.oracle.Parameters` offers, over values that are given."""

    def __init__(self, values, rounded=frozenset()):
        self.values, self.rounded, self.types = values, rounded, {}

    def __getitem__(self, name):
        return self.values[name]

    fresh = __getitem__

    def rows(self, name, ids):
        return self.values[name][ids]

    def rounds(self, name):
        return name in self.rounded


def random_head(config: ModelConfig, head: Head, seed: int = 0) -> Given:
    """A head of random values, in whose linears `deployed` numerics round all inputs that a published one's round."""
    generator = torch.Generator().manual_seed(seed)
    targets = tuple(range(config.num_hidden_layers))[-3:]
    named = head_parameters(head, replace(config, dspark=Dspark(5, 0, targets, markov_rank=8)))
    main = {name: parameters(config)[name] for name in ("embed.weight", "head.weight")}
    values = {
        name: random_values(name, parameter, config.n_routed_experts, generator).double()
        for name, parameter in (main | named).items()
    }
    return Given(values, {name for name, parameter in named.items() if parameter.kind == "matrix"})
