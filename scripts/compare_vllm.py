"""`python -m scripts.compare_vllm`: record vLLM's CPU engine, judge it by `compare`, and write audits/vllm.md.

The engine runs as it is, with a `swiglu_limit` that matters, and with faults put into its modules, on random weights of
a small model. It runs in an environment of its own: `--python` names the one that has vllm. Exit status 1 when a
healthy run differs, or a fault is not seen where it was put.
"""

import argparse
import contextlib
import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fathom.model.checkpoint.config_json import read_json
from fathom.model.errors import ConfigError
from fathom.probes.finding import JSON, Part, Table, Text, finite, ranges
from fathom.runtime.output import write_json
from fathom.scripts import compare, make_checkpoint
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import positive
from fathom.scripts.paths import AUDITS, CHECKOUT, ROOT, Pages

if TYPE_CHECKING:
    from fathom.probes.report import Page

EXPORTERS: Final = ROOT / "scripts" / "exporters"
RECORDER: Final = EXPORTERS / "record_vllm_cpu.py"
FAULTY: Final = EXPORTERS / "faults_vllm_cpu.py"
PUBLISHED: Final = ROOT / "model" / "published" / "DeepSeek-V4-Flash.json"
PACKAGES: Final = ("vllm-cpu", "torch", "transformers", "triton", "safetensors")
LIMIT: Final = 0.25  # a swiglu_limit that values of random weights reach
CLAMP: Final = "routed-clamp-dropped"
HEALTHY: Final = "Healthy runs"  # titles of tables
LOST: Final = "The clamp of routed experts is lost"
FAULTS: Final = "Faults put in"
RAISED: Final = "What the engine raises without"
NOTHING: Final = "nothing"  # is raised
SMALL: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 8,
    "q_lora_rank": 256,
    "o_groups": 2,
    "o_lora_rank": 256,
    "n_routed_experts": 64,
    "moe_intermediate_size": 256,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
}
TITLE: Final = "vLLM's CPU engine against the float64 oracle: what agrees, and what is wrong in it"
WHAT: Final = """\
The engine of vLLM (scheduler, paged FP8 caches, compiled kernels, weights as stored) runs a small V4 with random
weights; `scripts/exporters/record_vllm_cpu.py` records it, and `scripts.compare` is told nothing of how it rounds."""
NOT_CLAIMED: Final = """\
- One engine on one kind of processor, one set of random weights and one prompt for each length, read in one call and
  not decoded. What vLLM computes on a GPU was not run.
- The published `swiglu_limit` is not reached by random weights: a healthy run with it says nothing of the clamp, and
  `compare` says so (not exercised).
- A fault is changed data or a changed attribute in the engine's own modules; faults inside its compiled kernels were
  not made, and the lost clamp is the only one that was found there."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run of the engine, and where a fault of it must be seen."""

    kind: str
    name: str
    tokens: int
    config: tuple[tuple[str, Any], ...] = ()
    fault: str | None = None
    layer: int | None = None
    site: str = ""
    named: str | None = None  # what `compare` should call it; None: it is not in the library


FP8: Final = (("expert_dtype", "fp8"),)
LOW: Final = (("swiglu_limit", LIMIT),)
CASES: Final = (
    Case("healthy", "FP4 experts", 400),
    Case("healthy", "FP8 experts", 400, FP8),
    Case("long", "FP4 experts, the indexer selects", 2700),
    Case("clamp", "FP4 experts", 200, LOW, None, 0, "experts.output", CLAMP),
    Case("clamp", "FP8 experts", 200, LOW + FP8, None, 0, "experts.output", CLAMP),
    *(
        Case("faults", name, 400, (), fault, layer, site, named)
        for name, fault, layer, site, named in (
            ("sinks of layer 1 stay at -inf", "sinks-ignored", 1, "attention.mixed", "sink-dropped"),
            ("ape of layer 1's compressor rolled by one", "ape-shifted", 1, "attention.entry", "position-bias-shifted"),
            (
                "ape of layer 3's indexer rolled by one",
                "index-ape-shifted",
                3,
                "indexer.key_used",
                "position-bias-shifted",
            ),
            ("router's bias of layer 2 zero", "bias-ignored", 2, "experts.ids", "selection-bias-dropped"),
            ("no routed scaling in layer 2", "scale-dropped", 2, "experts.weights", "route-scale-dropped"),
            ("window of 127 in layer 0", "window-short", 0, "attention.mixed", "window-one-short"),
            (
                "no inverse rotation in any layer",
                "inverse-rotation-skipped",
                0,
                "attention.unrotated",
                "no-inverse-rotation",
            ),
            ("hash router of layer 0 given positions", "hash-by-position", 0, "experts.ids", None),
        )
    ),
)
WITHOUT: Final = ("layer-types", "triton")  # what the recorder mends on every machine
Cells = list[float | str | None]

PAGE: Final = AUDITS / "vllm.md"
ROWS: Final = 64
KINDS: Final = ("healthy", "long", "clamp", "faults", "without")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.compare_vllm", description=__doc__)
    p.add_argument("--python", required=True, help="the Python of an environment with vllm-cpu")
    p.add_argument("--out", action=Pages, default=PAGE, help="page to write, F.md; its JSON goes beside it")
    p.add_argument("--rows", type=positive, default=ROWS, help=f"rows of a site that are judged (default {ROWS})")
    p.add_argument("--only", type=_kinds, default=KINDS, help=f"of {', '.join(KINDS)}, between commas (default all)")
    return p


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(KINDS)}")
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    return run(arguments(parser(), argv))


# V4-Flash with fewer and narrower layers, one of each kind and a second CSA layer; widths that vLLM's kernels accept.


class Done(NamedTuple):
    """A case and what became of it."""

    case: Case
    report: dict[str, Any]  # compare's --json
    told: list[str]  # and what it printed, but for its head and tables
    recorder: list[str]  # what the recorder printed
    record_seconds: float
    compare_seconds: float

    def sites(self, status: str) -> list[dict[str, Any]]:
        """Sites with a status."""
        return [site for site in self.report["sites"] if site["status"] == status]

    @property
    def worst(self) -> float:
        """Largest distance over bound of what agrees."""
        return float(max(site["worst"] / site["bound"] for site in self.sites("agrees") if site["bound"]))

    @property
    def first(self) -> tuple[int | None, str] | None:
        """Layer and site of the first difference."""
        first = self.report["first"]
        return None if first is None else (first["layer"], first["site"])

    @property
    def named(self) -> tuple[str | None, float]:
        """What explains the first difference, and its share; None and 0 where nothing does."""
        faults = [one for one in self.report["faults"] if (one["layer"], one["site"]) == self.first and one["explains"]]
        return (faults[0]["name"], faults[0]["share"]) if faults else (None, 0.0)

    @property
    def placed(self) -> bool:
        """Whether the first difference is where the fault was put."""
        return self.first == (self.case.layer, self.case.site)

    @property
    def right(self) -> bool:
        """Whether a healthy run agrees, and a fault is seen where it is, by its name if it has one."""
        if not self.case.site:
            return bool(self.report["verdict"] == "agrees")
        return self.placed and self.named[0] == self.case.named

    def to_json(self) -> dict[str, JSON]:
        """JSON values."""
        keys = ("verdict", "numerics", "rounding_rests_on", "counts", "first", "faults", "not_exercised")
        report = {key: self.report[key] for key in keys}
        case = asdict(self.case)
        seconds = {"record_seconds": self.record_seconds, "compare_seconds": self.compare_seconds}
        said = {"recorder": self.recorder, "compare": self.told}
        return {**case, **report, **said, **seconds, "worst": self.worst, "right": self.right}


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    from fathom.probes.report import write
    from fathom.runtime.report import commit
    from fathom.scripts.bench.record import machine, versions

    if not CHECKOUT:
        raise ConfigError(f"{RECORDER}: only a checkout has it, not what is installed")
    made_at = str(commit())
    installed = _versions(args.python)
    console, started = Console(stderr=True), time.perf_counter()
    cases = [case for case in CASES if case.kind in args.only]
    done, raised = list[Done](), dict[str, str]()
    with tempfile.TemporaryDirectory() as work:
        for case in cases:
            console.say(f"{time.perf_counter() - started:.0f} s: {case.kind}, {case.name}")
            done.append(_done(args, case, Path(work)))
        for what in WITHOUT if "without" in args.only else ():
            raised[what] = _raised(args.python, what, Path(work))
    facts: dict[str, JSON] = {
        "commit": made_at,
        "command": args.command_line,
        "vllm's environment": installed,
        "compare's": versions(),
        "machine": machine(),
        "seconds": round(time.perf_counter() - started),
    }
    page = _page(args.out.stem, done, raised, facts)
    write(page, args.out.parent)
    print(f"wrote {args.out}: {page.verdict}", file=sys.stderr)
    return 0 if all(one.right for one in done) else 1


# --- one case


def _versions(python: str) -> dict[str, str]:
    """Versions of an environment's packages; ConfigError where it has no vllm-cpu."""
    program = f"import json, importlib.metadata as m; print(json.dumps({{p: m.version(p) for p in {PACKAGES}}}))"
    try:
        ran = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)  # noqa: S603
    except OSError as error:
        raise ConfigError(f"--python {python}: {error.strerror}") from error
    if ran.returncode:
        raise ConfigError(f"--python {python}: {ran.stderr.strip().splitlines()[-1]}")
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def _checkpoint(case: Case, work: Path) -> Path:
    """The checkpoint of a case, made once."""
    name = "-".join(["model", *(f"{key}-{value}" for key, value in case.config)])
    folder = work / name
    if not folder.exists():
        config = work / f"{name}.json"
        write_json(config, dict(read_json(PUBLISHED)) | dict(SMALL) | dict(case.config))
        with contextlib.redirect_stderr(io.StringIO()):
            make_checkpoint.main(
                ["--config", str(config), "--layers", str(SMALL["num_hidden_layers"]), "--out", str(folder)]
            )
    return folder


def _tokens(count: int, work: Path) -> Path:
    """A prompt of drawn ids, after BOS."""
    draw = random.Random(count)  # noqa: S311 -- a prompt, not a secret
    path = work / f"{count}.json"
    write_json(path, [0, *(draw.randrange(2, SMALL["vocab_size"]) for _ in range(count - 1))])
    return path


def _recorded(python: str, program: Path, *flags: str | Path) -> subprocess.CompletedProcess[str]:
    words = [python, str(program), *map(str, flags)]
    return subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603


def _done(args: argparse.Namespace, case: Case, work: Path) -> Done:
    model, ids, out = _checkpoint(case, work), _tokens(case.tokens, work), work / "run.safetensors"
    program, more = (RECORDER, ()) if case.fault is None else (FAULTY, ("--fault", case.fault))
    started = time.perf_counter()
    ran = _recorded(args.python, program, "--model", model, "--tokens", ids, "--out", out, *more)
    if ran.returncode:
        raise ConfigError(f"{program.name}: {ran.stderr.strip().splitlines()[-1]}")
    recorded = time.perf_counter()
    report, printed = work / "report.json", io.StringIO()
    flags = ["--model", str(model), "--recording", str(out), "--rows", str(args.rows), "--json", str(report)]
    with contextlib.redirect_stdout(printed):
        compare.main(flags)
    compared = time.perf_counter()
    told = _sentences(printed.getvalue(), out)
    out.unlink()
    recorder = [line for line in ran.stdout.splitlines() if line.startswith(("recorded", "hooked"))]
    return Done(case, json.loads(report.read_text()), told, recorder, recorded - started, compared - recorded)


def _sentences(printed: str, recording: Path) -> list[str]:
    """What `compare` printed, without its first line, which has the recording's path and the seconds, and tables."""
    besides = (f"{recording}: ", "worst:")
    return [line for line in printed.splitlines() if line[:1].isalpha() and not line.startswith(besides)]


def _raised(python: str, what: str, work: Path) -> str:
    """The error with which the engine ends where one thing is not mended; "" where it does not end so."""
    case = Case("without", what, 100)
    flags = ("--model", _checkpoint(case, work), "--tokens", _tokens(case.tokens, work), "--out", work / "none")
    ran = _recorded(python, FAULTY, "--without", what, *flags)
    last = ran.stderr.strip().splitlines()[-1:] if ran.returncode else []
    return last[0].removeprefix("[rank0]: ") if last else ""


# --- the page


def _page(name: str, done: Sequence[Done], raised: Mapping[str, str], facts: Mapping[str, JSON]) -> "Page":
    from fathom.probes.report import Page

    of = {kind: [one for one in done if one.case.kind == kind] for kind in KINDS}
    healthy = [*of["healthy"], *of["long"]]
    clamp, faults = of["clamp"], of["faults"]
    told = []
    if healthy:
        told.append(f"{sum(one.right for one in healthy)} of {len(healthy)} healthy recordings agree at every site")
    if clamp:
        lost = sum(one.named[0] == CLAMP for one in clamp)
        told.append(f"routed experts without `swiglu_limit` are found in {lost} of {len(clamp)} runs that reach it")
    if faults:
        known = [one for one in faults if one.case.named]
        told.append(
            f"{sum(one.placed for one in faults)} of {len(faults)} faults put into the engine are seen first where they"
            f" were put, and {sum(one.right for one in known)} of {len(known)} that are in the library are named"
        )
    parts: list[Part] = []
    if healthy:
        parts += [_healthy(healthy), _what_compare_said(healthy[0])]
    if clamp:
        parts += [_faults(LOST, clamp), _what_compare_said(clamp[0])]
    if faults:
        parts.append(_faults(FAULTS, faults))
    if raised:
        parts.append(_without(raised))
    parts.append(Text("What this does not claim", NOT_CLAIMED))
    data = {
        **facts,
        "cases": [finite(one.to_json()) for one in done],
        "parts": [finite({"kind": type(part).__name__, **asdict(part)}) for part in parts],
    }
    return Page(name, TITLE, "; ".join(told) or "No recording was judged", WHAT, parts, facts, data)


def _healthy(done: Sequence[Done]) -> Table:
    rows: list[Cells] = []
    for one in done:
        counts = [len(one.report["sites"]), len(one.sites("agrees")), len(one.sites("not judged"))]
        seconds = [one.record_seconds, one.compare_seconds]
        most = max(site["rows"] for site in one.report["sites"])
        rows.append([one.case.name, one.case.tokens, most, *counts, one.report["numerics"], one.worst, *seconds])
    judged = ("sites", "agree", "not judged", "numerics found", "largest share of a bound")
    columns = ("run", "tokens", "rows of a site judged, at most", *judged)
    note = (
        "A site agrees where its judged rows do, which `--rows` bounds, and differs from the oracle where its share is"
        " above 1. Seconds are of a machine that other work shared."
    )
    return Table(HEALTHY, (*columns, "recording, s", "compare, s"), rows, note)


def _faults(title: str, done: Sequence[Done]) -> Table:
    rows: list[Cells] = []
    for one in done:
        differ = sorted({site["layer"] for site in one.sites("differs")})
        layer, site = one.first or (None, "none")
        name, share = one.named
        counts = [len(one.report["sites"]), len(one.sites("agrees"))]
        first = f"{site}, layer {layer}"
        rows.append([one.case.name, *counts, ranges(differ), first, name or "none", f"{share:.0%}"])
        rows[-1].append(one.compare_seconds)
    columns = ("run", "sites", "agree", "differ in layers", "first difference", "named", "explains")
    return Table(title, (*columns, "compare, s"), rows)


def _what_compare_said(one: Done) -> Text:
    """A paragraph of the section before it."""
    return Text("", "\n".join([f"Of {one.case.name} `compare` said:", "", "```", *one.told, "```"]))


def _without(raised: Mapping[str, str]) -> Table:
    rows = [[what, f"`{error}`" if error else NOTHING] for what, error in raised.items()]
    note = "Each is repaired by `NEEDED` in scripts/exporters/record_vllm_cpu.py, where it is said why."
    return Table(RAISED, ("what is left as it is", "raised"), rows, note)


if __name__ == "__main__":
    sys.exit(run_alone(main))
