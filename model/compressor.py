"""The two compressors: tokens in, one entry per closed window out.

They are two classes because they write different things: the main compressor head_dim-wide entries that are attended
to, the indexer's compressor index_head_dim-wide keys that are only scored. They share the pooling op and the frontier.
"""

from torch import Tensor

from kernels.formats import Dense
from model import sites, tripwire
from model.arithmetic import Arithmetic
from model.cache.frontier import Frontier
from model.cache.layers import AnyEntries, AnyKeys
from model.cache.variants import Shard
from model.config import ModelConfig
from model.decode import Weights
from model.rope import Rotation
from model.sites import Site


class _Projections:
    """Value and gate projections of one compressor, in fp32 as DeepSeek's are (the weights are stored in BF16)."""

    def __init__(self, prefix: str, weights: Weights, arithmetic: Arithmetic) -> None:
        self.wkv = Dense(weights.vector(f"{prefix}.wkv.weight"))  # [series * width, hidden]
        self.wgate = Dense(weights.vector(f"{prefix}.wgate.weight"))
        self.position_bias = weights.vector(f"{prefix}.ape").float()  # [ratio, series * width]
        self.norm = weights.vector(f"{prefix}.norm.weight").float()  # [width]
        self.arithmetic = arithmetic

    def __call__(self, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Project x [t, hidden] into kv and gate, each [t, series * width] float32, the gate with its position bias."""
        wide = x.float()
        ratio = self.position_bias.shape[0]
        kv = self.arithmetic.ops.linear(wide, self.wkv)
        gate = self.arithmetic.ops.linear(wide, self.wgate)
        if x.shape[0] == 1:  # decode: one row, no index to build
            return kv, gate + self.position_bias[first % ratio]
        repeats = (first % ratio + x.shape[0] + ratio - 1) // ratio
        bias = self.position_bias.repeat(repeats, 1)[first % ratio :][: x.shape[0]]
        return kv, gate.add_(bias)


def _append(site: Site, layer: int, first: int, rows: Tensor, entries: AnyEntries | AnyKeys, ratio: int) -> None:
    """Append finite rows [n, d], of `ratio` tokens each, that fit, and that the form they are stored in holds."""
    tripwire.width(site.name, layer, entries.data, rows.shape[1])
    tripwire.room(site.name, layer, first, entries.used + rows.shape[0], entries.data.shape[0])
    tripwire.finite(site.name, layer, first, rows)
    entries.append(rows)
    tripwire.stored(site.name, layer, entries.used - rows.shape[0], rows, entries.data, ratio)


def _in_step(site: Site, layer: int, position: int, frontier: Frontier, entries: AnyEntries | AnyKeys) -> None:
    """Trip unless every window before `position` has its entry and the rest of the tokens are in the frontier."""
    tripwire.count(f"{site.name}, rows", layer, position, entries.count, position // frontier.ratio)
    tripwire.count(f"{site.name}, open window", layer, position, frontier.filled, position % frontier.ratio)


class MainCompressor:
    """Writes compressed entries [head_dim], rotated at the start of their block (CSA and HCA layers)."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        self.project = _Projections(f"layers.{layer}.attn.compressor", weights, arithmetic)
        self.arithmetic, self.rotation, self.layer = arithmetic, rotation, layer
        self.coded = isinstance(arithmetic.formats.variant(layer), Shard)  # the cache rounds, and from the unrounded
        self.eps, self.rope_dim = config.rms_norm_eps, config.qk_rope_head_dim

    def __call__(self, x: Tensor, first: int, frontier: Frontier, entries: AnyEntries) -> None:
        """Append the entries that tokens x [t, hidden] at positions ``first ..`` complete."""
        ops = self.arithmetic.ops
        for pooled in frontier.push(*self.project(x, first), ops.pool):  # [n, head_dim] float32
            rows = ops.rms_norm(pooled.to(self.arithmetic.dtype), self.project.norm, self.eps)
            cos, sin = self.rotation.at(entries.count * frontier.ratio, rows.shape[0], frontier.ratio)
            rows = ops.rotate(rows, cos, sin)
            if not self.coded:
                rows = self.arithmetic.rounded_kv(rows, self.rope_dim)
            self.arithmetic.ranks.note(sites.ENTRY.name, self.layer, rows)
            self.arithmetic.taps(sites.ENTRY, self.layer, rows)
            _append(sites.ENTRY, self.layer, first, rows, entries, frontier.ratio)
        _in_step(sites.ENTRY, self.layer, first + x.shape[0], frontier, entries)


class IndexerKeyCompressor:
    """Writes indexer keys [index_head_dim]: rotated like entries, then rounded as the indexer's queries are."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        self.project = _Projections(f"layers.{layer}.attn.indexer.compressor", weights, arithmetic)
        self.arithmetic, self.rotation, self.layer = arithmetic, rotation, layer
        self.coded = isinstance(arithmetic.formats.variant(layer), Shard)  # the cache rounds, and from the unrounded
        self.eps, self.width = config.rms_norm_eps, config.index_head_dim

    def __call__(self, x: Tensor, first: int, frontier: Frontier, keys: AnyKeys) -> None:
        """Append the keys that tokens x [t, hidden] at positions ``first ..`` complete."""
        ops = self.arithmetic.ops
        for pooled in frontier.push(*self.project(x, first), ops.pool):  # [n, index_head_dim] float32
            rows = ops.rms_norm(pooled.to(self.arithmetic.dtype), self.project.norm, self.eps)
            cos, sin = self.rotation.at(keys.count * frontier.ratio, rows.shape[0], frontier.ratio)
            rows = ops.rotate(rows, cos, sin)
            self.arithmetic.taps(sites.INDEX_KEY, self.layer, rows)
            rows = self.arithmetic.turned_index(rows) if self.coded else self.arithmetic.rounded_index(rows)
            self.arithmetic.ranks.note(sites.INDEX_KEY_USED.name, self.layer, rows)
            self.arithmetic.taps(sites.INDEX_KEY_USED, self.layer, rows)
            _append(sites.INDEX_KEY_USED, self.layer, first, rows, keys, frontier.ratio)
        _in_step(sites.INDEX_KEY_USED, self.layer, first + x.shape[0], frontier, keys)
