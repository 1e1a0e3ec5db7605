"""What the machine code of a kernel says without a GPU: read with the tools that Triton brings.

A short loop that loads 16 bytes at once and does not wait for each product is no proof of speed; the opposite of each
is one of slowness, and is seen here as soon as it is written.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Final

from triton import knobs

from fathom.scripts.paths import AUDITS

RECORDED: Final = AUDITS / "gpu-compiled.json"  # by `tests/kernels/hot_kernels.py`: by Triton's version, then by GPU
TAKEN: Final = ("registers", "stack", "shared")
COUNTED: Final = ("instructions", "loads", "products", "waits")
HEADS: Final = ["case", "kernel", "instructions a number", *TAKEN, *COUNTED]
_LABEL: Final = re.compile(r"^(\.L\w+):")
_INSTRUCTION: Final = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][\w.]*)(.*);")
_TARGET: Final = re.compile(r"`\((\.L\w+)\)")
_WIDTH: Final = re.compile(r"\.(?:[US](8|16)|(64|128|256))(?=\.|$)")
# Products of tensor cores: of warps (HMMA, QMMA, IMMA), of warp groups (HGMMA ..), of Blackwell's (UTCHMMA ..)
_PRODUCT: Final = re.compile(r"^(?:UTC)?[HQIO](?:G)?MMA")
# What stops a warp until products, or copies into shared memory that they read, are done
_WAIT: Final = ("WARPGROUP.DEPBAR", "DEPBAR", "SYNCS.PHASECHK")
BULK: Final = "bulk"  # loads of a whole tile by one instruction


def resources(stages: Mapping[str, Any]) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack, as `cuobjdump` reads them in a kernel's cubin."""
    told = _read(stages["cubin"], knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, f"cuobjdump says {told!r}"
    return {"registers": int(found[1]), "stack": int(found[2])}


def figures(stages: Mapping[str, Any]) -> dict[str, Any]:
    """`resources`, and what `counted` finds."""
    return {**resources(stages), **counted(_read(stages["cubin"], knobs.nvidia.nvdisasm.path, "-c"))}


def _read(cubin: bytes, tool: str, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603


def counted(text: str) -> dict[str, Any]:
    """What stands in a kernel, and in the innermost of its loops that has most products, or is the longest.

    Parameters
    ----------
    text
        Instructions with labels, as ``nvdisasm -c`` writes them.

    Returns
    -------
    dict[str, Any]
        whole, and loop, which is None where there is none. Each: instructions; loads: by the bytes that a thread loads
        from global memory at once, as a word, how many; products: instructions of tensor cores; waits: for them or for
        copies into shared memory.

    """
    names, loops = _loops(text)
    inner = [loop for loop in loops if not any(loop != other and _inside(other, loop) for other in loops)]
    told = [_tally(names[begin:end]) for begin, end in inner]
    return {"whole": _tally(names), "loop": max(told, key=itemgetter("products", "instructions"), default=None)}


def _tally(names: list[str]) -> dict[str, Any]:
    loads = Counter(width for name in names if (width := _loaded(name)))
    return {
        "instructions": len(names),
        "loads": dict(sorted(loads.items())),
        "products": sum(bool(_PRODUCT.match(name)) for name in names),
        "waits": sum(name.startswith(_WAIT) for name in names),
    }


def _inside(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]


def _loops(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Names of all instructions, and of each backward branch the first and the end of what it repeats."""
    names: list[str] = []
    places: dict[str, int] = {}
    loops = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(names)
        elif found := _INSTRUCTION.match(line):
            names.append(found[1])
            target = _TARGET.search(found[2])
            if found[1].startswith("BRA") and target is not None and target[1] in places:
                first = places[target[1]]
                if first < len(names) - 1:  # a branch to itself is the trap behind the end of a kernel
                    loops.append((first, len(names)))
    return names, loops


def _loaded(name: str) -> str | None:
    """Bytes that a thread loads from global memory by this instruction; None: it loads none."""
    if name.startswith(("UTMALDG", "UBLKCP")):
        return BULK
    if not name.startswith(("LDG.", "LDGSTS.")):
        return None
    width = _WIDTH.search(name)
    return str(int(width[1] or width[2]) // 8) if width else "4"


def rows(figures: dict[str, dict[str, Any]]) -> list[list[str]]:
    """A row under `HEADS` for each kernel, of what `RECORDED` has of one Triton and one GPU."""
    made = []
    for label, kernel in figures.items():
        each = f"{kernel['per number']:.2f}" if "per number" in kernel else ""
        told = {
            "instructions": f"{kernel['instructions']}{' in all' if kernel['whole'] else ''}",
            "loads": ", ".join(f"{count} x {width}" for width, count in kernel["loads"].items()),
        }
        cells = (told.get(name, str(kernel[name])) for name in (*TAKEN, *COUNTED))
        made.append([label, f"`{kernel['kernel']}`", each, *cells])
    return made
