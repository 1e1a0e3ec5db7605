"""The Llama family as a differentiable module, with a batch axis.

Parameters have the names of the published files, so that `state_dict` is the checkpoint. What a layer attends to is
its attention's matter: `scripts.train.coda_network` puts another one in its place.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from fathom.kernels.rope import reference as rope
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.rope import frequencies
from fathom.scripts.train.layers import Norm


class Rotation(NamedTuple):
    """Cos and sin of every token's position, each [b * t, head_dim / 2] float32."""

    cos: Tensor
    sin: Tensor


class Seen(NamedTuple):
    """What one layer's attention was computed from; kept for the supervision of it."""

    q: Tensor  # [b, t, H, d], rotated
    k: Tensor  # [b, t, K, d], rotated


class Attention(nn.Module):
    """Causal attention with grouped heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        d, hidden = config.head_dim, config.hidden_size
        self.head_dim = d
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, hidden, bias=False)

    def forward(self, x: Tensor, rotation: Rotation, record: list[Seen] | None) -> Tensor:
        """[b, t, hidden] to the same; what was attended with is appended to `record`."""
        q, k, v = heads(self, x, rotation)
        if record is not None:
            record.append(Seen(q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [b, heads, t, d]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Projecting(Protocol):
    """What has the projections of a layer."""

    head_dim: int
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear


def heads(layer: Projecting, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [b, t, H, d] and keys [b, t, K, d], rotated, and values [b, t, K, d] of x [b, t, hidden]."""
    q, k, v = (proj(x).unflatten(-1, (-1, layer.head_dim)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = (rope.rotate_halves(part.flatten(0, 1), *rotation).view(part.shape) for part in (q, k))
    return q, k, v


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: nn.Module = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rotation: Rotation, how: object) -> Tensor:
        """[b, t, hidden] to the same; `how` is for the layer's attention."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, how)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class Trunk(nn.Module):
    """Everything but the head, under the name that the files give it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class Network(nn.Module):
    """A whole model. A head of its own unless the config ties it to the embedding."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.model = config, Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.register_buffer("freqs", frequencies(config), persistent=False)  # [head_dim / 2]

    freqs: Tensor

    def blocks(self) -> list[Block]:
        """The layers, in order."""
        return [block for block in self.model.layers if isinstance(block, Block)]

    def rotation(self, positions: Tensor) -> Rotation:
        """The rotation of tokens at `positions` [b, t]."""
        return Rotation(*rope.angles(positions.flatten(), self.freqs))

    def forward(
        self, ids: Tensor, positions: Tensor, how: Sequence[object] | None = None, *, checkpointing: bool = False
    ) -> Tensor:
        """Logits [b, t, vocab] of ids and positions [b, t].

        Parameters
        ----------
        ids, positions
            [b, t] int64.
        how
            For each layer, what its attention takes beside its input; None: nothing.
        checkpointing
            Keep the input of each layer only, and compute the layer a second time in the backward pass: for layers
            that do the same when they are called again.

        """
        x, rotation = self.model.embed_tokens(ids), self.rotation(positions)
        for block, own in zip(self.blocks(), how or [None] * len(self.blocks()), strict=True):
            x = checkpoint(block, x, rotation, own, use_reentrant=False) if checkpointing else block(x, rotation, own)
        return self.lm_head(self.model.norm(x))  # type: ignore[no-any-return]
