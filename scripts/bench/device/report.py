"""The page of `scripts.bench gpu`: what was measured, or, where there was no device, what is known without one."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from runtime.report import Commit
from scripts.bench.device import counts
from scripts.bench.record import markdown

JSON = dict[str, Any]
SHARED = 227 * 1024  # bytes of shared memory that a block may have on both: CUDA C++ Programming Guide
HEADS = (
    "case",
    "us, median",
    "from .. to",
    "floor, us",
    "of the roof",
    "GB/s",
    "TFLOP/s",
    "target",
    "error",
    "timed by",
)
FLOOR_HEADS = ("case", "MB", "GFLOP", *(f"floor on {name}, us" for name in counts.DEVICES), "target on an H200")
LAYER_HEADS = ("layer", "context", "tokens", "MB", "GFLOP", "us, median", "from .. to", "floor, us", "of the floor")
COMPILED_HEADS = ("part: kernel", "shared memory, sm_90", "shared memory, sm_100")
COUNTED = """\
Bytes are what must be read and written once, FLOPs those of the matrix products, both by formula
(`scripts/bench/device/counts.py`). A floor is the longer of bytes / bandwidth and FLOPs / rate, at 4.3 TB/s and 790
TFLOP/s in BF16 on an H200, 3.35 and 790 on an H100, 8 and 2250 (nominal) on a B200; all kernels multiply in BF16,
Shard's in FP16, so that the FP8 rate of a device is no roof here. Every token of a chunk is counted as seeing what the
last one sees: too much, where the chunk is not short beside its context. A target of 100 % of FLOP/s is half
of the FP8 rate, which is what is asked of the indexer's prefill."""
TIMED = """\
A time is the median over replays of a CUDA graph, which holds up to 8 calls, each with inputs of its own; before each
replay a buffer larger than L2 is written. *events*: the call cannot be captured, and its launches are timed. An error
is in units of the tolerance: up to 1 is right. Tolerances and what results are compared with stand at the end."""
LAYERS = """\
One CSA and one HCA layer on the triton op set, launched kernel by kernel as the model runs today, on the wall clock:
decode of one token, and a chunk of 4096 tokens, after contexts of 4096, 131072 and 1044480 tokens. Weights are random,
FP8 and FP4 as published; of V4-Pro 48 experts, those of one of eight ranks, which with six to a token do the work that
a rank does for the tokens of all. Entries are FP8, index keys FP4. The floor adds up the parts of a layer, each at its
own limit. What a call prints, checks and waits for is in its time."""


def text(document: JSON) -> str:
    """The page as Markdown, of what `Record.document` returns."""
    results = document["results"]
    lines = [*_front(document), "", "# The kernels on a GPU", ""]
    lines += _measured(results) if results["device"] else _unmeasured(results)
    return "\n".join([*lines, "## How to run it", "", "```", document["command"], "```", ""])


def _front(document: JSON) -> list[str]:
    versions = document["versions"]
    facts = {
        "run": document["run"],
        "commit": str(Commit(**document["commit"])),
        "device": document["results"]["device"] or "none",
        "versions": ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "triton") if versions[name]),
    }
    return ["---", *(f'{name}: "{value}"' for name, value in facts.items()), "---"]


def _measured(results: JSON) -> list[str]:
    cases, roof = results["cases"], counts.roof(results["device"])
    wrong = [case for case in cases if case["error"] > 1]
    asked = [case for case in cases if case["reached"] is not None]
    missed = sum(not case["reached"] for case in asked)
    verdict = f"{len(cases) - len(wrong)} of {len(cases)} cases are right"
    verdict += f"; {len(asked) - missed} of {len(asked)} targets are reached" if asked else ""
    lines = [f"**On one {results['device']}: {verdict}.**", "", COUNTED, "", TIMED, ""]
    if roof is None:
        lines += ["No roof is known of this device: neither floors nor shares of it are given.", ""]
    if wrong:
        lines += ["Wrong:", "", *(f"* {case['part']}, {case['case']}: {case['error']:.3g}" for case in wrong), ""]
    for part in dict.fromkeys(case["part"] for case in cases):
        rows = [measured_row(case, roof) for case in cases if case["part"] == part]
        lines += markdown(part, HEADS, rows)
    if results["layers"]:
        rows = [layer_row(layer, results["device"]) for layer in results["layers"]]
        lines += [*markdown("Whole layers", LAYER_HEADS, rows), LAYERS, ""]
    return [*lines, *_tolerances(cases), *_uncaptured(cases)]


def measured_row(case: JSON, roof: tuple[float, float] | None) -> tuple[str, ...]:
    """Cells of one measured case; without a roof neither floor nor share."""
    us = median(case["us"])
    cost = counts.Cost(case["bytes"], case["flops"])
    floor = None if roof is None else cost.floor_us(roof)
    reached = "" if case["reached"] is None else ": reached" if case["reached"] else ": missed"
    return (
        case["case"],
        f"{us:.4g}",
        f"{min(case['us']):.4g} .. {max(case['us']):.4g}",
        "-" if floor is None else f"{floor:.3g}",
        "-" if floor is None else f"{100 * floor / us:.1f} %",
        f"{case['bytes'] / us / 1e3:.4g}",
        f"{case['flops'] / us / 1e6:.3g}",
        f"{case['target'] or '-'}{reached}",
        f"{case['error']:.2g}",
        case["how"],
    )


def layer_row(layer: JSON, device: str | None) -> tuple[str, ...]:
    """Cells of one layer, measured or not."""
    floors = layer["floors"]
    known = next((name for name in floors if device and name in device), None)
    times = ("-", "-")
    share = "-"
    if layer["us"]:
        us = median(layer["us"])
        times = (f"{us:.4g}", f"{min(layer['us']):.4g} .. {max(layer['us']):.4g}")
        share = "-" if known is None else f"{us / floors[known]:.2f} times"
    floor = "-" if known is None else f"{floors[known]:.4g}"
    sizes = (f"{layer['bytes'] / 1e6:.4g}", f"{layer['flops'] / 1e9:.4g}")
    return (f"{layer['model']}, {layer['kind']}", layer["context"], str(layer["tokens"]), *sizes, *times, floor, share)


def _tolerances(cases: Sequence[JSON]) -> list[str]:
    told = dict.fromkeys((case["part"], case["tolerance"], case["against"]) for case in cases)
    return markdown("What is right", ("part", "may differ by", "from"), list(told))


def _uncaptured(cases: Sequence[JSON]) -> list[str]:
    told = [f"* {case['part']}, {case['case']}: {case['why']}" for case in cases if case["why"]]
    return ["## What could not be captured", "", *told, ""] if told else []


def _unmeasured(results: JSON) -> list[str]:
    kernels = kernel_rows(results["compiled"])
    fits = max((kernel["shared"] for kernel in results["compiled"]), default=0) <= SHARED
    verdict = "all fit" if fits else "do NOT fit"
    lines = [
        "**NOTHING on this page was measured on a GPU: the machine that wrote it has none.** What follows is known",
        "without one: what each case must move and multiply at least, and that the kernels compile for it.",
        "",
        COUNTED,
        "",
        f"Compiled ahead of time for sm_90 (H100, H200) and sm_100 (B200): {len(kernels)} kernels, which {verdict} in",
        f"the {SHARED} bytes of shared memory that a block may have. One case or a few stand for each kernel; given",
        "is the most bytes that one of them takes.",
        "",
        *markdown("Kernels", COMPILED_HEADS, kernels),
    ]
    for part in dict.fromkeys(case["part"] for case in results["cases"]):
        rows = [floor_row(case) for case in results["cases"] if case["part"] == part]
        lines += markdown(f"{part}: floors", FLOOR_HEADS, rows)
    if results["layers"]:
        heads = ("layer", "context", "tokens", "MB", "GFLOP", *(f"floor on {name}, us" for name in counts.DEVICES))
        rows = [
            (*layer_row(layer, None)[:5], *(f"{floor:.4g}" for floor in layer["floors"].values()))
            for layer in results["layers"]
        ]
        lines += [
            *markdown("Whole layers: floors", heads, rows),
            "FP8 weights, FP4 experts (of V4-Pro 48, one of eight ranks), FP8 entries, FP4 index keys; the parts",
            "of a layer one after the other, each at its own limit.",
            "",
        ]
    return lines


def floor_row(case: JSON) -> tuple[str, ...]:
    """Cells of a case that was not measured."""
    cost = counts.Cost(case["bytes"], case["flops"])
    floors = (f"{cost.floor_us(roof):.3g}" for roof in counts.DEVICES.values())
    return (case["case"], f"{cost.bytes / 1e6:.4g}", f"{cost.flops / 1e9:.3g}", *floors, case["target"] or "-")


def kernel_rows(compiled: Sequence[JSON]) -> list[tuple[str, ...]]:
    """A row for each kernel, with the most that one of its cases takes on each target."""
    names = dict.fromkeys((found["part"], found["kernel"]) for found in compiled)

    def most(part: str, kernel: str, capability: int) -> str:
        of = [f["shared"] for f in compiled if (f["part"], f["kernel"], f["capability"]) == (part, kernel, capability)]
        return str(max(of)) if of else "NOT compiled"

    return [(f"{part}: `{kernel}`", most(part, kernel, 90), most(part, kernel, 100)) for part, kernel in names]
