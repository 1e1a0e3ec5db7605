"""Compile, for a GPU that is not there, every kernel that the cases of one file launch, and say what each takes.

`python tests/kernels/compile_program.py compile_norm`: runs every function of the file's CASES for Hopper and for
Blackwell, with a driver that only names the target. A case calls public ops at real dimensions on uninitialised
tensors; each launch compiles the kernel as the launch specialises it (constants, dtypes, divisibility), down to a
cubin, and runs nothing. One JSON line per kernel: its name, the target, the case, the bytes of shared memory, and the
length of the cubin.

It must run without TRITON_INTERPRET, so in a process of its own.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITIES = (90, 100)


class NoDevice:
    """As much of a driver as compiling asks for; a device of its own for each target, for which kernels are kept."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def main(name: str) -> None:
    launch = JITFunction.run
    where = {}

    def compiled(self, *args, grid, warmup, **kwargs):
        del warmup
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        found = {"kernel": self.__name__, "shared": kernel.metadata.shared, "cubin": len(kernel.asm["cubin"])}
        print(json.dumps(where | found), flush=True)
        return kernel

    JITFunction.run = compiled
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for capability in CAPABILITIES:
        driver.set_active(NoDevice(capability))
        for case, run in module.CASES.items():
            where |= {"capability": capability, "case": case}
            run()


if __name__ == "__main__":
    main(sys.argv[1])
