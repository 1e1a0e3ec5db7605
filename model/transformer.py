"""The whole model, for one sequence."""

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense
from fathom.model.arithmetic import Arithmetic
from fathom.model.block import Block
from fathom.model.cache.layers import LayerCache
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.hyper import HyperHead
from fathom.model.linear import Embedding, WideLinear
from fathom.model.rope import Rotation, layer_frequencies, rotated_as
from fathom.model.state import State


class Transformer:
    """Embedding, layers, hyper head, final norm, output head. ``model(tokens, state)`` advances `state` in place."""

    def __init__(self, config: ModelConfig, weights: Weights, arithmetic: Arithmetic) -> None:
        self.config, self.arithmetic = config, arithmetic
        self.embedding = Embedding(weights.operand("embed.weight"), arithmetic)  # [vocab, hidden]
        rotations = {
            kind: Rotation(layer_frequencies(config, kind).to(self.device))
            for kind in sorted(set(map(rotated_as, config.layer_kinds)))
        }
        self.blocks = [
            self.block(layer, weights, rotations[rotated_as(config.layer_kind(layer))])
            for layer in range(config.num_hidden_layers)
        ]
        self.build_end(weights)
        self.norm = weights.vector("norm.weight").float()  # [hidden]
        self.head = WideLinear(Dense(weights.operand("head.weight")), arithmetic, "vocabulary")  # [vocab, hidden]

    def block(self, layer: int, weights: Weights, rotation: Rotation) -> Block:
        """Build a layer."""
        return Block(self.config, layer, weights, self.arithmetic, rotation)

    def build_end(self, weights: Weights) -> None:
        """Build what reads the streams behind the last layer."""
        self.hyper_head = HyperHead(self.config, "", weights, self.arithmetic)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so where state and tokens must be."""
        return self.embedding.weight.device

    def new_state(self, max_context: int, chunk: int, *, rewind: int = 0) -> State:
        """Return an empty state for `max_context` positions and calls of up to `chunk` tokens, see `State`."""
        return State(self.config, max_context, chunk, self.arithmetic.formats, self.device, rewind=rewind)

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, state: State) -> Tensor:
        """Run the next tokens of the sequence.

        Prefill in chunks of any size and decode of one token are this one call.

        Parameters
        ----------
        tokens
            [t] int64 ids, 1 <= t <= state.chunk.
        state
            Advanced by t positions. CapacityError, before anything is changed, when they do not fit.

        Returns
        -------
        Tensor
            [t, hidden], the normed output of the last layer; `logits` turns rows of it into logits.

        """
        assert tokens.ndim == 1, f"tokens has {tokens.ndim} axes, want 1"
        state.reserve(tokens.shape[0])
        hidden = self.run(tokens, self.call(tokens, state.position), state)
        state.position += tokens.shape[0]
        return hidden

    def call(self, tokens: Tensor, first: int | Tensor) -> Call:
        """Begin a call of tokens [t] at positions ``first ..``; [] int64 on the device in one that is captured."""
        return Call(tokens, first, self.arithmetic)

    def run(self, tokens: Tensor, call: Call, state: State) -> Tensor:
        """Token ids [t] to the normed output [t, hidden]."""
        streams = self.embed(tokens, call)[:, None].repeat(1, self.config.hc_mult, 1)  # [m, s, hidden]
        for block, cache in zip(self.blocks, state.layers, strict=True):
            assert isinstance(cache, LayerCache), f"a V4 layer got {type(cache).__name__}"
            streams = block(streams, call, cache)
        return self.hidden(streams, call)

    def embed(self, tokens: Tensor, call: Call) -> Tensor:
        """Token ids [t] to [m, hidden]."""
        return self.embedding(tokens, call)

    def hidden(self, streams: Tensor, call: Call) -> Tensor:
        """Streams [m, s, hidden] after the last layer to the normed output [t, hidden]."""
        return self.arithmetic.ops.rms_norm(self.hyper_head(streams, call), self.norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[t, hidden] to [t, vocab] float32: the head is fp32 in the reference."""
        return self.unembed(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Rows of the normed output [t, hidden] to logits [t, vocab] float32."""
        return self.head(hidden)
