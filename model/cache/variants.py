"""How a layer remembers what is older than its window: the choice of `--kv`, layer by layer.

A variant is a value with its settings. What it means for a kind of layer is said where that layer's cache is made
(`model.cache.layers`); an SWA layer has nothing older than its window, and no variant but `Full`.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Full:
    """Every compressed entry, in the run's formats."""

    def __str__(self) -> str:
        """Return it as `--kv` spells it."""
        return "full"


@dataclass(frozen=True, slots=True)
class Shard:
    """Every entry, rotated by Hadamard and coded by Lloyd-Max: `kernels.rotated`."""

    bits: int = 6  # of a value of an entry
    keys: int = 8  # of a value of an index key

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
    settings = ",".join(f"{field.name}={getattr(variant, field.name)}" for field in fields(variant))
    return f"{name}:{settings}"
