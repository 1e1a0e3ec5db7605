"""What several tests of recordings have in common."""

from typing import Any

import pytest

from fathom.runtime.options import DEMO
from tests.exporter import exporter


@pytest.fixture(scope="session")
def healthy() -> Any:
    """The demo checkpoint in transformers; whoever puts a fault into it takes a copy."""
    return exporter.load(DEMO, "bf16")
