"""A Llama-family network with CoDA's attention: differential, over everything or over a bounded cache."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from fathom.kernels.differential.reference import combine, noise_query
from fathom.model.cache.gqa import all_heads
from fathom.model.variants import coda_attention
from fathom.model.variants.choice import GroupedCoda
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Differential, Tokens
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.grouped import coda_settings
from fathom.scripts.train.coda_banks import TrainingCache, prefill
from fathom.scripts.train.llama_network import Attention, Network, Rotation, heads
from fathom.scripts.train.recipe import Recipe

NORM_EPS = 1e-6

# What one sequence of one layer is remembered by: tokens and the query mechanism to attended values [t, H, D].
Memory = Callable[[Tokens, Differential], Tensor]


class CodaAttention(nn.Module):
    """Differential attention over a copy of a layer's projections. The head norm is the identity.

    Parameters have the names of the package's module. `lambda_proj.weight` is drawn as torch draws a linear layer.

    Parameters
    ----------
    base
        The layer's attention; its weights are copied.
    query_heads
        Of the layer.
    recipe
        Where the other parameters start.

    """

    def __init__(self, base: Attention, query_heads: int, recipe: Recipe) -> None:
        super().__init__()
        self.head_dim = base.head_dim
        self.q_proj, self.k_proj = deepcopy(base.q_proj), deepcopy(base.k_proj)
        self.v_proj, self.o_proj = deepcopy(base.v_proj), deepcopy(base.o_proj)
        width, kv_heads = base.q_proj.in_features, base.k_proj.out_features // base.head_dim
        self.lambda_proj, self.write_proj = nn.Linear(width, query_heads), nn.Linear(width, 1)
        nn.init.constant_(self.lambda_proj.bias, recipe.lambda_bias)
        nn.init.zeros_(self.write_proj.weight)
        nn.init.constant_(self.write_proj.bias, recipe.gate_bias)
        self.theta = nn.Parameter(torch.full((query_heads, base.head_dim // 2), recipe.theta))
        self.summary_eta_logit = nn.Parameter(torch.full((kv_heads,), recipe.eta_logit))

    def differential(self) -> Differential:
        """The query mechanism, in the graph."""
        return Differential(self.theta.cos(), self.theta.sin(), None, NORM_EPS)

    def forward(self, x: Tensor, rotation: Rotation, memory: Sequence[Memory] | None) -> Tensor:
        """[b, t, hidden] to the same; `memory` is of each of the b sequences, None: all tokens before, unbounded."""
        q, k, v = heads(self, x, rotation)
        lam, gates = self.lambda_proj(x).sigmoid(), self.write_proj(x).sigmoid()[..., 0]
        differential = self.differential()
        if memory is None:
            out = unbounded(q, k, v, lam, differential)
        else:
            each = (Tokens(*parts) for parts in zip(q, k, v, gates, lam, strict=True))
            out = torch.stack([own(tokens, differential) for own, tokens in zip(memory, each, strict=True)])
        return self.o_proj(out.flatten(2))  # type: ignore[no-any-return]


def unbounded(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, differential: Differential) -> Tensor:
    """Causal differential attention over everything: q [b, t, H, D], k and v [b, t, K, D], lam [b, t, H]."""
    noise = torch.stack([noise_query(row, differential.cos, differential.sin) for row in q])
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    signal, subtracted = (
        scaled_dot_product_attention(part.transpose(1, 2), k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        for part in (q, noise)
    )
    return combine(signal, subtracted, lam, differential.norm, differential.eps)


def adapted(base: Network, seed: int, recipe: Recipe) -> Network:
    """The network with CoDA attention in every layer, of which nothing but that attention is trained.

    It shares everything else with `base`, whose parameters are frozen.
    """
    generator = torch.random.get_rng_state()
    torch.manual_seed(seed)
    network = twin(base.requires_grad_(requires_grad=False))
    for block in network.blocks():
        assert isinstance(block.self_attn, Attention)
        block.self_attn = CodaAttention(block.self_attn, network.config.num_attention_heads, recipe)
        block.self_attn.to(network.freqs.device).requires_grad_(requires_grad=True)
    torch.random.set_rng_state(generator)
    return network


def twin(network: Network) -> Network:
    """A copy of a network that shares what is not trained."""
    shared = [*network.buffers(), *(parameter for parameter in network.parameters() if not parameter.requires_grad)]
    return deepcopy(network, {id(tensor): tensor for tensor in shared})


def attentions(network: Network) -> list[CodaAttention]:
    """The CoDA attention of each layer."""
    return [block.self_attn for block in network.blocks() if isinstance(block.self_attn, CodaAttention)]


class Bounded(NamedTuple):
    """The bounded cache of every layer: its settings, and how a call is read."""

    settings: CodaSettings
    block: int  # tokens
    strict: bool = False
    gated: bool = True
    detach: bool = False  # in training, see `TrainingCache`

    @classmethod
    def of(cls, variant: GroupedCoda, *, detach: bool = False) -> "Bounded":
        """As `--kv` has it."""
        return cls(coda_settings(variant), variant.block, bool(variant.strict), bool(variant.gated), detach)

    def offered(self, tokens: Tokens) -> Tokens:
        """Tokens as the cache takes them: each worth keeping alike where gates do not count."""
        return tokens if self.gated or tokens.gates is None else tokens._replace(gates=torch.ones_like(tokens.gates))


def training_memory(network: Network, bounded: Bounded, rows: int) -> list[list[Memory]]:
    """For each layer, a cache with gradients for each of `rows` sequences; for one forward pass."""
    kv_heads, width = network.config.num_key_value_heads, network.config.head_dim

    def memory(layer: CodaAttention) -> Memory:
        eta = layer.summary_eta_logit
        cache = TrainingCache(bounded.settings, kv_heads, width, eta, detach=bounded.detach)
        return lambda tokens, differential: prefill(
            cache, bounded.offered(tokens), differential, bounded.block, strict=bounded.strict
        )

    return [[memory(layer) for _ in range(rows)] for layer in attentions(network)]


def inference_memory(network: Network, bounded: Bounded) -> list[list[Memory]]:
    """For each layer, the cache of inference in fp32, for one sequence."""
    kv_heads, width, device = network.config.num_key_value_heads, network.config.head_dim, network.freqs.device

    def memory(layer: CodaAttention) -> Memory:
        eta = layer.summary_eta_logit
        cache = CodaCache(bounded.settings, all_heads(kv_heads), width, eta, torch.float32, device)
        return lambda tokens, differential: coda_attention.prefill(
            cache, bounded.offered(tokens), differential, bounded.block, strict=bounded.strict
        )

    return [[memory(layer)] for layer in attentions(network)]
