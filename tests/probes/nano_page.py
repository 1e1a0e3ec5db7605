"""`python -m tests.probes.nano_page`: judge the package nano-deepseek-v4 and write audits/nano.md.

It is run by a Python that has the package beside what this project needs. The demo checkpoint is run as the package
computes it, then with its equations replaced by the published ones, one after the other; each run is recorded and given
to `compare` without a flag.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fathom.probes.finding import JSON, Table, Text, finite, number
from fathom.probes.report import Page, write
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.runtime.report import commit
from fathom.scripts import compare

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "nano-deepseek-v4"
TOKENS = 280  # two HCA windows; more CSA entries than are selected
DIFFERS = "What differs, and what explains it"
MENDED = "One equation after the other replaced"
HEAD = """\
Nothing was put into this runtime: the faults are those that it was published with, and all of them act at once. Each
layer is judged from its recorded input, so that none hides behind another. Sites are recorded by forward hooks on the
package's own modules, and around three methods whose results no module returns; index queries are rotated for the
recording by the package's own functions ([`tests/probes/nano_deepseek.py`](../tests/probes/nano_deepseek.py)). No flag
tells `compare` the numerics, the dtype or what to look for."""
NOT_CLAIMED = """\
One version, in fp32, with one prompt in one call: its cache, its training and its drafting module were not looked at. A
later version may compute otherwise. `sinkhorn-of-sigmoids` and `query-theta` stand in the library because they were
found here, in a run that `compare` could place and not name; the other three were in it before."""


def runs(folder: Path) -> list[dict[str, JSON]]:
    """What `compare` says of the package as it is, and with one more equation replaced each time, the last with all.

    Recordings and what `compare` writes are put into `folder`.
    """
    from tests.probes import nano_deepseek as nano  # noqa: PLC0415 -- a page is checked without the package

    tokens, found = torch.tensor(Subject().tokens(TOKENS)), []
    for count in range(len(nano.MENDS) + 1):
        model = nano.load()
        for mend in nano.MENDS[:count]:
            mend.put(model)
        path, out = folder / f"{count}.safetensors", folder / f"{count}.json"
        save_file(nano.record(model, tokens), path)
        compare.main(["--recording", str(path), "--json", str(out)])
        said = json.loads(out.read_text(encoding="utf-8"))
        differing = [name(site) for site in said["sites"] if site["status"] == "differs"]
        best = {name(fault): fault for fault in reversed(said["faults"])}  # a site has its faults best first
        known = {site: best[site] for site in differing if site in best and best[site]["explains"]}
        found.append(
            {
                "replaced": None if count == 0 else nano.MENDS[count - 1].told,
                "numerics": said["numerics"],
                "dtype": said["dtype"],
                "tokens": said["tokens"],
                "counts": said["counts"],
                "first": said["first"],
                "explained": [
                    {"fault": fault, "sites": sites, "share": min(known[site]["share"] for site in sites)}
                    for fault in dict.fromkeys(one["name"] for one in known.values())
                    if (sites := [site for site, one in known.items() if one["name"] == fault])
                ],
                "unexplained": [site for site in differing if site not in known],
                "not_tried": said["not_tried"],
                "not_exercised": said["not_exercised"],
            }
        )
    return finite(found)


def name(of: Mapping[str, JSON]) -> str:
    """As a recording calls it."""
    return of["site"] if of["layer"] is None else f"layers.{of['layer']}.{of['site']}"


def page(found: Sequence[Mapping[str, JSON]], facts: Mapping[str, JSON]) -> Page:
    """Return the page of such runs."""
    first, last = found[0], found[-1]
    agree, differ = first["counts"]["agrees"], first["counts"]["differs"]
    explained = sum(len(one["sites"]) for one in first["explained"])
    verdict = (
        f"{PACKAGE} {facts['version']}, as published: {agree} of {agree + differ} sites agree with the oracle, {differ}"
        f" differ. `compare` names {len(first['explained'])} faults, which explain {explained} of them. With these"
        f" equations replaced by the published ones, {last['counts']['agrees']} of {sum(last['counts'].values())} agree"
    )
    replaced = {run["replaced"]["fault"]: run["replaced"] for run in found[1:]}
    rows = [
        [one["fault"], replaced[one["fault"]]["what"], replaced[one["fault"]]["theirs"], *told(one)]
        for one in first["explained"]
    ]
    columns = ("named", "what the package has", "where, in its modeling.py", "sites", "explained", "first of them")
    steps = [
        [
            run["replaced"]["fault"] if run["replaced"] else "nothing",
            run["counts"]["agrees"],
            run["counts"]["differs"],
            ", ".join(f"{one['fault']} ({len(one['sites'])})" for one in run["explained"]) or "none",
            len(run["unexplained"]),
        ]
        for run in found
    ]
    unseen = "\n".join(f"- {one['what']}: {one['needs']}" for one in last["not_exercised"])
    parts = [
        Text("", HEAD),
        Table(DIFFERS, columns, rows),
        Table(MENDED, ("replaced", "agree", "differ", "named (sites)", "differ, not explained"), steps),
        Text("What these rows could not have shown", f"By `compare`, of the last run:\n\n{unseen}"),
        Text("What this does not claim", NOT_CLAIMED),
    ]
    tables = [finite({"kind": "Table", **as_json(part)}) for part in parts if isinstance(part, Table)]
    data = {**facts, "runs": list(found), "parts": tables}
    title = f"{PACKAGE}: what its equations are not, site by site"
    return Page("nano", title, verdict, "", parts, facts, data)


def as_json(table: Table) -> dict[str, JSON]:
    """A table as pages keep it."""
    return {"title": table.title, "columns": table.columns, "rows": table.rows}


def told(one: Mapping[str, Any]) -> list[float | str]:
    """How many sites a fault explains, the least share of a difference, and the first site."""
    return [len(one["sites"]), f"{number(100 * one['share'])}%", one["sites"][0]]


def main() -> None:
    """Run the command line."""
    p = argparse.ArgumentParser(prog="python -m tests.probes.nano_page", description=__doc__)
    p.add_argument("--out", type=Path, default=ROOT / "audits", help="folder for the page (default audits)")
    args = p.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = runs(Path(folder))
    facts = {
        "command": "python -m tests.probes.nano_page",
        "version": version(PACKAGE),
        "oracle": "probes/judge/oracle.py, one layer in float64",
        "checkpoint": DEMO.name,
        "weights": Subject().load().weights_fingerprint,
        "prompt": f"{TOKENS} tokens, {Subject().reads}",
        "numerics": f"{found[0]['numerics']}, as compare found",
        "dtype": f"{found[0]['dtype']}, as compare found",
        "device": f"cpu, one thread, torch {torch.__version__}",
        "commit": str(commit()),
    }
    write(page(found, facts), args.out)


if __name__ == "__main__":
    main()
