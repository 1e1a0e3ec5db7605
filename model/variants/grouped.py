"""CoDA-GQA-L and Shard for layers with grouped heads: their settings as `--kv` has them, and their caches."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.cache.gqa import GqaCache, Heads, KvShape
from fathom.model.cache.variant import GroupedRoom, Variant
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Tokens, prefill, step
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.shard import ShardCache, ShardSettings


@dataclass(frozen=True, slots=True)
class GroupedShard(Variant):
    """The prompt by PCA and VQ, what comes after it by Hadamard and Lloyd-Max: `model.variants.shard`."""

    name, prompted = "shard", True
    rank: int = 192  # components of the keys that are kept
    bits: int = 8  # of a number of what came after the prompt
    sinks: int = 4  # first tokens, exact
    window: int = 64  # newest tokens, exact
    dp: int = 0  # bits by group of components, as 1: measured distortions, 2: the article's formula say; 0: int4
    group: int = 64  # components that get equally many bits, with dp
    qjl: int = 0  # 1: one of the bits of keys is the sign of a projection of their error

    def check(self, heads: int, head_dim: int) -> None:
        """See `Variant.check`."""
        shard_settings(self).check(heads, head_dim)

    def grouped_cache(self, room: GroupedRoom) -> GqaCache:
        """Exact, until the prompt is read."""
        assert room.window is None, "a sliding window has a full cache"
        assert room.prompt is not None, "a shard layer must know how long the prompt is"
        return ShardLayer(room.shape, self, room.prompt, room.max_context, room.dtype, room.device, room.rewind)


@dataclass(frozen=True, slots=True)
class GroupedCoda(Variant):
    """So many tokens and no more, in a ring and two banks: `model.variants.coda`.

    The settings behind `eta_logit` are those of `CodaSettings`, under its names; 0 and 1 stand for its booleans.
    """

    name = "coda"
    window: int = 256  # newest tokens, exact
    exact: int = 64  # tokens that were like no other when they left the window
    summary: int = 64  # means of others
    block: int = 256  # tokens of a call that attend before any of them is written
    values: int = 0  # 1: means are sought by values, as the package's page says; 0: by keys, as its code does
    published: int = 0  # 1: the rules of the package coda-gqa-l 1.3.1; 0: those of `CodaSettings`
    strict: int = 0  # 1: in a block too a token sees the newest `window` tokens exactly, and no more
    untrained: int = 0  # 1: also with adapters that were trained for other settings than these
    gated: int = 1  # 0: every token is worth keeping alike, whatever the adapters' write gate says of it
    eta_logit: float = -3.0  # the rate of the summary bank, through a sigmoid, where adapters have learnt none
    exact_at_start: int | None = None
    summary_at_start: int | None = None
    growth_horizon: int = 1_000_000
    gate_exact: float = 0.10
    gate_summary: float = 0.05
    hit: float = 0.90
    novelty: float = 0.70
    refresh_on_hit: int = 0
    exact_candidates: int = 8
    summary_candidates: int = 64
    overwrite_on_insert: int = 1
    memory_init: str = "normal"
    mask_unused: int = 1

    def __str__(self) -> str:
        """Return it as `--kv` spells it: its sizes, and every other setting that is not the default."""
        sizes = ("window", "exact", "summary", "block")
        told = {part.name: getattr(self, part.name) for part in fields(self)}
        default = {part.name: part.default for part in fields(self) if part.name not in sizes}
        return "coda:" + ",".join(f"{name}={value}" for name, value in told.items() if value != default.get(name))

    def check(self, heads: int, head_dim: int) -> None:
        """See `Variant.check`."""
        del heads
        coda_settings(self).low_frequencies(head_dim, torch.device("cpu"))

    def grouped_cache(self, room: GroupedRoom) -> GqaCache:
        """A ring and two banks, whatever the context."""
        assert room.window is None, "a sliding window has a full cache"
        return CodaLayer(room.shape, self, room.dtype, room.device)


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
