"""Compiling all files of kernels for one GPU in one process: starting one takes longer than compiling most files."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
OLDEST = Path(sys.prefix) / "oldest-triton"  # where the Makefile puts it
FILES = sorted(path.stem for path in HERE.glob("compile_*.py") if path.stem != "compile_program")
SOURCES = sorted((HERE.parents[1] / "kernels").rglob("*.py"))
TEXTS: dict[str, str] = {}  # by the op, or the part of one, that a file of kernels is
for path in SOURCES:
    stem = path.stem.removeprefix("triton_")
    name = path.parent.name if stem == "triton" else "shard_middle" if stem == "middle" else stem
    if "@triton.jit" in (text := path.read_text(encoding="utf-8")):
        TEXTS[name] = text
SHARED = 227 * 1024  # bytes that a block may have on both: CUDA C++ Programming Guide, compute capability 9.0 and 10.0


def oldest_version() -> str:
    """Of the Triton that is there."""
    (found,) = PROJECT["dependency-groups"]["oldest"]
    return re.match(r"triton==([\d.]+)", found)[1]


def compiler(capability: int, folder: Path, *before: Path) -> Callable[[str], dict[str, list[dict]]]:
    """What `compile_program` says of each file's FAST, SLOW or HOT cases, when asked for; `folder` is Triton's cache.

    `before`: folders whose packages come before those that are installed.
    """

    @cache
    def compiled(kind):
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        path = os.pathsep.join(map(str, (*before, HERE.parents[1])))
        environment |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": path}
        command = [sys.executable, str(HERE / "compile_program.py"), str(capability), kind, *FILES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        kernels = [json.loads(line) for line in done.stdout.splitlines()]
        return {name: [kernel for kernel in kernels if kernel["file"] == name] for name in FILES}

    return compiled


def check(kernels, capability):
    for kernel in kernels:
        assert kernel["capability"] == capability
        assert kernel["cubin"] > 0, kernel
        assert kernel["shared"] <= SHARED, kernel


def launched(text: str) -> set[str]:
    """Kernels that a text defines and launches; what only others call is none."""
    functions = re.findall(r"@triton\.jit[^\n]*\ndef (_\w+)", text)
    return {name for name in functions if re.search(rf"\b{name}\[", text)}


WITH_KERNELS = {stem for stem, text in TEXTS.items() if launched(text)}


def check_every_kernel_that_is_launched(kernels):
    """Every one is among them: in the cases that `make test` compiles, for a GPU."""
    assert launched("\n".join(TEXTS.values())) == {kernel["kernel"] for kernel in kernels}
