"""A whole model of the Llama family, for one sequence, with the contract of `model.transformer.Transformer`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Weight
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.gqa import GqaCache, kv_heads
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.choices import PLAIN
from fathom.model.linear import Embedding, WideLinear
from fathom.model.llama.adapters import Adapter
from fathom.model.llama.block import Block, in_pieces
from fathom.model.llama.census import EMBEDDING, HEAD, NORM
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.rope import frequencies
from fathom.model.rope import Rotation
from fathom.model.rounding import ROUNDINGS
from fathom.model.state import State
from fathom.model.variants.grouped import CodaLayer


class LlamaTransformer:
    """Embedding, layers, final norm, output head. ``model(tokens, state)`` advances `state` in place.

    It computes in `plain` numerics: nothing else is defined for the family here. With `adapters`, one for each layer,
    attention is that of CoDA-GQA-L.
    """

    def __init__(
        self, config: LlamaConfig, weights: Weights, arithmetic: Arithmetic, adapters: Sequence[Adapter] | None = None
    ) -> None:
        assert arithmetic.rounding == ROUNDINGS[PLAIN], "deployed numerics are DeepSeek-V4's"
        self.config, self.arithmetic = config, arithmetic
        self.embedding = Embedding(weights.operand(EMBEDDING), arithmetic)  # [vocab, hidden]
        rotation = Rotation(frequencies(config).to(self.device))
        none: Sequence[Adapter | None] = [None] * config.num_hidden_layers
        self.adapters = none if adapters is None else adapters
        self.blocks = [
            Block(config, layer, weights, arithmetic, rotation, adapter) for layer, adapter in enumerate(self.adapters)
        ]
        self.norm = weights.vector(NORM).float()  # [hidden]
        head: Weight = Dense(self.embedding.weight) if config.tie_word_embeddings else weights.matrix(HEAD)
        self.head = WideLinear(head, arithmetic, "vocabulary")

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so where state and tokens must be."""
        return self.embedding.weight.device

    def new_state(self, max_context: int, chunk: int, prompt: int | None = None, *, rewind: int = 0) -> State:
        """Return an empty state, see `State`: `prompt` must be given where a layer is `shard`."""
        formats, heads = self.arithmetic.formats, kv_heads(self.arithmetic.ranks)
        state = State(self.config, max_context, chunk, formats, self.device, prompt, heads, rewind)
        for cache, adapter in zip(state.layers, self.adapters, strict=True):
            if isinstance(cache, CodaLayer) and adapter is not None and adapter.eta_logit is not None:
                cache.learnt(adapter.eta_logit)
        return state

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, state: State) -> Tensor:
        """Run the next tokens of the sequence; prefill in chunks of any size and decode of one token are this one call.

        Parameters
        ----------
        tokens
            [t] int64 ids, 1 <= t <= state.chunk; or up to what is `state.unread` of a prompt: layers read it one after
            the other, each in pieces of a chunk.
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

    def call(self, tokens: Tensor, first: int) -> Call:
        """Begin a call of tokens [t] at positions ``first ..``."""
        return Call(tokens, first, self.arithmetic)

    def run(self, tokens: Tensor, call: Call, state: State) -> Tensor:
        """Token ids [t] to the normed output [t, hidden]."""
        pieces = self.pieces(tokens, call, state.chunk)
        x = self.embedded(tokens, pieces)
        for block, cache in zip(self.blocks, state.layers, strict=True):
            assert isinstance(cache, GqaCache), f"a layer with grouped heads got {type(cache).__name__}"
            x = block(x, pieces, cache)
        return self.hidden(x, pieces)

    def pieces(self, tokens: Tensor, call: Call, chunk: int) -> list[Call]:
        """A call of tokens [t] as calls of a chunk; one that is no longer is its only piece."""
        assert isinstance(call.first, int), "grouped caches need the position on the host"
        if call.count <= chunk:
            return [call]
        starts = range(0, call.count, chunk)
        return [Call(tokens[start : start + chunk], call.first + start, self.arithmetic) for start in starts]

    def embedded(self, tokens: Tensor, pieces: Sequence[Call]) -> Tensor:
        """Rows of the embedding, [t, hidden]."""
        if len(pieces) == 1:
            return self.embedding(tokens, pieces[0])
        x = torch.empty(len(tokens), self.config.hidden_size, dtype=self.arithmetic.dtype, device=self.device)
        return in_pieces(lambda _, call: self.embedding(call.tokens, call), x, pieces)

    def hidden(self, x: Tensor, pieces: Sequence[Call]) -> Tensor:
        """The residual stream [t, hidden] after the last layer, normed."""
        norm, eps = self.arithmetic.ops.rms_norm, self.config.rms_norm_eps
        return in_pieces(lambda rows, _: norm(rows, self.norm, eps), x, pieces)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[t, hidden] to [t, vocab] float32, the head's product included, as V4's."""
        return self.unembed(hidden)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Rows of the normed output [t, hidden] to logits [t, vocab] float32."""
        return self.head(hidden)
