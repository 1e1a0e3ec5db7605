"""The kernels that a V4-Flash layer spends its time in: what their machine code says, and what it said before.

`python -m tests.kernels.hot_kernels` writes ``audits/gpu-compiled.json`` anew, by the Triton that is installed and by
the oldest that the project promises, and prints the table. `test_hot_kernels` holds what is compiled against it.
"""

import json
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from fathom.kernels.linear.weight_rows import columns_of
from fathom.scripts.bench.gpu import CAPABILITIES
from fathom.scripts.bench.sass import HEADS, RECORDED, TAKEN, rows
from tests.kernels.compilation import OLDEST, compiler

Constants = dict[str, Any]


class Hot(NamedTuple):
    """A launch of a case of ``compile_{part}.py``; its loop counts, or `whole`, where that is unrolled."""

    part: str
    case: str
    kernel: str
    # of its constants, numbers as stored (weights, keys) that a program reads in what counts; None: it reads none there
    numbers: Callable[[Constants], int] | None
    whole: bool = False
    hopper: bool = False  # whether that is launched on Hopper alone


UP, DOWN = (lambda c: 2 * c["ROWS"] * c["BLOCK"]), (lambda c: c["ROWS"] * c["BLOCK"])  # gate and up are two matrices
ROW = lambda c: c["LANES"] * c["STEPS"] * columns_of(c["FORM"])  # noqa: E731 -- whole rows
ONE, MANY = "V4-Flash, one token", "V4-Flash, 4096 tokens"
STREAMS, EACH = "read for a sublayer, V4-Flash", "96 tokens an expert"
HOT = {
    "experts up, one token": Hot("experts", ONE, "_few_up", lambda c: 2 * c["ROWS"] * ROW(c), whole=True),
    "experts down, one token": Hot("experts", ONE, "_few_down", lambda c: c["ROWS"] * ROW(c), whole=True),
    "FP8 linear, one token": Hot(
        "linear", "query, V4-Flash, one token", "_linears", lambda c: c["ROWS"] * prod(c["HOW"][0][6:]) * 16, whole=True
    ),
    "FP8 linear, five tokens": Hot(
        "linear", "low-rank query, V4-Flash, five tokens", "_few", lambda c: c["ROWS"] * ROW(c), whole=True
    ),
    "mHC products, one token": Hot("hyper", STREAMS, "_sums_of_few", lambda c: c["N"] * c["SPAN"], whole=True),
    "mHC read, one token": Hot("hyper", STREAMS, "_weigh", None),  # its longest loop is Sinkhorn's
    "mHC products, 4096 tokens": Hot(
        "hyper", f"{STREAMS}, a chunk", "_sums_of_many", lambda c: c["PARTS"] * c["N"] * c["BLOCK"]
    ),
    "FP8 linear, 4096 tokens": Hot("codes", "output, 4096 tokens", "_product_of_codes", lambda c: c["ROWS"] * 128),
    "FP8 linear, 8192 tokens, exact": Hot("linear", "query, V4-Flash, 8192 tokens", "_linear", DOWN),
    # of Hopper, whose loop counts where scales lie near each other
    "experts up, 96 tokens each": Hot(
        "expert_codes", EACH, "_gate_up_of_codes", lambda c: c["ROWS"] * 128, hopper=True
    ),
    "experts down, 96 tokens each": Hot("expert_codes", EACH, "_down_of_codes", lambda c: c["ROWS"] * 128, hopper=True),
    "experts up, 96 tokens each, exact": Hot(
        "expert_codes", f"{EACH}, exact", "_gate_up_of_codes", lambda c: c["ROWS"] * 128, hopper=True
    ),
    "experts down, 96 tokens each, exact": Hot(
        "expert_codes", f"{EACH}, exact", "_down_of_codes", lambda c: c["ROWS"] * 128, hopper=True
    ),
    "experts up, 4096 tokens, by tiles": Hot("experts", MANY, "_gate_up", UP),
    "experts down, 4096 tokens, by tiles": Hot("experts", MANY, "_down", DOWN),
    "attention, 512 tokens": Hot(
        "attention", "CSA prefill, V4-Flash", "_attend", lambda c: c["BLOCK_N"] * c["BLOCK_D"]
    ),
}


def found(compiled: Callable[[str], dict[str, list[dict[str, Any]]]]) -> tuple[str, dict[str, dict[str, Any]]]:
    """Triton's version, and by label of `HOT` what a compiler of `compilation` makes of each.

    `TAKEN` as `scripts.bench.gpu.only_compile` tells them, `COUNTED` as `scripts.bench.sass.counted`, and "per number":
    instructions of a thread for each number that is stored.
    """
    told, version = {}, ""
    for label, hot in HOT.items():
        launches = [
            kernel for kernel in compiled("HOT")[f"compile_{hot.part}"]
            if (kernel["case"], kernel["kernel"]) == (hot.case, hot.kernel)
        ]  # fmt: skip
        if hot.hopper and launches and launches[0]["capability"] != CAPABILITIES[0]:
            continue
        assert launches, f"{label}: {hot.case} of compile_{hot.part} launches no {hot.kernel}"
        made = [{name: kernel[name] for name in ("constants", "whole", *TAKEN)} for kernel in launches]
        assert all(other == made[0] for other in made), f"{label}: {hot.case} launches several {hot.kernel}"
        kernel, version = launches[0], launches[0]["triton"]
        counted = kernel["whole" if hot.whole else "loop"]
        assert counted is not None, f"{label}: {hot.kernel} has no loop: want whole=True"
        told[label] = {"kernel": hot.kernel, "whole": hot.whole, **{name: kernel[name] for name in TAKEN}, **counted}
        if hot.numbers is not None:
            each = counted["instructions"] * 32 * kernel["warps"] / hot.numbers(kernel["constants"])
            told[label]["per number"] = round(each, 3)
    return version, told


def main() -> None:
    recorded: dict[str, dict[str, Any]] = {}
    for before in ((OLDEST,), ()):
        for capability in CAPABILITIES:
            with tempfile.TemporaryDirectory() as folder:
                version, figures = found(compiler(capability, Path(folder), *before))
            recorded.setdefault(version, {})[f"sm_{capability}"] = figures
            lines = [f"| {' | '.join(row)} |" for row in (HEADS, ["--"] * len(HEADS), *rows(figures))]
            print(f"\nTriton {version}, sm_{capability}\n", *lines, sep="\n", flush=True)
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
