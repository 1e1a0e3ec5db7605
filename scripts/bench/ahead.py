"""Compile kernels for GPUs that are not there: what each takes of shared memory, for Hopper and Blackwell.

`compiled` starts this module as a process of its own, without TRITON_INTERPRET, which would leave nothing to compile.
There a driver that only names the target takes the place of the device's, and launches compile and run nothing.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from scripts.bench.device.draw import Draw
from scripts.bench.device.parts import cases
from scripts.paths import ROOT

CAPABILITIES = (90, 100)  # H100 and H200; B200


class NoDevice:
    """As much of a driver as compiling asks for; a device of its own for each target, for which kernels are kept."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Under which kernels are kept."""
        return int(self.target.arch)

    def get_current_stream(self, device: int | None = None) -> int:
        """None that anything runs on."""
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where arguments are."""
        return torch.device("cpu")


def compiled(parts: Sequence[str]) -> list[dict[str, Any]]:
    """Kernels of the cases that stand for these parts: part, case, kernel, capability, bytes of shared memory, cubin.

    RuntimeError, with the end of what the compiler said, where one does not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "scripts.bench.ahead", *parts],
            cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": folder}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"compiling ended with {done.returncode}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def print_what_is_compiled(where: dict[str, Any]) -> None:
    """Make every launch compile, down to a cubin, and print a line of JSON behind what `where` holds; nothing runs."""
    launch = JITFunction.run

    def compile_only(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        kernel = launch(self, *given, grid=grid, warmup=True, **options)
        found = {"kernel": self.__name__, "shared": kernel.metadata.shared, "cubin": len(kernel.asm["cubin"])}
        print(json.dumps(where | found), flush=True)
        return kernel

    JITFunction.run = compile_only


def main(parts: Sequence[str]) -> None:
    """Compile, and print a line of JSON for each kernel."""
    where: dict[str, Any] = {}
    print_what_is_compiled(where)
    for capability in CAPABILITIES:
        driver.set_active(NoDevice(capability))
        for case in cases(parts):
            if case.compiled:
                where |= {"part": case.part, "case": case.label, "capability": capability}
                case.build(Draw(torch.device("cpu"), 0, values=False)).run()


if __name__ == "__main__":
    main(sys.argv[1:])
