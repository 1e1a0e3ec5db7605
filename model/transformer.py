"""The whole model, for one sequence."""

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from kernels.formats import Dense
from model import sites, tripwire
from model.arithmetic import Arithmetic
from model.block import Block
from model.cache.layers import LayerCache
from model.config import ModelConfig
from model.decode import Weights
from model.hyper import HyperHead
from model.ranks import KEPT, Partial
from model.rope import Rotation
from model.sites import Listener, Site
from model.state import State


class Transformer:
    """Embedding, layers, hyper head, final norm, output head. ``model(tokens, state)`` advances `state` in place."""

    def __init__(self, config: ModelConfig, weights: Weights, arithmetic: Arithmetic) -> None:
        self.config, self.arithmetic, self.ranks = config, arithmetic, arithmetic.ranks
        self.embedding = weights.vector("embed.weight")  # [vocab, hidden], as stored: this rank's rows, as of the head
        rotations = {kind: Rotation(config, kind, self.embedding.device) for kind in set(config.layer_kinds)}
        self.blocks = [
            Block(config, layer, weights, arithmetic, rotations[config.layer_kind(layer)])
            for layer in range(config.num_hidden_layers)
        ]
        self.hyper_head = HyperHead(config, weights, arithmetic)
        self.norm = weights.vector("norm.weight").float()  # [hidden]
        self.head = Dense(weights.vector("head.weight"))  # [vocab, hidden]

    @property
    def device(self) -> torch.device:
        """Where the weights are, and so where state and tokens must be."""
        return self.embedding.device

    def new_state(self, max_context: int, chunk: int) -> State:
        """Return an empty state for `max_context` positions and calls of up to `chunk` tokens."""
        return State(self.config, max_context, chunk, self.arithmetic.formats, self.device)

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
        taps, first, ranks = self.arithmetic.taps, state.position, self.ranks
        ranks.note("tokens", None, tokens)
        x = self.embed(tokens)
        taps(sites.EMBEDDED, None, x)
        share = ranks.tokens(tokens.shape[0])
        tokens = share.of(tokens)
        streams = share.of(x)[:, None].repeat(1, self.config.hc_mult, 1)  # [m, s, hidden]
        for block, cache in zip(self.blocks, state.layers, strict=True):
            assert isinstance(cache, LayerCache), f"a V4 layer got {type(cache).__name__}"
            streams = block(streams, tokens, first, cache, share)
            if share.total > KEPT:  # what is compared is kept until then
                ranks.settle()
        state.position += share.total
        hidden = self.arithmetic.ops.rms_norm(self.hyper_head(streams), self.norm, self.config.rms_norm_eps)
        tripwire.finite("hidden", None, first + share.start, hidden)
        if not share.split:  # every rank has computed all of it, and each reads its own logits off it
            ranks.note(sites.HIDDEN.name, None, hidden)
        ranks.settle()
        hidden = ranks.whole(hidden, 0, share)
        taps(sites.HIDDEN, None, hidden)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids [t] to [t, hidden], each from the rank that holds its row."""
        here = self.ranks.shares.vocabulary
        if not here.split:
            return self.embedding[tokens].to(self.arithmetic.dtype)
        mine = (tokens >= here.start) & (tokens < here.stop)
        rows = self.embedding[(tokens - here.start).clamp(0, here.size - 1)].masked_fill(~mine[:, None], 0)
        return self.ranks.filled(sites.EMBEDDED.name, None, Partial(rows, mine)).to(self.arithmetic.dtype)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[t, hidden] to [t, vocab] float32: the head is fp32 in the reference."""
        logits = self.arithmetic.ops.linear(hidden.float(), self.head)
        logits = self.ranks.whole(logits, 1, self.ranks.shares.vocabulary)
        tripwire.finite(sites.LOGITS.name, None, None, logits)
        self.arithmetic.taps(sites.LOGITS, None, logits)
        return logits

    def attached(self, listeners: Mapping[Site, Listener]) -> AbstractContextManager[None]:
        """Listen at sites inside a ``with``, see `model.sites.Taps.attached`."""
        return self.arithmetic.taps.attached(self.config, listeners)
