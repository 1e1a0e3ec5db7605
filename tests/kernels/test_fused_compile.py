"""Every Triton kernel compiles for Hopper and Blackwell at real dimensions; no GPU is needed for that."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.stem for path in HERE.glob("compile_*.py") if path.stem != "compile_program")
SHARED = 227 * 1024  # bytes that a block may have on both: CUDA C++ Programming Guide, compute capability 9.0 and 10.0


def compiled(name, folder):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "compile_program.py"), name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", FILES)
def test_kernels_compile_and_fit(name, tmp_path):
    kernels = compiled(name, tmp_path)
    assert {kernel["capability"] for kernel in kernels} == {90, 100}
    for kernel in kernels:
        assert kernel["cubin"] > 0, kernel
        assert kernel["shared"] <= SHARED, kernel


def test_every_file_of_kernels_is_compiled():
    fused = HERE.parents[1] / "kernels" / "fused"
    ops = {path.stem for path in fused.glob("*.py") if "@triton.jit" in path.read_text(encoding="utf-8")}
    named = {stem.removeprefix("compile_") for stem in FILES}
    assert ops - {"rounding", "weight_tiles"} == named
