"""`gpu`: makes audits/gpu.md: every kernel and whole layers at real dimensions on the GPU of this machine.

For each Triton kernel of `kernels`: whether it is right, how long it takes from memory rather than from L2, and what
share that is of what the device allows. Without a GPU the page says that nothing was measured, and gives what is known
without one: what each case must move and multiply at least, and what kernels take when they are only compiled.
"""

import argparse
import importlib
import importlib.util
import sys
from statistics import median
from typing import Any

import torch

from model.errors import ConfigError
from runtime.output import write_json, write_text
from scripts.bench.command import GPU_PARTS
from scripts.bench.record import Record, rendered
from scripts.console import Console

LAYERS = "layers"
# As `scripts.bench.device.parts` has them, which Triton must be there to read
PAGE = "gpu.md"


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench and write its page; returns the exit status, 1 where a result is wrong."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError("triton is not installed, and these kernels are written in it: it has builds for Linux alone")
    args.out.mkdir(parents=True, exist_ok=True)
    parts = args.only or GPU_PARTS
    if torch.cuda.is_available():
        results = measure(parts, args.replays, record, console)
    else:
        print("no CUDA device: nothing is measured, kernels are compiled", file=sys.stderr)
        results = foresee(parts)
    record.write(results)
    document = record.document(results)
    if results["device"]:
        write_json(args.out / "gpu.json", document)
    page = importlib.import_module("scripts.bench.device.report").text(document)
    write_text(args.out / PAGE, page)
    print(f"wrote {args.out / PAGE}", file=sys.stderr)
    return int(any(case.get("error", 0.0) > 1 for case in results["cases"]))


def foresee(parts: Any) -> dict[str, Any]:
    """What is known without a device."""
    modules = _modules()
    layers, shapes = modules["layers"], modules["shapes"]
    rows = [row for shape in shapes.MODELS for row in layers.rows_without_times(shape)] if LAYERS in parts else []
    return {
        "device": None,
        "cases": [_told(case) for case in modules["parts"].cases(parts)],
        "layers": [row._asdict() for row in rows],
        "compiled": importlib.import_module("scripts.bench.ahead").compiled([p for p in parts if p != LAYERS]),
    }


def measure(parts: Any, replays: int, record: Record, console: Console) -> dict[str, Any]:
    """Measure every case on the device, then whole layers; what there is so far is written as it comes."""
    modules = _modules()
    clock, report, counts = (modules[name] for name in ("measure", "report", "counts"))
    name = torch.cuda.get_device_name()
    gpu, roof = clock.Gpu(), counts.roof(name)
    results: dict[str, Any] = {"device": name, "cases": [], "layers": [], "compiled": []}
    for case in modules["parts"].cases(parts):
        found = clock.measured(case, gpu, replays)
        asked = case.target is not None and "H200" in name and roof is not None
        reached = case.target.reached(case.cost, median(found.us), roof) if asked else None
        results["cases"].append({**_told(case), **found._asdict(), "reached": reached})
        console.print(rendered(case.part, report.HEADS, [report.measured_row(results["cases"][-1], roof)]))
        record.write(results, complete=False)
        torch.cuda.empty_cache()
    if LAYERS in parts:
        layers, fused = modules["layers"], importlib.import_module("kernels.triton_ops").TRITON
        for shape in modules["shapes"].MODELS:
            for row in layers.measured_layers(shape, gpu, fused, replays, layers.CONTEXTS, layers.CHUNK):
                results["layers"].append(row._asdict())
                shown = report.layer_row(results["layers"][-1], name)
                console.print(rendered(LAYERS, report.LAYER_HEADS, [shown]))
                record.write(results, complete=False)
            torch.cuda.empty_cache()
    return results


def _modules() -> dict[str, Any]:
    """The package `scripts.bench.device`, whose cases need Triton to be there."""
    names = ("parts", "layers", "measure", "report", "counts", "shapes")
    return {name: importlib.import_module(f"scripts.bench.device.{name}") for name in names}


def _told(case: Any) -> dict[str, Any]:
    """A case as JSON, without what was found."""
    return {
        "part": case.part, "case": case.label, "bytes": case.cost.bytes, "flops": case.cost.flops,
        "tolerance": case.tolerance, "against": case.against, "target": case.target and str(case.target),
    }  # fmt: skip
