"""What DeepSeek-V4.1 computes otherwise than V4.

A layer passes on its streams and one thing more: the weights by which the next sublayer reads them, since mHC's `pre`
is delayed by one. Few layers make entries, and few select among them: the others read what the nearest such layer
before them has made and selected. Before some layers n-grams are added to the streams.

Source: DeepSeek's inference code for V4.1-Flash, model.py and kernel.py at dba1be0a; scores stay in fp32, see
`model.indexer`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.compress.reference import Tail
from fathom.kernels.formats.groups import ENTRY_GROUP, INDEX_GROUP
from fathom.kernels.formats.stored import Dense, Rounding, Rows
from fathom.model.arithmetic import Arithmetic
from fathom.model.attention import Attention, Beyond
from fathom.model.block import Block
from fathom.model.cache.layers import LayerCache
from fathom.model.cache.shared import SharedCache
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.compressor import Compressor
from fathom.model.config import ModelConfig
from fathom.model.engram import Engram
from fathom.model.errors import ConfigError
from fathom.model.hyper import HyperConnection, Read
from fathom.model.indexer import Indexer
from fathom.model.linear import Input, Linear, Reader
from fathom.model.rope import Rotation
from fathom.model.rounding import FP4, FP8
from fathom.model.state import State
from fathom.model.transformer import Transformer


class Carried(NamedTuple):
    """What one layer leaves to the next."""

    streams: Tensor  # [t, s, hidden]
    pre: Tensor  # [t, s] float32: by which the next sublayer reads them


def begun(streams: Tensor) -> Carried:
    """Streams [t, s, hidden] as the first sublayer gets them, which reads one of them."""
    first = torch.zeros(streams.shape[:2], device=streams.device)
    first[:, 0] = 1
    return Carried(streams, first)


class DelayedConnection(HyperConnection):
    """The mHC of a sublayer that reads by the weights of the sublayer before."""

    def read_by(self, pre: Tensor, streams: Tensor, norm: Tensor) -> Read:
        """Read streams X [t, s, hidden] as `read`, but ``norm(A' X)`` by the `pre` A' [t, s] of the one before."""
        mhc = self.fn, self.scale, self.base, self.iterations, self.eps, self.norm_eps
        x = self.ops.rms_norm(self.ops.collapse(streams, pre), norm, self.norm_eps)
        return Read(x, *self.ops.hyper_weights(streams, *mhc))


class Maker(Compressor):
    """What makes rows of a V4.1: they are rounded by `stored`, no op does it."""

    coded = False  # no cache rounds them either

    @property
    def rounding(self) -> Rounding:
        """None of an op's."""
        return "none"


class EntryMaker(Maker):
    """Makes the entries of a layer, and of each, before it is rotated, its index key.

    At a ratio of 2 pairs of tokens are pooled by their gates, no pair over another and without a position bias; at a
    ratio of 1 each token is an entry.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"{config.prefix(layer)}.attn.compressor"
        self.ratio = config.ratio(layer)
        self.wkv = Reader(Dense(weights.operand(f"{prefix}.wkv.weight")), wide=self.ratio > 1)  # [head_dim, hidden]
        self.readers: tuple[Reader, ...] = (self.wkv,)
        if self.ratio > 1:
            gate = Reader(Dense(weights.operand(f"{prefix}.wgate.weight")), wide=True)  # [head_dim, hidden]
            self.wgate = gate  # type: ignore[assignment] # without a bias
            self.readers += (self.wgate,)
        self.norm = weights.vector(f"{prefix}.norm.weight").float()  # [head_dim]
        self.arithmetic, self.rotation, self.eps = arithmetic, rotation, config.rms_norm_eps

    def make(self, x: Input, call: Call, cache: SharedCache, keys: "KeyMaker") -> None:
        """Append the entries that the tokens of x [t, hidden] complete, and their keys."""
        frontier, ops = cache.key_frontier, self.arithmetic.ops
        assert call.first == frontier.position, "windows follow each other"

        def finish(entry: int, pooled: Tensor) -> None:
            first = entry * self.ratio
            latent = ops.rms_norm(self.unnormed(pooled), self.norm, self.eps)
            keys.append(cache.keys, keys.stored(keys.row(latent, call, first, self.ratio)))
            self.append(cache.entries, self.stored(self.row(latent, call, first, self.ratio)))

        if self.ratio > 1:
            tail = Tail(
                self.norm, self.eps, self.rotation.freqs, self.rounding, cache.entries.data, self.arithmetic.dtype
            )
            ops.compress(self.wkv(x), self.wgate(x), frontier.ring(), call.first, self.ratio, tail, finish)
        else:
            finish(frontier.position, self.wkv(x))
        frontier.take(call.first, call.count)

    def row(self, pooled: Tensor, call: Call, first: int, ratio: int) -> Tensor:
        """Rotate normed rows [n, head_dim], each as of its first token."""
        angles = call.angles_of_windows(self.rotation, first, pooled.shape[0], ratio)
        return self.arithmetic.ops.rotate(pooled, *angles)

    def stored(self, rows: Tensor) -> Tensor:
        """Rows [n, head_dim] as they are kept: E2M1 by 16 columns with scales in E4M3, where KV is rounded."""
        ops = self.arithmetic.ops
        return ops.simulate_entries(rows, ENTRY_GROUP) if self.arithmetic.rounding.kv == FP8 else rows


class KeyMaker(Maker):
    """Makes the index key of an entry, of which it is given the normed row before its rotation."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"{config.prefix(layer)}.attn.indexer"
        self.wk = Linear(Dense(weights.operand(f"{prefix}.wk.weight")), arithmetic)  # [index_head_dim, head_dim]
        self.norm = weights.vector(f"{prefix}.k_norm.weight").float()  # [index_head_dim]
        self.readers = ()
        self.arithmetic, self.rotation, self.eps = arithmetic, rotation, config.rms_norm_eps

    def unnormed(self, pooled: Tensor) -> Tensor:
        """Keys [n, index_head_dim] of entries [n, head_dim]."""
        return self.wk(pooled)

    def stored(self, rows: Tensor) -> Tensor:
        """As queries are."""
        return rounded_index(rows, self.arithmetic)


def rounded_index(x: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Index queries or keys [..., d] as they are scored: E2M1 by 32 columns, without a Hadamard transform."""
    if arithmetic.rounding.index == FP4:
        return arithmetic.ops.simulate_fp4(x, INDEX_GROUP)
    return arithmetic.ops.simulate_fp8(x, x.shape[-1]) if arithmetic.rounding.index == FP8 else x


class SharedIndexer(Indexer):
    """The indexer of a layer that selects, by its own keys or those of the layer whose entries it reads.

    One layer says in which blocks of entries those after it may select; as long as the blocks hold all entries there
    are, that is no restriction.
    """

    compressor: KeyMaker | None  # type: ignore[assignment]

    def build(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        """Make what makes keys, where the layer does."""
        assert config.v41 is not None, "of its config"
        makes, own = config.makes_entries(layer), config.v41
        self.compressor = KeyMaker(config, layer, weights, arithmetic, rotation) if makes else None
        self.readers = (self.weights_proj,)
        self.opens, self.restricted = layer == own.candidate_source, layer > own.candidate_source
        self.blocks, self.block = own.candidate_blocks, own.candidate_block_size

    def __call__(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Tensor:
        """Select for every token, see `Indexer`; keys are written already."""
        assert isinstance(cache, SharedCache), f"a layer of V4.1 got {type(cache).__name__}"
        q, weights = self.query_used(self.query(latent, call)), self.head_weights(x)
        assert isinstance(call.first, int), "the position is needed on the host"
        given = q, weights, cache.keys.written(call.first), call.first, cache.key_frontier.ratio
        if self.opens:
            call.candidates = self.candidates(given)
        if self.restricted and cache.keys.count > self.blocks * self.block:
            assert call.candidates is not None, "the layer that opens blocks comes before"
            return self.arithmetic.ops.select_open(*given, self.top_k, call.candidates, self.block)
        return self.arithmetic.select(*given, self.top_k)

    def candidates(self, given: tuple[Tensor, Tensor, Rows, int, int]) -> Tensor:
        """Blocks open to each token [t, candidate_topk_blocks] int32, ascending, then -1; see `Ops.open_blocks`."""
        return self.arithmetic.ops.open_blocks(*given, self.block, self.blocks)

    def query_used(self, q: Tensor) -> Tensor:
        """Queries as they are scored."""
        return rounded_index(q, self.arithmetic)


class WindowAttention(Attention):
    """What every layer of V4.1 shares; one of this class itself sees its window alone."""

    def query(self, latent: Tensor, call: Call) -> Tensor:
        """Queries [t, heads, head_dim], rotated: no head is normed."""
        return self.arithmetic.ops.rotate(self.query_unnormed(latent), *call.angles(self.rotation))

    def kv(self, x: Input, call: Call) -> Tensor:
        """Key and value of each token in one [t, head_dim]: normed, rotated, all of it rounded by 32 columns."""
        ops = self.arithmetic.ops
        kv = ops.norm_rotate(self.kv_unnormed(x), self.kv_norm, self.eps, *call.angles(self.rotation), 0)
        return ops.simulate_fp8(kv, self.block) if self.arithmetic.rounding.kv == FP8 else kv

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.block = config.fp8_block


class ReadingAttention(WindowAttention):
    """Window, and those entries of another layer that a layer before has selected."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.source = config.selection_source(layer)

    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        """Entries and selection as they were left by the layers that made them."""
        del x, latent
        assert isinstance(cache, SharedCache), f"a layer of V4.1 got {type(cache).__name__}"
        return Beyond(cache.entries.written(call.first), cache.key_frontier.ratio, call.selected[self.source])


class SelectingAttention(ReadingAttention):
    """The same, of which the layer makes the selection itself."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.indexer = SharedIndexer(config, layer, weights, arithmetic, rotation)
        self.readers += self.indexer.readers

    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        """Select, and leave the selection to later layers."""
        call.selected[self.source] = self.select(x, latent, call, cache)
        return super().beyond_window(x, latent, call, cache)

    def select(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Tensor:
        """Entries that each token sees: [t, min(index_topk, entries)] int32."""
        return self.indexer(x, latent, call, cache)


class MakingAttention(SelectingAttention):
    """The same, and the layer makes the entries."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.compressor = EntryMaker(config, layer, weights, arithmetic, rotation)
        self.readers += self.compressor.readers

    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        """Write the entries that the call's tokens complete, and their keys, first."""
        assert isinstance(cache, SharedCache), f"a layer of V4.1 got {type(cache).__name__}"
        assert self.indexer.compressor is not None, "who makes entries makes keys"
        self.compressor.make(x, call, cache, self.indexer.compressor)
        return super().beyond_window(x, latent, call, cache)


def build_shared_attention(
    config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
) -> Attention:
    """Return the attention that the layer's role asks for."""
    kind = WindowAttention
    if config.ratio(layer):
        makes, selects = config.makes_entries(layer), config.selects(layer)
        kind = MakingAttention if makes else SelectingAttention if selects else ReadingAttention
    return kind(config, layer, weights, arithmetic, rotation)


class DelayedBlock(Block):
    """A layer of V4.1."""

    connection = DelayedConnection
    attention_streams: DelayedConnection
    experts_streams: DelayedConnection

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: Weights,
        arithmetic: Arithmetic,
        rotation: Rotation,
        attention: Callable[..., Attention] = build_shared_attention,
        alike: Tensor | None = None,
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation, attention)
        assert config.v41 is not None, "of its config"
        self.engram: Engram | None = None
        if layer in config.v41.engram.layer_ids:
            assert alike is not None, "n-grams are of the numbers of ids"
            self.engram = Engram(config, layer, weights, arithmetic, alike)

    def run(self, carried: Carried, call: Call, cache: LayerCache) -> Carried:
        """Run a call through the layer, see `Block`: ``X <- B X + C F(A' X)``, A' of the sublayer before."""
        streams, pre = carried
        if self.engram is not None:
            assert isinstance(cache, SharedCache), f"a layer of V4.1 got {type(cache).__name__}"
            assert cache.tokens is not None, "the cache of a layer with n-grams has their tokens"
            streams = self.engram(streams, call, cache.tokens)
        read = self.attention_streams.read_by(pre, streams, self.attention_norm)
        y = self.attention(read.x, call, cache)
        streams = self.attention_streams.write(y, streams, read)
        read = self.experts_streams.read_by(read.pre, streams, self.experts_norm)
        y = self.experts(read.x, call)
        return Carried(self.experts_streams.write(y, streams, read), read.pre)


class TransformerV41(Transformer):
    """V4.1 for one sequence of text.

    Parameters
    ----------
    config, weights, arithmetic
        As `Transformer` takes them; on one rank.
    alike
        [vocab] int64: the number of each id, by which n-grams are looked up.

    """

    blocks: list[DelayedBlock]  # type: ignore[assignment]

    def __init__(self, config: ModelConfig, weights: Weights, arithmetic: Arithmetic, alike: Tensor) -> None:
        assert config.v41 is not None, "of its config"
        assert arithmetic.ranks.size == 1, "several ranks are refused"
        self.alike, self.image = alike, config.v41.image_token_id
        super().__init__(config, weights, arithmetic)

    def block(self, layer: int, weights: Weights, rotation: Rotation) -> DelayedBlock:
        """Build a layer."""
        return DelayedBlock(self.config, layer, weights, self.arithmetic, rotation, alike=self.alike)

    def build_end(self, weights: Weights) -> None:
        """Nothing stands between the last layer and the norm: the last experts' `pre` reads the streams."""

    def run(self, tokens: Tensor, call: Call, state: State) -> Tensor:
        """Token ids [t] to the normed output [t, hidden]; ConfigError for one that stands for an image."""
        if bool((tokens == self.image).any()):
            raise ConfigError(f"token {self.image} stands for a part of an image; text alone is run")
        carried = begun(self.embed(tokens, call)[:, None].repeat(1, self.config.hc_mult, 1))
        for block, cache in zip(self.blocks, state.layers, strict=True):
            assert isinstance(cache, LayerCache), f"a layer of V4.1 got {type(cache).__name__}"
            carried = block.run(carried, call, cache)
        return self.hidden(self.folded(carried), call)

    def folded(self, carried: Carried) -> Tensor:
        """Streams after the last layer as one [t, hidden]."""
        return self.arithmetic.ops.collapse(carried.streams, carried.pre)

    def hidden(self, streams: Tensor, call: Call) -> Tensor:
        """What was read of the streams [t, hidden] to the normed output [t, hidden]."""
        del call
        return self.arithmetic.ops.rms_norm(streams, self.norm, self.config.rms_norm_eps)
