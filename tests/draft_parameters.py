"""Random drafting heads as float64 tensors, which the oracle takes in place of a checkpoint's."""

from dataclasses import replace

import torch

from model.checkpoint.names import Parameter, parameters
from model.config import LayerKind, ModelConfig
from tests.make_checkpoint import random_values


class Given:
    """What `probes.oracle.Parameters` offers, over values that are given."""

    def __init__(self, values, rounded=frozenset()):
        self.values, self.rounded = values, rounded

    def __getitem__(self, name):
        return self.values[name]

    fresh = __getitem__

    def rows(self, name, ids):
        return self.values[name][ids]

    def rounds(self, name):
        return name in self.rounded


def head_parameters(config: ModelConfig, head: str, rank: int = 8) -> dict[str, Parameter]:
    """Every parameter of "mtp" or "dspark" by official name, and the main model's embedding and head."""
    one = replace(config, num_hidden_layers=1, compress_ratios=(0,), layer_kinds=(LayerKind.SWA,), num_hash_layers=0)
    V, D = config.vocab_size, config.hidden_size
    block, ends = {}, {}
    for name, parameter in parameters(one).items():
        (block if name.startswith("layers.") else ends)[name.removeprefix("layers.0.")] = parameter
    main = {name: ends.pop(name) for name in ("embed.weight", "head.weight")}
    if head == "mtp":
        norms = {f"{name}.weight": Parameter((D,), "bf16") for name in ("enorm", "hnorm")}
        linears = {f"{name}.weight": Parameter((D, D), "matrix") for name in ("e_proj", "h_proj")}
        stages = [block | norms | linears | ends]
    else:
        first = {"main_proj.weight": Parameter((D, 3 * D), "matrix"), "main_norm.weight": Parameter((D,), "bf16")}
        markov = {f"markov_head.markov_{name}.weight": Parameter((V, rank), "bf16") for name in ("w1", "w2")}
        confidence = {"confidence_head.proj.weight": Parameter((1, D + rank), "bf16")}
        stages = [block | first, block, block | ends | markov | confidence]
    of_stages = (
        {f"mtp.{stage}.{name}": parameter for name, parameter in named.items()} for stage, named in enumerate(stages)
    )
    return main | {name: parameter for named in of_stages for name, parameter in named.items()}


def random_head(config: ModelConfig, head: str, seed: int = 0) -> Given:
    """A head of random values, in whose linears `deployed` numerics round all inputs that a published one's round."""
    generator = torch.Generator().manual_seed(seed)
    named = head_parameters(config, head)
    values = {
        name: random_values(name, parameter, config.n_routed_experts, generator).double()
        for name, parameter in named.items()
    }
    return Given(values, {name for name, parameter in named.items() if parameter.kind == "matrix"})
