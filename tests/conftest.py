"""Triton kernels run in its interpreter, here and nowhere else: it must be said before they are imported."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def patched_interpreter() -> Iterator[None]:
    """Before any test that runs kernels, so that none sees the other state."""
    if importlib.util.find_spec("triton") is None:  # not every platform has it
        yield
        return
    from tests.interpreter import patched  # noqa: PLC0415 -- it imports Triton

    with patched():
        yield


@pytest.fixture(scope="session", autouse=True)
def _loops_are_compiled():
    """Compiled before the first test: what a command says while it compiles stands in a test of its own."""
    import fathom.kernels.ops  # noqa: F401, PLC0415 (its loops are known then)
    from fathom.kernels import compiled  # noqa: PLC0415

    compiled.prepare(lambda *_: True)
