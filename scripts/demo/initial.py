"""Where the demo network starts from. Random weights alone do not find retrieval within the budget.

Three structures are put in by hand, and training is free to change them:

1. Layer 0 starts with a previous-token head: embeddings share a component u, and constants read from u make the two
   fastest RoPE pairs of two heads prefer distance one.
2. Compressors are blind to u. In CSA layers the query's first projection and the compressor's are the same random
   matrix, so a query matches entries that hold what it holds; the indexer gets the same. Both with noise on them.
3. In HCA layers a constant query meets a constant key of every entry in the slowest RoPE pair, so two heads start as
   the mean over the document, and that mean is written loud enough to be read.
"""

import math

import torch
from torch import Tensor

from scripts.demo.attention import Attention, Compressor
from scripts.demo.layers import Gate, MoE
from scripts.demo.network import Block, Network
from scripts.demo.shape import Shape
from scripts.demo.streams import HyperConnection, HyperHead

NOISE = 0.3


def initialise(network: Network, seed: int) -> None:
    """Fill every parameter and the hash table of `network` from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    shape = network.shape
    with torch.no_grad():
        u = torch.nn.functional.normalize(torch.randn(shape.hidden, generator=generator), dim=0)
        network.embed.weight.normal_(generator=generator).add_(0.5 * shape.hidden**0.5 * u)
        fan_in(network.head.weight, generator)
        hyper_head(network.hc_head, generator)
        for block in network.layers:
            assert isinstance(block, Block)
            hyper_connection(block.hc_attn, shape, generator)
            hyper_connection(block.hc_ffn, shape, generator)
            experts(block.ffn, shape, generator)
            attention(block.attn, shape, generator)
            if block.attn.ratio == 4:
                match_content(block.attn, shape, u, generator)
            if block.attn.ratio == 128:
                attend_to_everything(block.attn, shape, u)
        first = network.layers[0]
        assert isinstance(first, Block)
        attend_to_previous(first.attn, shape, u)


def fan_in(W: Tensor, generator: torch.Generator, gain: float = 1.0) -> None:
    """Normal with deviation gain / sqrt(inputs)."""
    W.normal_(0, gain * W.shape[-1] ** -0.5, generator=generator)


def hyper_connection(site: HyperConnection, shape: Shape, generator: torch.Generator) -> None:
    """Streams start slightly apart, each close to a plain residual."""
    n = shape.streams
    site.fn.normal_(0, 0.01, generator=generator)
    site.base.normal_(0, 0.3, generator=generator)
    site.base[2 * n :] = 3 * torch.eye(n).flatten()
    site.scale.fill_(1.0)


def hyper_head(head: HyperHead, generator: torch.Generator) -> None:
    """The mean of the streams, nearly."""
    head.fn.normal_(0, 0.01, generator=generator)
    head.base.zero_()
    head.scale.fill_(1.0)


def experts(moe: MoE, shape: Shape, generator: torch.Generator) -> None:
    """Experts with small outputs; a hash table that loads every expert alike."""
    small = (2 * shape.layers) ** -0.5
    for W, gain in ((moe.w1, 1.0), (moe.w3, 1.0), (moe.w2, small), (moe.gate.weight, 1.0)):
        fan_in(W, generator, gain)
    for linear, gain in ((moe.shared_experts.w1, 1.0), (moe.shared_experts.w3, 1.0), (moe.shared_experts.w2, small)):
        fan_in(linear.weight, generator, gain)
    if moe.gate.hashed:
        hash_table(moe.gate, shape, generator)


def hash_table(gate: Gate, shape: Shape, generator: torch.Generator) -> None:
    """Random, balanced, and never the same expert twice for one token."""
    first = torch.arange(shape.vocab)[torch.randperm(shape.vocab, generator=generator)] % shape.experts
    step = torch.stack([torch.randperm(shape.experts - 1, generator=generator) for _ in range(shape.vocab)]) + 1
    others = (first.unsqueeze(1) + step[:, : shape.experts_per_token - 1]) % shape.experts
    gate.tid2eid.copy_(torch.cat([first.unsqueeze(1), others], 1))


def attention(attn: Attention, shape: Shape, generator: torch.Generator) -> None:
    """Random projections; compressors pool evenly at first."""
    for linear in (attn.wq_a, attn.wq_b, attn.wkv, attn.wo_a):
        fan_in(linear.weight, generator)
    fan_in(attn.wo_b.weight, generator, (2 * shape.layers) ** -0.5)
    compressors = [attn.compressor] if attn.ratio else []
    if attn.ratio == 4:
        fan_in(attn.indexer.wq_b.weight, generator)
        fan_in(attn.indexer.weights_proj.weight, generator, 0.3)
        compressors.append(attn.indexer.compressor)
    for compressor in compressors:
        fan_in(compressor.wkv.weight, generator)
        fan_in(compressor.wgate.weight, generator, 0.1)


def match_content(attn: Attention, shape: Shape, u: Tensor, generator: torch.Generator) -> None:
    """Queries and entries of a CSA layer read the token through one projection C."""
    d = shape.head_dim - shape.rope_dims
    C = torch.randn(d, shape.hidden, generator=generator) * shape.hidden**-0.5
    without(C, u)
    attn.wq_a.weight[:d] = C + NOISE * attn.wq_a.weight[:d]
    read_content(attn.wq_b.weight, shape.heads, shape.head_dim, d)
    write_content(attn.compressor, shape.head_dim, C)
    read_content(attn.indexer.wq_b.weight, shape.index_heads, shape.index_dim, d)
    write_content(attn.indexer.compressor, shape.index_dim, C)
    attn.indexer.weights_proj.weight.add_(0.05 * u)  # entries that match count for, not against


def attend_to_everything(attn: Attention, shape: Shape, u: Tensor) -> None:
    """Heads 0 and 1 of an HCA layer average all entries; what they average is the words, not what words share."""
    without(attn.compressor.wkv.weight, u)
    attn.compressor.norm.weight.fill_(2.0)
    attn.wo_b.weight.mul_((2 * shape.layers) ** 0.5)
    attn.wq_a.weight[0] = u
    slowest = shape.head_dim - 2
    attn.compressor.wkv.weight[slowest] = 0.3 * u
    for head in (0, 1):
        attn.wq_b.weight[head * shape.head_dim + slowest, 0] += 4


def without(W: Tensor, u: Tensor) -> None:
    """Make W blind to u, in place: what all tokens share tells none of them apart."""
    W.sub_(torch.outer(W @ u, u))


def read_content(W: Tensor, heads: int, width: int, d: int) -> None:
    """Each head's first d channels are the query's first d channels, with noise; the rotating ones stay small."""
    W.mul_(NOISE)
    for head in range(heads):
        W[head * width : head * width + d, :d] += torch.eye(d)


def write_content(compressor: Compressor, width: int, C: Tensor) -> None:
    """Both series of the compressor write C x into their first channels, with noise."""
    d = C.shape[0]
    for first in (0, width):
        W = compressor.wkv.weight[first : first + d]
        W.mul_(NOISE).add_(C)


def attend_to_previous(attn: Attention, shape: Shape, u: Tensor) -> None:
    """Heads 0 and 1 of layer 0: a constant query, turned back by one position, meets a constant key."""
    attn.wq_a.weight[0] = u
    attn.wo_b.weight.mul_((2 * shape.layers) ** 0.5)  # the previous token weighs as much as the token itself
    nope = shape.head_dim - shape.rope_dims
    for pair in (0, 1):
        angle = -(shape.rope_theta ** (-2 * pair / shape.rope_dims))
        attn.wkv.weight[nope + 2 * pair] += 2 * u
        for head in (0, 1):
            row = head * shape.head_dim + nope + 2 * pair
            attn.wq_b.weight[row, 0] += 4 * math.cos(angle)
            attn.wq_b.weight[row + 1, 0] += 4 * math.sin(angle)
