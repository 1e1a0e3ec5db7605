"""All probes in the order in which they run: what is cheap and most telling first."""

from probes import (
    attention,
    boundaries,
    determinism,
    load,
    memory,
    mhc,
    needle,
    parity,
    quantisation,
    recall,
    rope,
    routing,
    sink,
    visibility,
)
from probes.probe import Probe

_MODULES = (
    load,
    recall,
    attention,
    visibility,
    boundaries,
    rope,
    mhc,
    sink,
    routing,
    quantisation,
    needle,
    memory,
    determinism,
    parity,
)

FULL: tuple[Probe, ...] = tuple(module.FULL for module in _MODULES)  # what the pages are made with
QUICK: tuple[Probe, ...] = tuple(module.QUICK for module in _MODULES)  # what the matrix runs for every fault
