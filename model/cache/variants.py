"""How a layer remembers what is older than its window: the choice of `--kv`, layer by layer.

A variant is a value with its settings. What it means for a kind of layer is said where that layer's cache is made
(`model.cache.layers`); an SWA layer has nothing older than its window, and no variant but `Full`.
"""

from dataclasses import dataclass, field, fields

from kernels.formats import EigenKeys


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
    """Every entry as codes: rotated by Hadamard (`kernels.rotation`), or in a basis (`kernels.basis_rows`)."""

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


Variant = Full | Shard | Coda


def _spelt(name: str, variant: Shard | Coda) -> str:
    values = {part.name: getattr(variant, part.name) for part in fields(variant)}
    settings = ",".join(f"{key}={value}" for key, value in values.items() if value is not None)
    return f"{name}:{settings}"
