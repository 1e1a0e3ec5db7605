"""The caches of a layer with grouped heads, by variant: full, CoDA-GQA-L, Shard."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.cache.full import FullCache
from fathom.model.cache.gqa import GqaCache, Heads
from fathom.model.variants.choice import Coda, Full, GroupedCoda, GroupedShard, Shard, Variant
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Tokens, prefill, step
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.shard import KvShape, ShardCache, ShardSettings


def coda_settings(variant: GroupedCoda) -> CodaSettings:
    """What the cache of a `coda` layer is set to; ConfigError where it cannot be."""
    made = CodaSettings.published if variant.published else CodaSettings
    settings = made(window=variant.window, exact=variant.exact, summary=variant.summary, rope="half")
    shared = {part.name for part in fields(CodaSettings)} & {part.name for part in fields(GroupedCoda)}
    given = {name: getattr(variant, name) for name in shared}
    truths = ("refresh_on_hit", "overwrite_on_insert", "mask_unused")
    given |= {name: bool(given[name]) for name in truths}
    return replace(settings, route="value" if variant.values else "key", **given)


def shard_settings(variant: GroupedShard) -> ShardSettings:
    """What the cache of a `shard` layer is set to; ConfigError where it cannot be."""
    return ShardSettings(
        sinks=variant.sinks,
        window=variant.window,
        rank=variant.rank,
        allocation=("uniform", "measured", "published")[variant.dp],
        group=variant.group,
        stream_bits=variant.bits,
        sketch=bool(variant.qjl),
    )


def check(variant: Variant, heads: int, head_dim: int) -> None:
    """Refuse a variant that a layer of so many KV heads cannot have: ConfigError."""
    if isinstance(variant, GroupedCoda):
        coda_settings(variant).low_frequencies(head_dim, torch.device("cpu"))
    if isinstance(variant, GroupedShard):
        shard_settings(variant).check(heads, head_dim)


class CodaLayer(GqaCache):
    """The bounded cache: a call of one token is a step, a longer one is read in blocks; `coda_attention`.

    While nothing has left the window, every way to cut tokens into calls gives full attention. After that it matters
    where blocks begin: at multiples of `block`, so that calls of any multiple of it are alike, and at the start of a
    call that continues a block (as published: of every call).
    """

    def __init__(self, shape: KvShape, variant: GroupedCoda, dtype: torch.dtype, device: torch.device) -> None:
        eta_logit = torch.full((shape.heads.size,), variant.eta_logit)
        self.coda = CodaCache(coda_settings(variant), shape.heads, shape.head_dim, eta_logit, dtype, device)
        self.block, self.published, self.strict = variant.block, bool(variant.published), bool(variant.strict)
        self.gated = bool(variant.gated)
        super().__init__({"coda": self.coda}, shape.heads)

    def learnt(self, eta_logit: Tensor) -> None:
        """Let the summary bank move at rates that were learnt: sigmoid of `eta_logit`, of the heads that are here."""
        assert eta_logit.shape == self.coda.summary.eta.shape, f"eta_logit: {list(eta_logit.shape)}"
        self.coda.summary.eta = torch.sigmoid(eta_logit.float()).to(self.coda.summary.eta.device)

    def attend(self, heads: Heads, first: int, ops: Ops) -> Tensor:
        """Attend and write, in the order of a step or of a block; see `GqaCache.attend`."""
        gates = heads.gates if self.gated else None
        tokens, t = Tokens(heads.q, heads.k, heads.v, gates, None), heads.q.shape[0]
        self.position = first + t
        if t == 1:
            return step(self.coda, tokens, None, ops)
        begun = 0 if self.published else first % self.block  # tokens of the block that an earlier call began
        head = min(t, self.block - begun) if begun else 0
        if not head:
            return prefill(self.coda, tokens, None, self.block, strict=self.strict, ops=ops)
        parts = [tokens.part(rows) for rows in (slice(head), slice(head, t))]
        return torch.cat([prefill(self.coda, part, None, self.block, strict=self.strict, ops=ops) for part in parts])


class ShardLayer(GqaCache):
    """Shard: exact while the prompt is read, compressed after; `model.variants.shard`."""

    def __init__(
        self,
        shape: KvShape,
        variant: GroupedShard,
        prompt: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
        rewind: int = 0,
    ) -> None:
        self.shard = ShardCache(shape, shard_settings(variant), prompt, max_context, dtype, device, rewind)
        super().__init__({"shard": self.shard}, shape.heads)

    def attend(self, heads: Heads, first: int, ops: Ops) -> Tensor:
        """Take the tokens and attend to codes; see `GqaCache.attend`."""
        out = self.shard.attend(heads.q, heads.k, heads.v, ops=ops)
        self.position = first + heads.q.shape[0]
        return out

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return those of all buffers: an empty cache saves others than a compressed one."""
        return {f"shard.{name}": buffer.dtype for name, buffer in self.shard.buffers().items()}


def grouped_cache(
    variant: Variant,
    shape: KvShape,
    window: int | None,
    context: tuple[int, int | None],
    dtype: torch.dtype,
    device: torch.device,
    rewind: int,
) -> GqaCache:
    """Return the empty cache of one layer.

    Parameters
    ----------
    variant
        `Full`, `GroupedCoda` or `GroupedShard`.
    shape
        What the layer writes.
    window
        Positions that a token sees by the model's own sliding window, its own included; None: all before it. `Full`
        alone has one.
    context
        Positions to hold, and how many of them are the prompt's: `GroupedShard` must know, None says that no layer
        needs to.
    dtype, device
        Of what is kept exact, of all buffers.
    rewind
        Tokens that can be taken back, where the variant can at all.

    """
    max_context, prompt = context
    match variant:
        case Full():
            return FullCache(shape.heads, shape.head_dim, window, max_context, dtype, device)
        case GroupedCoda():
            assert window is None, "a sliding window has a full cache"
            return CodaLayer(shape, variant, dtype, device)
        case GroupedShard():
            assert window is None, "a sliding window has a full cache"
            assert prompt is not None, "a shard layer must know how long the prompt is"
            return ShardLayer(shape, variant, prompt, max_context, dtype, device, rewind)
        case Shard() | Coda():
            raise AssertionError(f"{variant}: of layers with compressed entries")
