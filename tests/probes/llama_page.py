"""`python -m tests.probes.llama_page`: judge llama.cpp's CPU backend on GGUF files and write audits/llama-cpp.md.

Files of the demo checkpoint are run by llama.cpp in an environment of its own (`--python`), as they are and with faults
in what it loads; scripts/exporters/record_llama_cpp.py records each run. `compare` is given the healthy file and no
other flag.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType as Type

from fathom.model.config import ModelConfig
from fathom.probes.finding import JSON, Table, Text, finite, number
from fathom.probes.report import Page, write
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.runtime.report import commit
from fathom.scripts import compare
from tests import gguf_files as files

ROOT = Path(__file__).resolve().parents[2]
RECORDER = ROOT / "scripts" / "exporters" / "record_llama_cpp.py"
PACKAGE = "llama_cpp_python"
VERSION = "0.3.36"
TOKENS = 280  # two HCA windows; more CSA entries than are selected
CONFIG = ModelConfig.from_file(DEMO / "config.json")


def _plain(kind: Type) -> Callable[[str], Type]:
    """Types of a file without integers to multiply: matrices in one type, the rest in fp32."""
    return lambda name: kind if files.llama_cpp(name) not in (Type.I32, Type.F32) else files.llama_cpp(name)


KINDS = {
    "as converted: MXFP4, Q8_0, BF16": files.llama_cpp,
    "Q4_0, Q8_0, F16": files.ds4,
    "BF16": _plain(Type.BF16),
    "F32": _plain(Type.F32),
}
Weights = dict[str, Any]


class Case(NamedTuple):
    """A run; of a fault what is changed of the file that llama.cpp loads, and where it must be seen."""

    name: str
    kind: str
    flags: tuple[str, ...] = ()
    change: Callable[[Weights, dict[str, Any]], object] | None = None
    layer: int = -1
    site: str = ""
    named: str = ""


def _sinks(weights: Weights, _keys: object) -> None:
    weights["layers.1.attn.attn_sink"] = np.full_like(weights["layers.1.attn.attn_sink"], -1e30)


def _rolled(weights: Weights, _keys: object) -> None:
    name = "layers.1.attn.compressor.ape"
    weights[name] = np.roll(weights[name], 1, 0)


def _unbiased(weights: Weights, _keys: object) -> None:
    weights["layers.2.ffn.gate.bias"] = np.zeros_like(weights["layers.2.ffn.gate.bias"])


def _says(**values: object) -> Callable[[Weights, dict[str, Any]], object]:
    return lambda _weights, keys: keys.update({key.replace("__", "."): value for key, value in values.items()})


CONVERTED, QUARTER, BF16, F32 = KINDS
CASES = (
    Case("as it is", CONVERTED),
    Case("passes of 100 tokens, then 18 decoded", CONVERTED, ("--ubatch", "100", "--decode-from", "262")),
    Case("attention not fused", CONVERTED, ("--flash", "off")),
    Case("as it is", QUARTER),
    Case("as it is", BF16),
    Case("as it is", F32),
    Case("caches in fp32, attention not fused", F32, ("--cache", "f32", "--flash", "off")),
    Case("sinks of layer 1 at -1e30", CONVERTED, (), _sinks, 1, "attention.mixed", "sink-dropped"),
    Case("ape of layer 1's compressor rolled", CONVERTED, (), _rolled, 1, "attention.entry_unnormed",
         "position-bias-shifted"),
    Case("router's bias of layer 2 zero", CONVERTED, (), _unbiased, 2, "experts.ids", "selection-bias-dropped"),
    Case("expert_weights_scale 1", CONVERTED, (), _says(expert_weights_scale=1.0), 0, "experts.output",
         "route-scale-dropped"),
    Case("sliding_window 15", CONVERTED, (), _says(attention__sliding_window=15), 0, "attention.mixed",
         "window-one-short"),
    Case("rope.scaling.type none", CONVERTED, (), _says(rope__scaling__type="none"), 1, "attention.query",
         "yarn-dropped"),
)  # fmt: skip
HEALTHY, FAULTS = "Healthy runs", "Faults in the file that llama.cpp loads"
HEAD = """\
llama.cpp runs GGUF files of the demo checkpoint on a CPU; an exporter takes its nodes by `cb_eval`. The oracle has the
weights of the same file, in float64. No flag tells `compare` how the run rounds: it finds from the recording that
caches are in F16, and that inputs of products are rounded as the types of the weights ask, to 8-bit integers by 32
columns for Q8_0 and MXFP4."""
MODELLED = """\
`compare` first called each of these a difference, since no rounding that it knew explained them; they are llama.cpp's
numerics, not another model.

- KV, entries and index keys are in F16 in the caches, index keys after a Hadamard transform (`kv=f16`, `index=f16`).
  Where heads are as wide as index keys, as here and not in V4, llama.cpp's test for this transform is true of KV and
  entries too. Attention, where it is not fused or decodes, has queries, shares and sums in F16: they are moved so far.
- Inputs of every product with a weight are rounded as its type asks on a CPU (`linears=ggml`): the compressor's and
  `wo_a`'s too, which no other numerics round. Experts' weights multiply after the last product, not before it.
- ggml multiplies one frequency of RoPE after the other by a factor, in fp32, so that they are off by up to sixteen
  units of 2^-24, and more the higher the pair: bounds of rotated numbers let them be off by as many roundings."""
NOT_CLAIMED = """\
One version, on one kind of CPU, with files that the tests write and not the published weights: no file of llama.cpp's
own conversion was loaded. K-quants, quantised caches, GPUs, images and draft heads were not run, nor KV in F16 without
the transform, as heads of V4's width have it. KV and entries are recorded as llama.cpp computes them: what its caches
hold was not read, and is judged by what attention makes of it. The clamp of experts may not be reached: see what was
not exercised."""


def judged(case: Case, folder: Path, python: str, stacks: Mapping[str, Any]) -> dict[str, JSON]:
    """Write the file of a case, have llama.cpp run it, and say what `compare` says of it."""
    good, loaded, ids = folder / "good.gguf", folder / "loaded.gguf", folder / "ids.json"
    recording, out = folder / "run.safetensors", folder / "report.json"
    weights, keys = dict(stacks), files.keys(CONFIG)
    files.write(good, weights, keys, KINDS[case.kind])
    if case.change is not None:
        case.change(weights, keys)
    files.write(loaded, weights, keys, KINDS[case.kind])
    ids.write_text(json.dumps(Subject().tokens(TOKENS)))
    words = [python, str(RECORDER), "--model", str(loaded), "--tokens", str(ids), "--out", str(recording), *case.flags]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    compare.main(["--recording", str(recording), "--gguf", str(good), "--json", str(out)])
    said = json.loads(out.read_text(encoding="utf-8"))
    first = said["first"] and {key: said["first"][key] for key in ("layer", "site", "position", "index")}
    at_first = [
        one for one in said["faults"] if first and (one["layer"], one["site"]) == (first["layer"], first["site"])
    ]
    best = at_first[0] if at_first and at_first[0]["explains"] else None
    worst = max((site["worst"] / site["bound"] for site in said["sites"] if site["bound"]), default=0.0)
    found = {
        "name": case.name,
        "file": case.kind,
        "flags": " ".join(case.flags),
        "recorder": [line for line in ran.stdout.splitlines() if line],
        "numerics": said["numerics"],
        "dtype": said["dtype"],
        "tokens": said["tokens"],
        "counts": said["counts"],
        "differ": sorted({site["layer"] for site in said["sites"] if site["status"] == "differs"}),
        "first": first,
        "named": best and {"fault": best["name"], "share": best["share"]},
        "worst": worst if case.change is None else None,
        "not_exercised": said["not_exercised"],
    }
    right = found["counts"]["differs"] == 0 if case.change is None else (
        first is not None
        and (first["layer"], first["site"]) == (case.layer, case.site)
        and best is not None
        and best["name"] == case.named
    )  # fmt: skip
    return finite({**found, "faulty": case.change is not None, "right": right})


def page(runs: Sequence[Mapping[str, Any]], facts: Mapping[str, JSON]) -> Page:
    """Return the page of such runs."""
    healthy = [run for run in runs if not run["faulty"]]
    faulty = [run for run in runs if run["faulty"]]
    verdict = (
        f"llama.cpp, in llama-cpp-python {facts['version']}, on a CPU: {sum(run['right'] for run in healthy)} of"
        f" {len(healthy)} healthy recordings agree at every site, and {sum(run['right'] for run in faulty)} of"
        f" {len(faulty)} faults put into the file that it loads are placed and named"
    )
    rows = [
        [run["file"], run["name"], sum(run["counts"].values()), run["counts"]["agrees"], run["numerics"], run["worst"]]
        for run in healthy
    ]
    columns = ("file", "run", "sites", "agree", "numerics found", "largest share of a bound")
    put = [
        [run["name"], run["counts"]["agrees"], run["counts"]["differs"], ", ".join(map(str, run["differ"])),
         f"{run['first']['site']}, layer {run['first']['layer']}" if run["first"] else "none",
         run["named"]["fault"] if run["named"] else "none",
         f"{number(100 * run['named']['share'])}%" if run["named"] else "0%"]
        for run in faulty
    ]  # fmt: skip
    seen = ("fault", "agree", "differ", "in layers", "first difference", "named", "explains")
    unseen = "\n".join(f"- {one['what']}: {one['needs']}" for one in healthy[0]["not_exercised"])
    recorder = "\n".join(line for line in healthy[0]["recorder"])
    parts = [
        Text("", HEAD),
        Table(HEALTHY, columns, rows, "A site differs from the oracle where its share is above 1."),
        Table(FAULTS, seen, put, "Judged by the file without the fault."),
        Text("What had to be modelled", MODELLED),
        Text("What the recorder said", f"Of the first run:\n\n```\n{recorder}\n```"),
        Text("What these rows could not have shown", f"By `compare`, of the first run:\n\n{unseen}"),
        Text("What this does not claim", NOT_CLAIMED),
    ]
    tables = [finite({"kind": "Table", "title": part.title, "columns": part.columns, "rows": part.rows})
              for part in parts if isinstance(part, Table)]  # fmt: skip
    title = "llama.cpp on a CPU against the float64 oracle, by the weights of its GGUF file"
    return Page("llama-cpp", title, verdict, "", parts, facts, {**facts, "runs": list(runs), "parts": tables})


def versions(python: str) -> str:
    """The package's version in an environment."""
    program = f"import importlib.metadata as m; print(m.version('{PACKAGE}'))"
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m tests.probes.llama_page", description=__doc__)
    p.add_argument("--python", required=True, help="the Python of an environment with llama-cpp-python")
    p.add_argument("--out", type=Path, default=ROOT / "audits", help="folder for the page (default audits)")
    args = p.parse_args()
    made_at, stacks = str(commit()), files.stacks(DEMO, CONFIG)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            runs.append(judged(case, Path(folder), args.python, stacks))
            print(case.name, case.kind, runs[-1]["counts"], runs[-1]["first"], runs[-1]["named"], runs[-1]["right"])
    facts = {
        "command": "python -m tests.probes.llama_page --python python",
        "version": versions(args.python),
        "oracle": "probes/judge/oracle.py, one layer in float64",
        "checkpoint": DEMO.name,
        "weights": Subject().load().weights_fingerprint,
        "prompt": f"{TOKENS} tokens, {Subject().reads}",
        "device": "cpu, one thread of llama.cpp",
        "commit": made_at,
    }
    write(page(runs, facts), args.out)


if __name__ == "__main__":
    main()
