"""All probes, found in the modules of this package: what is cheap and most telling comes first."""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Final

from fathom import probes
from fathom.probes.probe import Probe

# Probes that are not here come last, by name.
ORDER: Final = ("load", "text", "recall", "attention", "projections", "bits", "rope", "mhc", "sink", "routing", "ops")


def _found(size: str) -> Iterator[Probe]:
    """What modules call `FULL`, or `QUICK`: a probe, or several."""
    for module in pkgutil.iter_modules(probes.__path__, "fathom.probes."):
        name = f"{module.name}.probe" if module.ispkg else module.name
        if importlib.util.find_spec(name) is None:
            continue
        one = getattr(importlib.import_module(name), size, ())
        yield from one if isinstance(one, tuple) else (one,)


def _sorted(size: str) -> tuple[Probe, ...]:
    def place(probe: Probe) -> tuple[int, str]:
        return (ORDER.index(probe.name) if probe.name in ORDER else len(ORDER)), probe.name

    return tuple(sorted(_found(size), key=place))


_full, _quick = _sorted("FULL"), _sorted("QUICK")
FULL: Final = tuple(probe for probe in _full if not probe.by_name)  # what the pages are made with
QUICK: Final = tuple(probe for probe in _quick if not probe.by_name)  # what the matrix runs for every fault
EXPERIMENTS: Final = tuple(probe for probe in _full if probe.by_name)  # never in `all`
QUICK_EXPERIMENTS: Final = tuple(probe for probe in _quick if probe.by_name)
