"""`python -m tests.probes.v41_page --golden DIR`: judge DeepSeek-V4.1 and write audits/v41.md.

DIR has a random checkpoint in the published form and the tensors that DeepSeek's own code computes of it, in float64
(`golden_plain`) and as deployed (`golden_deployed`). Faults are put into runs of another random checkpoint, which
`tests.make_checkpoint` makes. Runs of ours are of DIR's checkpoint too.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.config import ModelConfig
from fathom.probes.catalogue import QUICK
from fathom.probes.finding import JSON, Table, Text, finite, number
from fathom.probes.judge.checks import Checks, Status
from fathom.probes.judge.dump import in_memory
from fathom.probes.judge.faults_v41 import FAULTS
from fathom.probes.judge.oracle import Ends, Noise, layer_of, sites_of
from fathom.probes.judge.recording import CHOICES, Recording
from fathom.probes.probe import run_probe, silent, unmet
from fathom.probes.report import Page, write
from fathom.probes.subject import Subject
from fathom.probes.verdict import first_difference, ids_alike, judge_layers, opened, weights_of
from fathom.probes.ways import record
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from fathom.runtime.report import commit
from fathom.scripts import make_checkpoint
from tests.model.test_v41_model import own_draft
from tests.probes.test_v41_faults import CALLS, FIRST, Made, adjusted, named
from tests.probes.test_v41_oracle import drafting, slots_of, taps_of

ROOT = Path(__file__).resolve().parents[2]
HEAD = """\
Nothing of V4.1's published weights was run, here or anywhere by this project. The oracle was written from DeepSeek's
inference code and is compared here with tensors of that code itself, on nine layers of every role: each site is
computed in float64 from the recorded ones before it. Their float64 is stored in float32, which is 3e-8 of a number; the
angles of a rotation are numbers of fp32 in both. The folder with these tensors is not in this repository: DeepSeek's
code has to be run for it, on a small checkpoint. The table of faults needs none of it, and tests run it
(`tests/probes/test_v41_faults.py`)."""
OF_OURS = """\
The runtime of this project on the same checkpoint and prompt, in one call, and in a call for each token: all its sites
judged by the oracle, and how far its logits are from theirs. End to end only `plain` can be compared: as deployed, the
small model chooses other experts after the first rounding that falls otherwise."""
OF_FAULTS = """\
A run is the oracle's equations one after the other, each result rounded to bf16; a faulty one has one equation
exchanged. So this shows which fault is told from which, and not that a runtime's fault looks so. `compare` was told the
numerics; of a fault of the experts alone, the layer after is looked at too where two faults do the same to one site."""
NOT_CLAIMED = """\
Random models of small widths, one prompt of 89 tokens, one draft. Of images and of the tables' real sizes nothing was
computed. No draft of a random head is ever accepted: what is shown of drafts is that they change nothing, and are those
that the equations give."""
OF_PROBES = """\
The probes that are built for V4.1, as `fathom probe all --quick` runs them, and `memory`, on the model that
`make_checkpoint --small-v41` writes. Those that are not built for it say so."""


def plain(golden: Path) -> list[list[float | str]]:
    """How far each kind of site is from theirs at most, over its length, in float64; and of how many layers."""
    config = ModelConfig.from_file(golden / "config.json")
    recording = Recording(in_memory(load_file(golden / "golden_plain.safetensors")), config)
    run = opened(recording, weights_of(golden, config), "fp32", "plain", alike=ids_alike(golden, config))
    still = replace(run.setting, noise=Noise(torch.float32, replicas=0))
    every, worst = torch.arange(len(recording.tokens)), dict[str, list[float]]()
    for layer in range(config.num_hidden_layers):
        part = layer_of(still, layer, every)
        for site in sites_of(config, layer):
            name = f"layers.{layer}.{site}"
            if name in recording.tensors:
                at = part.entries if site.startswith(("attention.entry", "indexer.key")) else every
                worst.setdefault(site, []).append(apart(part.computed(site, at)[0], recording.known(name, at), site))
    for site in ("embedded", "folded", "hidden", "logits"):
        ours = Ends(still).computed(site, every)[0]
        worst[site] = [apart(ours, recording.known(site, every), site)]
    head = drafting(config, "plain")
    found = load_file(golden / "golden_plain.safetensors")
    draft = head.draft(head.main_keys(taps_of(found, config)), slots_of(found, config))
    for site, ours in (("draft.logits", draft.logits[0]), ("draft.confidence", draft.confidence[0])):
        worst[site] = [apart(ours, found[site].double(), site)]
    return [[site, len(found), max(found)] for site, found in worst.items()]


def apart(ours: torch.Tensor, theirs: torch.Tensor, site: str) -> float:
    """Distance over length; of choices, the share of rows that are others."""
    if site in CHOICES:
        return float((ours.sort(-1).values != theirs.sort(-1).values).any(-1).double().mean())
    return float((ours - theirs).norm() / theirs.norm())


def deployed(golden: Path) -> dict[str, JSON]:
    """What is said of their deployed run."""
    config = ModelConfig.from_file(golden / "config.json")
    recording = Recording(in_memory(load_file(golden / "golden_deployed.safetensors")), config)
    run = opened(recording, weights_of(golden, config), alike=ids_alike(golden, config))
    results = judge_layers(Checks(run.setting, run.recording), None)
    bounded = [one.worst / one.bound for one in results if one.bound]
    agree = sum(one.status is Status.AGREES for one in results)
    return {
        "sites": len(results),
        "agree": agree,
        "numerics": run.setting.rounding.numerics,
        "worst": max(bounded),
        "tokens": len(recording.tokens),
    }


def ours(golden: Path) -> list[list[float | str]]:
    """Runs of this project: numerics, op set and calls; sites that agree, of how many, and how far logits are off."""
    config, rows = ModelConfig.from_file(golden / "config.json"), list[list[float | str]]()
    for numerics, dtype in (("deployed", "bf16"), ("plain", "fp32")):
        theirs = load_file(golden / f"golden_{numerics}.safetensors")
        tokens = theirs["tokens"].tolist()
        for ops in (REFERENCE, CPU):
            model = load(golden, RunOptions(numerics, dtype), ops, context=len(tokens)).model
            for calls in ([len(tokens)], [1] * len(tokens)):
                with tempfile.TemporaryDirectory() as work:
                    record(model, tokens, calls, out := Path(work) / "own.safetensors")
                    found = load_file(out)
                run = opened(
                    Recording(in_memory(found), config), weights_of(golden, config), dtype, numerics,
                    alike=ids_alike(golden, config),
                )  # fmt: skip
                results = judge_layers(Checks(run.setting, run.recording), None)
                agree = sum(one.status is Status.AGREES for one in results)
                far = apart(found["logits"], theirs["logits"].float(), "logits") if numerics == "plain" else ""
                how = "one call" if len(calls) == 1 else "token by token"
                rows.append([f"{numerics}, {dtype}", ops.name, how, agree, len(results), far])
                print(*rows[-1], flush=True)
    return rows


def drafted(golden: Path) -> list[list[float | str]]:
    """Drafts of this project's head in float32: op set, tokens that are theirs, of how many, logits and confidence."""
    theirs, rows = load_file(golden / "golden_plain.safetensors"), list[list[float | str]]()
    for ops in (REFERENCE, CPU):
        drafts, wanted = own_draft(golden, theirs, ops), theirs["draft.tokens"].tolist()[1:]
        same = sum(a == b for a, b in zip(drafts.tokens, wanted, strict=True))
        assert drafts.confidence is not None, "DSpark tells it"
        found = {"draft.logits": drafts.logits, "draft.confidence": drafts.confidence}
        far = [apart(x, theirs[name].float(), name) for name, x in found.items()]
        rows.append([ops.name, same, len(wanted), *far])
    return rows


def probed() -> list[list[float | str]]:
    """Each probe that is built for V4.1, and what it says of the small model."""
    rows: list[list[float | str]] = []
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "v41"
        assert make_checkpoint.main(["--small-v41", "--out", str(out)]) == 0
        subject = Subject(out)
        for probe in QUICK:
            if unmet(probe, subject) is None and not probe.between_ranks and not probe.in_variants:
                run = run_probe(probe, subject, silent)
                rows.append([probe.name, run.headline, run.report.summary])
                print(*rows[-1][:2], flush=True)
    return rows


def faults() -> list[list[float | str]]:
    """Each fault, where a run with it differs first, and what is named there."""
    rows: list[list[float | str]] = []
    with tempfile.TemporaryDirectory() as work:
        made = Made(Path(work), adjusted)
        for fault, (layer, site) in FIRST.items():
            last = "layers.4.indexer.key_used"  # which decode reads of the step before: of a healthy run here
            before = {last: made.healthy[last]} if fault == "index-key-slot" else {}
            tensors = made.recorded(FAULTS[fault].make(CALLS), before)
            run, results = made.judged(tensors, None if layer is None else sorted({0, 1, layer}))
            first = first_difference(results)
            assert first is not None, fault
            places = named(run, results)
            at = site if layer is None else f"layers.{layer}.{site}"
            best = places[at][0]
            rows.append([fault, FAULTS[fault].what, FAULTS[fault].seen, at, best.name, f"{number(100 * best.share)}%"])
            print(fault, best.name, best.share, flush=True)
    return rows


def page(golden: Path, command: str) -> Page:
    """The page."""
    sites, of_run, of_ours, of_faults = plain(golden), deployed(golden), ours(golden), faults()
    of_drafts, of_probes = drafted(golden), probed()
    passed = sum(str(row[1]).startswith("Pass") for row in of_probes)
    right = sum(row[0] == row[4] for row in of_faults)
    told = json.loads((golden / "meta.json").read_text(encoding="utf-8"))["official"]
    drafts = [row for row in sites if str(row[0]).startswith("draft.")]
    furthest = max(row[2] for row in sites if row not in drafts)
    whole = sum(row[3] == row[4] for row in of_ours)
    verdict = (
        f"{of_run['agree']} of {of_run['sites']} sites of DeepSeek's own deployed run agree, and its rounding is found"
        f" ({of_run['numerics']}). In float64 no site is further from theirs than {furthest:.1g} of its length, and a"
        f" draft through three stages {max(row[2] for row in drafts):.1g}. All sites agree in {whole} of {len(of_ours)}"
        f" runs of this project, and {passed} of {len(of_probes)} probes pass. {right} of {len(of_faults)} faults are"
        " named first where they were put"
    )
    parts = [
        Text("", HEAD),
        Table("In float64, each site from the recorded ones before it", ("site", "of layers", "apart"), sites),
        Text("", OF_OURS),
        Table(
            "Runs of this project",
            ("numerics", "ops", "calls", "sites that agree", "of", "logits, plain, apart from theirs"),
            of_ours,
        ),
        Table(
            "Drafts of this project's head in float32",
            ("ops", "tokens that are theirs", "of", "logits, apart from theirs", "confidence, apart from theirs"),
            of_drafts,
        ),
        Text("", OF_PROBES),
        Table("Probes of the small model", ("probe", "verdict", "in short"), of_probes),
        Text("", OF_FAULTS),
        Table(
            "Faults put in, and what is named",
            ("put in", "what it is", "met", "judged at", "named first", "explains"),
            of_faults,
        ),
        Text("What this does not claim", NOT_CLAIMED),
    ]
    facts = {
        "command": command,
        "theirs": f"{told['repository']} at {told['revision'][:12]}, inference/model.py, on a CPU",
        "oracle": "probes/judge/oracle_v41.py, one layer in float64",
        "prompt": f"{of_run['tokens']} tokens in one call",
        "device": f"cpu, one thread, torch {torch.__version__}",
        "commit": str(commit()),
    }
    tables = [finite({"kind": "Table", **_as_json(part)}) for part in parts if isinstance(part, Table)]
    data = {**facts, "deployed": of_run, "parts": tables}
    return Page("v41", "DeepSeek-V4.1: DeepSeek's own tensors against the oracle, and faults of runtimes", verdict, "",
                parts, facts, data)  # fmt: skip


def _as_json(table: Table) -> dict[str, JSON]:
    return {"title": table.title, "columns": table.columns, "rows": table.rows}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m tests.probes.v41_page", description=__doc__)
    p.add_argument("--golden", type=Path, required=True, help="folder of the checkpoint and of DeepSeek's tensors")
    p.add_argument("--out", type=Path, default=ROOT / "audits", help="folder of the page (default audits)")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    write(page(args.golden, "python -m tests.probes.v41_page --golden DIR"), args.out)


if __name__ == "__main__":
    main()
