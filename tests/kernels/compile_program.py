"""Compile, for a GPU that is not there, every kernel that the cases of some files launch, and say what each takes.

`python tests/kernels/compile_program.py 90 CASES compile_norm compile_topk`: runs every function of the files' CASES
(or of MORE: other constants of the same kernels, left to the slow tests) for Hopper (90) or Blackwell (100), with a
driver that only names the target. A case calls public ops at real dimensions on uninitialised tensors; each launch
compiles the kernel as the launch specialises it (constants, dtypes, divisibility), down to a cubin, and runs nothing.
One JSON line per kernel: its name, the target, the file and the case, the bytes of shared memory, and the length of
the cubin. On stderr, each case before it runs.

It must run without TRITON_INTERPRET, so in a process of its own.
"""

import importlib.util
import sys
from pathlib import Path

from triton.runtime import driver

from scripts.bench.ahead import NoDevice, print_what_is_compiled


def main(capability: int, kind: str, names: list[str]) -> None:
    where: dict[str, object] = {"capability": capability}
    print_what_is_compiled(where)
    driver.set_active(NoDevice(capability))
    for name in names:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case, run in getattr(module, kind, {}).items():
            where |= {"file": name, "case": case}
            print(where, file=sys.stderr, flush=True)  # before a traceback, should there be one
            run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
