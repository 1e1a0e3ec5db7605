"""The stand-alone exporter for transformers, as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).resolve().parents[1] / "scripts" / "exporters" / "record_transformers.py"


def _loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_transformers", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exporter = _loaded()
