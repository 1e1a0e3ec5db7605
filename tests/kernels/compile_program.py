"""Compile, for a GPU that is not there, every kernel that the cases of some files launch, and say what each takes.

`python tests/kernels/compile_program.py 90 FAST compile_norm compile_topk`: runs cases of the files for Hopper (90) or
Blackwell (100), with a driver that only names the target. A case calls public ops at real dimensions on uninitialised
tensors; each launch compiles the kernel as the launch specialises it (constants, dtypes, divisibility), down to a
cubin, and runs nothing.

FAST is a file's CASES, which for Hopper are the branches of its kernels as V4 takes them, and for Blackwell its
BLACKWELL where it has one: fewer, for each takes longer there, though still every kernel that is launched. SLOW is what
is left: MORE, other constants of the same kernels, and for Blackwell the rest of CASES. HOT is those of `hot_kernels`,
told with what their machine code says (`scripts.bench.sass.figures`).

One JSON line per kernel: its name, the target, Triton's version, the file and the case, the bytes of shared memory, and
the length of the cubin, and more that `scripts.bench.gpu.only_compile` tells. On stderr, each case before it runs.

It must run without TRITON_INTERPRET, so in a process of its own.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.runtime import driver

from fathom.scripts.bench.gpu import NoDevice, only_compile
from fathom.scripts.bench.sass import figures, resources
from tests.kernels.hot_kernels import HOT

BLACKWELL = 100


def chosen(module: ModuleType, capability: int, kind: str) -> dict[str, Callable[[], object]]:
    """Of a file's cases those that FAST or SLOW names for this GPU."""
    if kind == "HOT":
        given = module.CASES | getattr(module, "MORE", {})
        wanted = dict.fromkeys(hot.case for hot in HOT.values() if f"compile_{hot.part}" == module.__name__)
        return {name: given[name] for name in wanted}
    fast = getattr(module, "BLACKWELL", module.CASES) if capability == BLACKWELL else module.CASES
    given = module.CASES | getattr(module, "MORE", {})
    return fast if kind == "FAST" else {name: run for name, run in given.items() if name not in fast}


def _along(layout: str, lanes: int) -> bool:
    """Whether lane i of [1, rows, lanes] is of thread ``i % 32`` and warp ``i / 32``, of those that share a row."""
    if layout.startswith("blocked"):
        sides = re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = \[(\d+), (\d+), (\d+)\]", layout)
        size, threads, warps = (tuple(map(int, of)) for of in sides)
        return (size, threads, warps[2]) == ((1, 1, 1), (1, 1, 32), lanes // 32) and "order = [2, 1, 0]" in layout
    threads_and_warps = layout.partition("lane = ")[2].partition("block = ")[0]
    along = [int(place) for place in re.findall(r"\[0, 0, (\d+)\]", threads_and_warps)]
    return "register = []" in layout and along == [1 << bit for bit in range(lanes.bit_length() - 1)]


def _neighbours(layout: str) -> bool:
    """Whether each four elements of a thread are four columns side by side, the last axis."""
    if layout.startswith("blocked"):
        size, order = (
            re.search(rf"{name} = \[([\d, ]+)\]", layout)[1].split(", ") for name in ("sizePerThread", "order")
        )
        return int(size[-1]) % 4 == 0 and int(order[0]) == len(size) - 1
    registers = re.findall(r"\[([\d, ]+)\]", layout.partition("register = ")[2].partition("lane = ")[0])
    return [[int(place) for place in of.split(", ")] for of in registers[:2]] == [[0, 1], [0, 2]]


def looked(stages: Mapping[str, Any]) -> dict[str, Any]:
    """What a kernel takes; "along lanes": of each sum of whole rows (`kernels.linear.weight_rows`) how threads lie.

    Whether those of a warp, then its warps, each hold one lane after the other, whatever the rows are: the order of the
    sum follows from that. "packed": of each piece of assembly that takes four bytes as a word, whether they are side by
    side.
    """
    text = stages["ttgir"]
    layouts = dict(re.findall(r"^#(\w+) = #ttg\.(.*)$", text, re.MULTILINE))
    sums = re.findall(r"<\{axis = 2 : i32\}>.*?\}\) : \(tensor<1x\d+x(\d+)xf32, #(\w+)>\)", text, re.DOTALL)
    found = [_along(layouts[name], int(lanes)) for lanes, name in sums]
    packed = re.findall(r"packed_element = 4 .*? : tensor<\d+x\d+xi8, #(\w+)>", text)
    return {**resources(stages), "along lanes": found, "packed": [_neighbours(layouts[name]) for name in packed]}


def main(capability: int, kind: str, names: list[str]) -> None:
    where: dict[str, object] = {"capability": capability, "triton": triton.__version__}
    only_compile(lambda kernel: print(json.dumps(where | kernel), flush=True), figures if kind == "HOT" else looked)
    driver.set_active(NoDevice(capability))
    for name in names:
        path = Path(__file__).with_name(f"{name}.py")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for case, run in chosen(module, capability, kind).items():
            where |= {"file": name, "case": case}
            print(where, file=sys.stderr, flush=True)  # before a traceback, should there be one
            run()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
