"""Every part by name and the cases of each: a part is a Triton file of `kernels` that the others' ops do not hide."""

from collections.abc import Callable, Iterator, Sequence

from scripts.bench.device.case import Case
from scripts.bench.device.context_cases import CONTEXT
from scripts.bench.device.llama_cases import GROUPED
from scripts.bench.device.small_cases import SMALL
from scripts.bench.device.weight_cases import WEIGHT

CASES: dict[str, Callable[[], Iterator[Case]]] = {**SMALL, **WEIGHT, **CONTEXT, **GROUPED}


def cases(parts: Sequence[str]) -> list[Case]:
    """All cases of these parts, in the order of the parts; `layers` has none, see `scripts.bench.device.layers`."""
    return [case for part in parts if part in CASES for case in CASES[part]()]
