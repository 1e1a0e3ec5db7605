"""The stand-alone exporters, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "scripts" / "exporters"


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


exporter = _loaded("record_transformers")
vllm_cpu = _loaded("record_vllm_cpu")  # imports vllm only when it records
llama_cpp = _loaded("record_llama_cpp")  # imports llama_cpp only when it records
