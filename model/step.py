"""One token of decode as a fixed sequence of launches, which a CUDA graph can capture and replay.

The model of `model.transformer` as FUSED computes it, over the same weights and caches, for one sequence on one rank.
What differs from the eager model is where the position lives: on the device, in a buffer of one number, from which
every launch finds its rows. Caches are passed whole, at their capacity. Nothing is read on the host between the token
and the logits, and no Python value depends on either; `runtime.graph` captures `DecodeStep.run` and nothing else.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import rows
from kernels.formats import Rounding, Weight
from kernels.fused.attention import attend
from kernels.fused.compress import compress
from kernels.fused.experts import experts
from kernels.fused.hyper import mix
from kernels.fused.indexer import select
from kernels.fused.ops import FUSED
from model import sites, tripwire
from model.attention import Attention, CsaAttention, HcaAttention
from model.block import Block
from model.cache.entries import Entries
from model.cache.frontier import Frontier
from model.cache.layers import AnyEntries, AnyKeys, CsaCache, HcaCache, LayerCache
from model.cache.variants import Full
from model.compressor import IndexerKeyCompressor, MainCompressor
from model.errors import ConfigError
from model.experts import MoE
from model.hyper import HyperConnection
from model.indexer import Indexer
from model.rope import Rotation
from model.sites import Site
from model.state import State
from model.step_checks import Sums
from model.transformer import Transformer

SUMS = 8  # a layer's watched tensors, at most: two streams, an entry, a key (each of two planes), queries and weights


def refusal(model: Transformer) -> str | None:
    """Why there is no decode step of this model; None where there is one."""
    if model.ranks.size > 1:
        return f"{model.ranks.size} ranks: a decode step is of one"
    if model.arithmetic.ops != FUSED:
        return f"ops {model.arithmetic.ops.name}: a decode step is of Triton's kernels, ops fused, with none replaced"
    other = {str(v) for v in model.arithmetic.formats.variants if not isinstance(v, Full)}
    if other:
        return f"--kv {min(other)}: a decode step writes full caches only"
    for block in model.blocks:
        if block.experts.mixed():
            return f"layer {block.layer}: its routed experts are stored in several forms"
    return None


class _Here(NamedTuple):
    """What follows from the position, on the device, found once for all layers."""

    slot: Tensor  # [1] int64, row of the rings
    turns: dict[Rotation, tuple[Tensor, Tensor, Tensor]]  # cos, sin, -sin, each [1, r / 2] float32
    phase: dict[int, Tensor]  # by ratio, [1] int64: place in the open window
    row: dict[int, Tensor]  # by ratio, [1] int64: row of the entry that the open window becomes, or the cache's last


# Of the ops that a step calls by name, and not by its set, see `kernels.ops.room`.
ROOMS = {op.__name__: op.__module__.split(".")[1] for op in (attend, compress, experts, mix, select)}

NOT_LOOKED_AT = ("columns", "routing", "selection", "stored")  # tripwires of a call of the model that a step has not


class DecodeStep:
    """The next token of a sequence: `place`, then `run` or a replay of what was captured of it, then `finish`.

    ``step(token)`` is all three. Steps, calls of the model and saves of the state may follow each other in any order.
    The experts' matrices are stacked here (`model.experts.MoE.stacks`), once for each model.

    Of the checks of `model.tripwire` a step has these. `finite`: of streams after each sublayer, index queries and
    weights, entries and index keys as they were stored, hidden and logits, raised after the step with its position;
    caches have advanced by then, and the state is of no more use. `count` and `room`: on the host, before the step.
    `width`: when the step is made. It has not: `columns` (of Sinkhorn), `routing`, `selection` and `stored`, whose
    outcomes the host would have to wait for; no site is passed, and listeners are refused.

    Parameters
    ----------
    model
        On one rank, with the op set FUSED and caches in full; ConfigError, saying why, for another.
    state
        Of that model, or of one with the same config and formats; at any position.

    Attributes
    ----------
    token, position
        [1] and [] int64, on the device.
    logits
        [vocab] float32, those of the last step; the next one overwrites them.

    """

    def __init__(self, model: Transformer, state: State) -> None:
        if (why := refusal(model)) is not None:
            raise ConfigError(f"no decode step: {why}")
        self.model, self.state, self.arithmetic = model, state, model.arithmetic
        self.caches: list[LayerCache] = []
        for block, cache in zip(model.blocks, state.layers, strict=True):
            assert isinstance(cache, LayerCache), f"a V4 layer got {type(cache).__name__}"
            _check_cache(block, cache)
            self.caches.append(cache)
        self.stacks = [block.experts.stacks() for block in model.blocks]
        device, vocabulary = model.device, model.head.shape[0]
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)
        self.logits = torch.zeros(vocabulary, dtype=torch.float32, device=device)
        self.sums = Sums(SUMS * len(model.blocks) + 2, device)
        self._rows = {
            frontier.ratio: rows.length(kept.data) for cache in self.caches for frontier, kept in cache.compressed()
        }
        self._rotations = list(dict.fromkeys(block.attention.rotation for block in model.blocks))

    @torch.inference_mode()
    def __call__(self, token: int) -> Tensor:
        """Run the next token; [vocab] float32 logits after it, which the next step overwrites.

        CapacityError, before anything is changed, when the state is full; Tripwire.
        """
        self.place(token)
        self.run()
        return self.finish()

    @torch.inference_mode()
    def place(self, token: int) -> None:
        """Put the token and the state's position where `run` reads them; CapacityError when the state is full."""
        assert not self.arithmetic.taps.listening, "a decode step passes no site: detach the listeners"
        assert 0 <= token < self.model.embedding.shape[0], f"token {token} of {self.model.embedding.shape[0]}"
        self.state.reserve(1)
        at = self.state.position
        for layer, cache in enumerate(self.caches):
            if at:
                tripwire.count("attention.ring", layer, at, cache.ring.held_for(at - 1), at - 1)
            for frontier, kept in cache.compressed():
                tripwire.count("compressor, rows", layer, at, kept.count, at // frontier.ratio)
                tripwire.count("compressor, open window", layer, at, frontier.filled, at % frontier.ratio)
        self.token.fill_(token)
        self.position.fill_(at)

    @torch.inference_mode()
    def finish(self) -> Tensor:
        """Advance the state's bookkeeping, then look at the checks: Tripwire. Returns `logits`."""
        at = self.state.position
        for cache in self.caches:
            cache.advance(at)
        self.state.position += 1
        self.sums.look(at)
        return self.logits

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, `run` may be called at the state's position, and leaves nothing behind that a later call reads.

        What it writes there lies in rows that the token at this position will write: of the ring the one that has left
        the window, of frontiers and caches one that is not filled. But where it ends a window, it moves on the series
        that the next one pools with: those are put back.
        """
        self.place(0)
        kept = [
            (part, part.clone())
            for cache in self.caches
            for frontier, _ in cache.compressed()
            for part in (frontier.previous_kv, frontier.previous_gate)
        ]
        try:
            yield
        finally:
            with torch.inference_mode():
                for part, old in kept:
                    part.copy_(old)

    @torch.inference_mode()
    def run(self) -> None:
        """Compute the logits of `token` at `position`, and write the caches: work for the device alone."""
        model, here = self.model, self._here()
        self.sums.begin()
        streams = model.embed(self.token)[:, None].repeat(1, model.config.hc_mult, 1)  # [1, s, hidden]
        x, post, comb = self._read(model.blocks[0].attention_streams, streams, model.blocks[0].attention_norm)
        after = [*model.blocks[1:], None]
        for block, following, cache, stacks in zip(model.blocks, after, self.caches, self.stacks, strict=True):
            y = self._attention(block.attention, cache, x, here)
            streams, x, post, comb = self._mix(y, streams, post, comb, block.experts_streams, block.experts_norm)
            self.sums.add(sites.ATTENTION_STREAMS, block.layer, streams)
            y = self._experts(block.experts, stacks, x)
            if following is None:
                streams = FUSED.expand(y, streams, post, comb)
            else:
                reader, norm = following.attention_streams, following.attention_norm
                streams, x, post, comb = self._mix(y, streams, post, comb, reader, norm)
            self.sums.add(sites.STREAMS, block.layer, streams)
        hidden = FUSED.rms_norm(model.hyper_head(streams), model.norm, model.config.rms_norm_eps)
        self.sums.add(sites.HIDDEN, None, hidden)
        self.logits.copy_(FUSED.linear(hidden.float(), model.head)[0])
        self.sums.add(sites.LOGITS, None, self.logits)

    def _here(self) -> _Here:
        turns = {rotation: rotation.of(self.position) for rotation in self._rotations}
        return _Here(
            (self.position % self.caches[0].ring.data.shape[0])[None],
            {rotation: (cos, sin, -sin) for rotation, (cos, sin) in turns.items()},
            {ratio: (self.position % ratio)[None] for ratio in self._rows},
            {ratio: (self.position // ratio).clamp(max=n - 1)[None] for ratio, n in self._rows.items() if n},
        )

    def _read(self, reader: HyperConnection, streams: Tensor, norm: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read the first sublayer's normed input, and its post and comb."""
        pre, post, comb = FUSED.hyper_weights(
            streams, reader.fn, reader.scale, reader.base, reader.iterations, reader.eps, reader.norm_eps
        )
        return FUSED.rms_norm(FUSED.collapse(streams, pre), norm, self.model.config.rms_norm_eps), post, comb

    def _mix(
        self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, reader: HyperConnection, norm: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write a sublayer's output y [1, hidden], and read for the next: `kernels.reference.hyper.mix`."""
        read = reader.fn, reader.scale, reader.base, reader.iterations, reader.eps, reader.norm_eps
        return mix(y, streams, post, comb, *read, norm, self.model.config.rms_norm_eps)

    def _experts(self, moe: MoE, stacks: tuple[Weight, Weight, Weight], x: Tensor) -> Tensor:
        ids, weights = moe.gate(x, self.token)
        out = experts(x, ids, weights, *stacks, moe.shared.limit, 0, deployed=self.arithmetic.deployed)
        return (out + moe.shared(x, None).float()).to(x.dtype)

    def _attention(self, attention: Attention, cache: LayerCache, x: Tensor, here: _Here) -> Tensor:
        """`Attention.__call__` of one token: x [1, hidden] to [1, hidden]."""
        linear, (cos, sin, back) = self.arithmetic.linear, here.turns[attention.rotation]
        latent = FUSED.rms_norm(linear(x, attention.wq_a), attention.q_norm, attention.eps)
        q = linear(latent, attention.wq_b).unflatten(-1, (-1, attention.head_dim))
        q = FUSED.rotate(FUSED.rms_norm(q, None, attention.eps), cos, sin)
        kv = FUSED.rotate(FUSED.rms_norm(linear(x, attention.wkv), attention.kv_norm, attention.eps), cos, sin)
        cache.ring.data.index_copy_(0, here.slot, self.arithmetic.rounded_kv(kv, attention.rope_dim))
        entries, ratio, selected = None, 0, None
        if isinstance(attention, HcaAttention):
            assert isinstance(cache, HcaCache), f"HCA layer got {type(cache).__name__}"
            wide = x.float()
            self._compress(sites.ENTRY, attention.compressor, wide, cache.frontier, cache.entries, here)
            entries, ratio = cache.entries.data, cache.frontier.ratio
            if isinstance(attention, CsaAttention):
                assert isinstance(cache, CsaCache), f"CSA layer got {type(cache).__name__}"
                indexer = attention.indexer
                self._compress(sites.INDEX_KEY_USED, indexer.compressor, wide, cache.key_frontier, cache.keys, here)
                selected = self._select(indexer, x, latent, cache, cos, sin)
        ring, sink = cache.ring.data, attention.sink
        out = attend(q, ring, self.position, attention.window, entries, ratio, selected, sink)
        return attention.project(FUSED.rotate(out, cos, back))

    def _compress(
        self,
        site: Site,
        compressor: MainCompressor | IndexerKeyCompressor,
        wide: Tensor,
        frontier: Frontier,
        kept: AnyEntries | AnyKeys,
        here: _Here,
    ) -> None:
        """Give the compressor x [1, hidden] float32, and write the entry or key of the window that it may end."""
        project, ratio = compressor.project, frontier.ratio
        kv, gate = FUSED.linear(wide, project.wkv), FUSED.linear(wide, project.wgate)
        gate += project.position_bias.index_select(0, here.phase[ratio])
        rounding: Rounding = "kv" if site is sites.ENTRY else "index"
        compress(
            kv, gate, frontier.window(), self.position, project.norm, compressor.eps, compressor.rotation.freqs,
            rounding if self.arithmetic.deployed else "none", kept.data, self.arithmetic.dtype,
        )  # fmt: skip
        if ratio in here.row:
            self.sums.add_row(site, compressor.layer, kept.data, here.row[ratio], ratio)

    def _select(self, indexer: Indexer, x: Tensor, latent: Tensor, cache: CsaCache, cos: Tensor, sin: Tensor) -> Tensor:
        """`Indexer.__call__` of one token, after its key: [1, min(index_topk, capacity)] int32."""
        q = self.arithmetic.linear(latent, indexer.wq_b).unflatten(-1, (-1, indexer.width))
        q = self.arithmetic.rounded_index(FUSED.rotate(q, cos, sin))
        weights = FUSED.linear(x, indexer.weights_proj).float() * (indexer.width**-0.5 * indexer.heads**-0.5)
        self.sums.add(sites.INDEX_QUERY_USED, indexer.layer, q)
        self.sums.add(sites.INDEX_WEIGHTS, indexer.layer, weights)
        return select(q, weights, cache.keys.data, self.position, cache.key_frontier.ratio, indexer.top_k)


def _check_cache(block: Block, cache: LayerCache) -> None:
    """Refuse a cache that is none of this layer's: Tripwire for its width, assert for its kind."""
    attention, width = block.attention, block.attention.head_dim
    widths = [width, attention.indexer.width] if isinstance(attention, CsaAttention) else [width]
    tripwire.width("attention.ring", block.layer, cache.ring.data, width)
    for (_, kept), wanted in zip(cache.compressed(), widths, strict=isinstance(attention, HcaAttention)):
        assert isinstance(kept, Entries), f"a decode step writes no {type(kept).__name__}"
        tripwire.width("compressed rows", block.layer, kept.data, wanted)
