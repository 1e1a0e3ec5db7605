"""Where the small Llama starts from: random weights, and a first draft of the circuit that looks a code up.

A code is told as "... X is V" and asked for as "... X is". Three structures, all free to change in training:

1. Embeddings share a component u. Constants read from u let two heads of layer 0 attend to the token before (head 0)
   and to the one before that (head 1), by the fast RoPE pairs; both write what they read where they find it again.
2. In later layers a query reads what head 0 wrote ("is" asks with X) and a key reads what head 1 wrote (V answers to
   X), by one projection, in the slow half of the RoPE pairs: a match does not depend on the distance.
3. Everything else is small noise.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from model.llama.config import LlamaConfig
from scripts.demo.initial import NOISE, fan_in, without
from scripts.llama.network import Attention, Network

SHARED = 0.5  # of an embedding's length, the component that all have
FAST_PAIRS = 12  # of the heads that look one and two tokens back
PEAK = 8.0  # logit that each such pair gives at its distance
MATCH = 2.0  # of content in later layers


def initialise(network: Network, seed: int) -> None:
    """Fill every parameter from `seed`. The head must not be tied: its rows and the embedding's differ in scale."""
    config, generator = network.config, torch.Generator().manual_seed(seed)
    assert not config.tie_word_embeddings, "a tied head would start with logits of deviation 10"
    hidden, small = config.hidden_size, (2 * config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        u = normalize(torch.randn(hidden, generator=generator), dim=0)
        embeddings = torch.randn(config.vocab_size, hidden, generator=generator)
        without(embeddings, u)
        network.model.embed_tokens.weight.copy_(hidden**0.5 * (normalize(embeddings, dim=1) + SHARED * u))
        fan_in(network.lm_head.weight, generator)
        written = look_back_bases(config, generator)
        for layer, block in enumerate(network.blocks()):
            attention, mlp = block.self_attn, block.mlp
            assert isinstance(attention, Attention)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
                fan_in(linear.weight, generator)
            for linear in (attention.o_proj, mlp.down_proj):
                fan_in(linear.weight, generator, small)
            if layer == 0:
                look_back(attention, config, u, written)
            else:
                match_content(attention, config, written)


def look_back_bases(config: LlamaConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Where heads 0 and 1 of layer 0 write: two matrices [hidden, head_dim] with orthonormal columns."""
    first, second = (torch.randn(config.hidden_size, config.head_dim, generator=generator) for _ in range(2))
    return torch.linalg.qr(first).Q, torch.linalg.qr(second).Q


def look_back(attention: Attention, config: LlamaConfig, u: Tensor, written: tuple[Tensor, Tensor]) -> None:
    """Heads 0 and 1: a constant query, turned back by one position or two, meets a constant key."""
    d, half = config.head_dim, config.head_dim // 2
    said = SHARED * (config.hidden_size / (1 + SHARED**2)) ** 0.5  # u . x after the norm, the same for every token
    gain = (PEAK * d**0.5) ** 0.5 / said
    freqs = config.rope_theta ** (-torch.arange(FAST_PAIRS) / half)
    K, V, Q, O = attention.k_proj.weight, attention.v_proj.weight, attention.q_proj.weight, attention.o_proj.weight
    K[:d] = 0
    K[:FAST_PAIRS] = gain * u
    without(V[:d], u)
    for head, (distance, basis) in enumerate(zip((1, 2), written, strict=True)):
        rows = Q[head * d : (head + 1) * d]
        rows.zero_()
        rows[:FAST_PAIRS] = gain * torch.outer((freqs * distance).cos(), u)
        rows[half : half + FAST_PAIRS] = -gain * torch.outer((freqs * distance).sin(), u)
        O[:, head * d : (head + 1) * d] = basis


def match_content(attention: Attention, config: LlamaConfig, written: tuple[Tensor, Tensor]) -> None:
    """Each KV head and its queries compare a share of what layer 0 wrote, in the slow half of the RoPE pairs."""
    d, half = config.head_dim, config.head_dim // 2
    slow = torch.cat((torch.arange(half // 2, half), torch.arange(half // 2, half) + half))  # [half] dims
    asked, told = (MATCH * basis.T for basis in written)  # [head_dim, hidden] each
    groups = config.num_attention_heads // config.num_key_value_heads
    attention.q_proj.weight.mul_(NOISE)
    attention.k_proj.weight.mul_(NOISE)
    for head in range(config.num_attention_heads):
        share = (torch.arange(half) + (head // groups) * half) % d
        attention.q_proj.weight[head * d + slow] += asked[share]
        if head % groups == 0:
            attention.k_proj.weight[(head // groups) * d + slow] += told[share]
