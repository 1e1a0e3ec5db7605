"""Grids of cases: what `make test` runs of them takes every branch; the others are for ``pytest -m slow``."""

import pytest


def on_demand(*cases: object) -> list[object]:
    """Cases that differ in their values alone from those beside them, for `pytest.mark.parametrize`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]
