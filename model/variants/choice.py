"""How a layer remembers what is older than its window: the choice of `--kv`, layer by layer.

A variant is a value with its settings. What it means for a kind of layer is said where that layer's cache is made
(`model.cache.layers`, `model.variants.grouped`); an SWA layer has nothing older than its window, and no variant but
`Full`. V4's layers and layers with grouped heads have settings of their own, under the same names.
"""

from dataclasses import dataclass, field, fields

from fathom.kernels.formats.stored import EigenKeys


@dataclass(frozen=True, slots=True)
class Full:
    """Every compressed entry, in the run's formats."""

    def __str__(self) -> str:
        """Return it as `--kv` spells it."""
        return "full"


@dataclass(frozen=True, slots=True)
class Basis:
    """A basis that was fitted to a layer's entries beforehand, see `runtime.basis`."""

    digest: str  # of all below: what tells one basis from another, here and in a saved state
    fit: EigenKeys = field(compare=False, repr=False)  # of the nope dims, without any row
    rope_bits: int = field(compare=False)  # of a value of the rope dims

    def __str__(self) -> str:
        """Return what tells it from others."""
        return self.digest


@dataclass(frozen=True, slots=True)
class Shard:
    """Every entry as codes: rotated by Hadamard (`formats.coded_rows`), or in a basis (`formats.basis_rows`)."""

    bits: int = 6  # of a value of an entry; in a basis, as many bytes as that takes, the basis included
    keys: int = 8  # of a value of an index key
    basis: Basis | None = None

    def __str__(self) -> str:
        """Return it as `--kv` spells it, with every setting."""
        return _spelt("shard", self)


@dataclass(frozen=True, slots=True)
class Coda:
    """So many entries and no more: the newest, some that are like no other, and means of the rest."""

    window: int = 256  # newest entries, exact
    exact: int = 64  # entries that were like no other when they left the window
    summary: int = 64  # means of all the others

    def __str__(self) -> str:
        """Return it as `--kv` spells it, with every setting."""
        return _spelt("coda", self)


@dataclass(frozen=True, slots=True)
class GroupedShard:
    """The prompt by PCA and VQ, what comes after it by Hadamard and Lloyd-Max: `model.variants.shard`."""

    rank: int = 192  # components of the keys that are kept
    bits: int = 8  # of a number of what came after the prompt
    sinks: int = 4  # first tokens, exact
    window: int = 64  # newest tokens, exact
    dp: int = 0  # bits by group of components, as 1: measured distortions, 2: the article's formula say; 0: int4
    group: int = 64  # components that get equally many bits, with dp
    qjl: int = 0  # 1: one of the bits of keys is the sign of a projection of their error

    def __str__(self) -> str:
        """Return it as `--kv` spells it, with every setting."""
        return _spelt("shard", self)


@dataclass(frozen=True, slots=True)
class GroupedCoda:
    """So many tokens and no more, in a ring and two banks: `model.variants.coda`.

    The settings behind `eta_logit` are those of `CodaSettings`, under its names; 0 and 1 stand for its booleans.
    """

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


Variant = Full | Shard | Coda | GroupedShard | GroupedCoda


def _spelt(name: str, variant: Shard | Coda | GroupedShard) -> str:
    values = {part.name: getattr(variant, part.name) for part in fields(variant)}
    settings = ",".join(f"{key}={value}" for key, value in values.items() if value is not None)
    return f"{name}:{settings}"
