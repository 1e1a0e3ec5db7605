"""The architecture as a batched, differentiable network: for training the demo, not for running it.

Equal to transformers' `DeepseekV4ForCausalLM` on the same weights. `simulated` adds DeepSeek's rounding of weights and
activations (`rounding`), so that the last part of training sees the numbers that the deployed checkpoint will.
Parameters carry the checkpoint's names, except that the experts of a layer are stacked.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scripts.demo.attention import Attention, Indexer, Seen, rope_frequencies
from scripts.demo.layers import MoE, Quantised, RMSNorm
from scripts.demo.shape import Shape
from scripts.demo.streams import HyperConnection, HyperHead, merge


@dataclass
class Run:
    """What a forward pass may see, and what it leaves behind for the losses.

    Attributes
    ----------
    csa
        "indexer": the indexer's `topk` entries; "all" of them; "random": `topk` random ones; "none".
    hca
        Whether HCA layers see their entries.
    blind
        [b] bool: rows whose CSA layers see no entry, None where every row sees them.
    positions
        [b, t] positions for RoPE alone, None for 0 to t - 1.
    record
        Whether CSA layers append to `seen`, first layer first.
    """

    csa: str = "indexer"
    topk: int = 16
    hca: bool = True
    blind: Tensor | None = None
    positions: Tensor | None = None
    record: bool = False


class Block(nn.Module):
    """Attention and experts, each inside its hyper-connection."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = RMSNorm(shape.hidden, shape), RMSNorm(shape.hidden, shape)
        self.hc_attn, self.hc_ffn = HyperConnection(shape), HyperConnection(shape)
        self.attn = Attention(shape, shape.ratios[layer])
        self.ffn = MoE(shape, hashed=layer < shape.hash_layers)

    def forward(self, X: Tensor, ids: Tensor, freqs: Tensor, run: Run, seen: list[Seen]) -> Tensor:
        """X [b * t, streams, d], ids [b, t], freqs [b, t, rope / 2] complex -> X."""
        x, post, comb = self.hc_attn(X)
        y = self.attn(self.attn_norm(x).view(*ids.shape, -1), freqs, run, seen)
        X = merge(X, y.flatten(0, 1), post, comb)
        x, post, comb = self.hc_ffn(X)
        return merge(X, self.ffn(self.ffn_norm(x), ids.flatten()), post, comb)


class Network(nn.Module):
    """ids [b, t] -> logits [b, t, vocab]; t is padded to whole windows inside."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.hc_head = HyperHead(shape)
        self.norm = RMSNorm(shape.hidden, shape)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def simulate(self, *, on: bool) -> None:
        """Switch the rounding of the deployed model on or off."""
        for module in self.modules():
            if isinstance(module, Attention | Indexer | MoE | Quantised):
                module.simulated = on

    def hidden(self, ids: Tensor, run: Run, seen: list[Seen]) -> Tensor:
        """Map ids [b, t], t a multiple of the window, to what the head reads, [b, t, d]."""
        b, t = ids.shape
        positions = run.positions if run.positions is not None else torch.arange(t).expand(b, t)
        freqs = {kind: rope_frequencies(self.shape, positions, compressed=kind) for kind in (False, True)}
        X = self.embed(ids).flatten(0, 1).unsqueeze(1).expand(-1, self.shape.streams, -1).contiguous()
        for block, ratio in zip(self.layers, self.shape.ratios, strict=True):
            X = block(X, ids, freqs[ratio > 0], run, seen)
        out: Tensor = self.norm(self.hc_head(X)).view(b, t, -1)
        return out

    def forward(self, ids: Tensor, run: Run) -> tuple[Tensor, list[Seen]]:
        """Logits at every position, and what the CSA layers saw if `run.record`."""
        seen: list[Seen] = []
        t = ids.shape[1]
        padded = nn.functional.pad(ids, (0, -t % self.shape.window), value=2)
        return self.head(self.hidden(padded, run, seen)[:, :t]), seen
