"""Where the networks start from: random weights, with structures by hand that training is free to change.

Random weights alone do not find retrieval within the budget. In the V4 demo:

1. Layer 0 starts with a previous-token head: embeddings share a component u, and constants read from u make the two
   fastest RoPE pairs of two heads prefer distance one.
2. Compressors are blind to u. In CSA layers the query's first projection and the compressor's are the same random
   matrix, so a query matches entries that hold what it holds; the indexer gets the same. Both with noise on them.
3. In HCA layers a constant query meets a constant key of every entry in the slowest RoPE pair, so two heads start as
   the mean over the document, and that mean is written loud enough to be read.

In the small Llama, where a code is told as "... X is V" and asked for as "... X is":

1. Constants read from u let two heads of layer 0 attend to the token before (head 0) and to the one before that
   (head 1), by the fast RoPE pairs; both write what they read where they find it again.
2. In later layers a query reads what head 0 wrote ("is" asks with X) and a key reads what head 1 wrote (V answers to
   X), by one projection, in the slow half of the RoPE pairs: a match does not depend on the distance.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fathom.model.config import ModelConfig
from fathom.model.llama.config import LlamaConfig
from fathom.scripts.train import llama_network as llama
from fathom.scripts.train import v4_network as v4
from fathom.scripts.train.draft_network import DSpark, Head, Mtp
from fathom.scripts.train.layers import Gate, HyperConnection, HyperHead, MoE

NOISE = 0.3  # on a projection that is set by hand
SHARED = 0.5  # of an embedding's length, the component that all have
# Of the small Llama.
FAST_PAIRS = 12  # of the heads that look one and two tokens back
PEAK = 8.0  # logit that each such pair gives at its distance
MATCH = 2.0  # of content in later layers


def fan_in(W: Tensor, generator: torch.Generator, gain: float = 1.0) -> None:
    """Normal with deviation gain / sqrt(inputs)."""
    W.normal_(0, gain * W.shape[-1] ** -0.5, generator=generator)


def without(W: Tensor, u: Tensor) -> None:
    """Make W blind to u, in place: what all tokens share tells none of them apart."""
    W.sub_(torch.outer(W @ u, u))


@torch.no_grad()
def initialise_v4(network: v4.Network, seed: int) -> None:
    """Fill every parameter and the hash table of `network` from `seed`."""
    generator, config = torch.Generator().manual_seed(seed), network.config
    u = normalize(torch.randn(config.hidden_size, generator=generator), dim=0)
    network.embed.weight.normal_(generator=generator).add_(SHARED * config.hidden_size**0.5 * u)
    fan_in(network.head.weight, generator)
    hyper_site(network.hc_head, generator)
    for block in network.blocks():
        layer(block, config, generator)
        if block.attn.ratio == 4:
            read_alike(block.attn, config, u, generator)
        if block.attn.ratio == 128:
            attend_to_everything(block.attn, config, u)
    attend_to_previous(network.blocks()[0].attn, config, u)


@torch.no_grad()
def initialise_draft(head: Head, seed: int) -> None:
    """Fill every parameter of a draft head from `seed`. The Markov head adds nothing at first."""
    generator = torch.Generator().manual_seed(seed)
    for stage in head.blocks():
        layer(stage, head.config, generator)
    if isinstance(head, Mtp):
        fan_in(head.stage.e_proj.weight, generator)
        fan_in(head.stage.h_proj.weight, generator)
        hyper_site(head.stage.hc_head, generator)
    if isinstance(head, DSpark):
        fan_in(head.first.main_proj.weight, generator)
        hyper_site(head.last.hc_head, generator)
        head.last.markov_head.markov_w1.weight.normal_(generator=generator)
        head.last.markov_head.markov_w2.weight.zero_()
        head.last.confidence_head.proj.weight.zero_()


def layer(block: v4.Block, config: ModelConfig, generator: torch.Generator) -> None:
    """Any block: both hyper-connections, experts, attention."""
    hyper_site(block.hc_attn, generator)
    hyper_site(block.hc_ffn, generator)
    experts(block.ffn, config, generator)
    attention(block.attn, config, generator)


def hyper_site(site: HyperConnection | HyperHead, generator: torch.Generator) -> None:
    """Streams start slightly apart, each close to a plain residual; the head reads their mean, nearly."""
    site.fn.normal_(0, 0.01, generator=generator)
    if isinstance(site, HyperConnection):
        n = site.config.hc_mult
        site.base.normal_(0, 0.3, generator=generator)
        site.base[2 * n :] = 3 * torch.eye(n).flatten()
    else:
        site.base.zero_()
    site.scale.fill_(1.0)


def experts(moe: MoE, config: ModelConfig, generator: torch.Generator) -> None:
    """Experts with small outputs; a hash table that loads every expert alike."""
    shared, small = moe.shared_experts, (2 * config.num_hidden_layers) ** -0.5
    for W, gain in ((moe.w1, 1.0), (moe.w3, 1.0), (moe.w2, small), (moe.gate.weight, 1.0)):
        fan_in(W, generator, gain)
    for linear, gain in ((shared.w1, 1.0), (shared.w3, 1.0), (shared.w2, small)):
        fan_in(linear.weight, generator, gain)
    if moe.gate.hashed:
        hash_table(moe.gate, config, generator)


def hash_table(gate: Gate, config: ModelConfig, generator: torch.Generator) -> None:
    """Random, balanced, and never the same expert twice for one token."""
    vocab, n = config.vocab_size, config.n_routed_experts
    first = torch.arange(vocab)[torch.randperm(vocab, generator=generator)] % n
    step = torch.stack([torch.randperm(n - 1, generator=generator) for _ in range(vocab)]) + 1
    others = (first.unsqueeze(1) + step[:, : config.num_experts_per_tok - 1]) % n
    gate.tid2eid.copy_(torch.cat([first.unsqueeze(1), others], 1))


def attention(attn: v4.Attention, config: ModelConfig, generator: torch.Generator) -> None:
    """Random projections; compressors pool evenly at first."""
    for linear in (attn.wq_a, attn.wq_b, attn.wkv, attn.wo_a):
        fan_in(linear.weight, generator)
    fan_in(attn.wo_b.weight, generator, (2 * config.num_hidden_layers) ** -0.5)
    compressors = [attn.compressor] if attn.ratio else []
    if attn.ratio == 4:
        fan_in(attn.indexer.wq_b.weight, generator)
        fan_in(attn.indexer.weights_proj.weight, generator, 0.3)
        compressors.append(attn.indexer.compressor)
    for compressor in compressors:
        fan_in(compressor.wkv.weight, generator)
        fan_in(compressor.wgate.weight, generator, 0.1)


def read_alike(attn: v4.Attention, config: ModelConfig, u: Tensor, generator: torch.Generator) -> None:
    """Queries and entries of a CSA layer read the token through one projection C."""
    d = config.head_dim - config.qk_rope_head_dim
    C = torch.randn(d, config.hidden_size, generator=generator) * config.hidden_size**-0.5
    without(C, u)
    attn.wq_a.weight[:d] = C + NOISE * attn.wq_a.weight[:d]
    index = attn.indexer
    for W, compressor, width in (
        (attn.wq_b.weight, attn.compressor, config.head_dim),
        (index.wq_b.weight, index.compressor, config.index_head_dim),
    ):
        W.mul_(NOISE)  # each head's first d channels are the query's, with noise; the rotating ones stay small
        W.unflatten(0, (-1, width))[:, :d, :d] += torch.eye(d)
        for first in (0, width):  # both series of the compressor write C x into their first channels, with noise
            compressor.wkv.weight[first : first + d].mul_(NOISE).add_(C)
    index.weights_proj.weight.add_(0.05 * u)  # entries that match count for, not against


def attend_to_everything(attn: v4.Attention, config: ModelConfig, u: Tensor) -> None:
    """Heads 0 and 1 of an HCA layer average all entries; what they average is the words, not what words share."""
    without(attn.compressor.wkv.weight, u)
    attn.compressor.norm.weight.fill_(2.0)
    attn.wo_b.weight.mul_((2 * config.num_hidden_layers) ** 0.5)
    attn.wq_a.weight[0] = u
    slowest = config.head_dim - 2
    attn.compressor.wkv.weight[slowest] = 0.3 * u
    for head in (0, 1):
        attn.wq_b.weight[head * config.head_dim + slowest, 0] += 4


def attend_to_previous(attn: v4.Attention, config: ModelConfig, u: Tensor) -> None:
    """Heads 0 and 1 of layer 0: a constant query, turned back by one position, meets a constant key."""
    attn.wq_a.weight[0] = u
    attn.wo_b.weight.mul_((2 * config.num_hidden_layers) ** 0.5)  # the previous token weighs as much as the token
    nope = config.head_dim - config.qk_rope_head_dim
    for pair in (0, 1):
        angle = -(config.rope_theta ** (-2 * pair / config.qk_rope_head_dim))
        attn.wkv.weight[nope + 2 * pair] += 2 * u
        for head in (0, 1):
            row = head * config.head_dim + nope + 2 * pair
            attn.wq_b.weight[row, 0] += 4 * math.cos(angle)
            attn.wq_b.weight[row + 1, 0] += 4 * math.sin(angle)


@torch.no_grad()
def initialise_llama(network: llama.Network, seed: int) -> None:
    """Fill every parameter from `seed`. The head must not be tied: its rows and the embedding's differ in scale."""
    config, generator = network.config, torch.Generator().manual_seed(seed)
    assert not config.tie_word_embeddings, "a tied head would start with logits of deviation 10"
    hidden, small = config.hidden_size, (2 * config.num_hidden_layers) ** -0.5
    u = normalize(torch.randn(hidden, generator=generator), dim=0)
    embeddings = torch.randn(config.vocab_size, hidden, generator=generator)
    without(embeddings, u)
    network.model.embed_tokens.weight.copy_(hidden**0.5 * (normalize(embeddings, dim=1) + SHARED * u))
    fan_in(network.lm_head.weight, generator)
    drawn = [torch.randn(hidden, config.head_dim, generator=generator) for _ in range(2)]
    written = [torch.linalg.qr(part).Q for part in drawn]  # where heads 0 and 1 of layer 0 write: orthonormal columns
    for layer, block in enumerate(network.blocks()):
        attn, mlp = block.self_attn, block.mlp
        assert isinstance(attn, llama.Attention)
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj, mlp.gate_proj, mlp.up_proj):
            fan_in(linear.weight, generator)
        for linear in (attn.o_proj, mlp.down_proj):
            fan_in(linear.weight, generator, small)
        if layer == 0:
            look_back(attn, config, u, written)
        else:
            match_content(attn, config, written)


def look_back(attn: llama.Attention, config: LlamaConfig, u: Tensor, written: list[Tensor]) -> None:
    """Heads 0 and 1: a constant query, turned back by one position or two, meets a constant key."""
    d, half = config.head_dim, config.head_dim // 2
    constant = SHARED * (config.hidden_size / (1 + SHARED**2)) ** 0.5  # u . x after the norm, the same for every token
    gain = (PEAK * d**0.5) ** 0.5 / constant
    freqs = config.rope_theta ** (-torch.arange(FAST_PAIRS) / half)
    K, V, Q, O = (projection.weight for projection in (attn.k_proj, attn.v_proj, attn.q_proj, attn.o_proj))
    K[:d] = 0
    K[:FAST_PAIRS] = gain * u
    without(V[:d], u)
    for head, (distance, basis) in enumerate(zip((1, 2), written, strict=True)):
        rows = Q[head * d : (head + 1) * d]
        rows.zero_()
        rows[:FAST_PAIRS] = gain * torch.outer((freqs * distance).cos(), u)
        rows[half : half + FAST_PAIRS] = -gain * torch.outer((freqs * distance).sin(), u)
        O[:, head * d : (head + 1) * d] = basis


def match_content(attn: llama.Attention, config: LlamaConfig, written: list[Tensor]) -> None:
    """Each KV head and its queries compare a share of what layer 0 wrote, in the slow half of the RoPE pairs."""
    d, half = config.head_dim, config.head_dim // 2
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half // 2, half) + half))  # [half] dims
    asked, told = (MATCH * basis.T for basis in written)  # [head_dim, hidden] each
    groups = config.num_attention_heads // config.num_key_value_heads
    for projection, content, group in ((attn.q_proj, asked, groups), (attn.k_proj, told, 1)):
        W: Tensor = projection.weight
        W.mul_(NOISE)
        for head in range(len(W) // d):
            W[head * d + slow] += content[(torch.arange(half) + (head // group) * half) % d]
