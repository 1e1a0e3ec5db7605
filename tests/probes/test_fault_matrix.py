"""Faults against probes: what audits/faults.json says, and some of its rows run again, as slow all of them.

Each probe is run with its own faults in a file of its own too: test_layers_probe, test_recall_probe and so on.
"""

import json
from pathlib import Path

import pytest

from fathom.model.errors import ConfigError
from fathom.probes.catalogue import QUICK
from fathom.probes.faults import FAULTS
from fathom.probes.matrix import Cell, Outcome, row
from fathom.probes.subject import Subject
from fathom.scripts.fault_matrix import _kept
from fathom.scripts.parts.faults_page import NOT_CLAIMED, noticed, page

ROOT = Path(__file__).resolve().parents[2]
SAID = json.loads((ROOT / "audits" / "faults.json").read_text(encoding="utf-8"))
CARRIED = "stale-frontier"  # carries a state from run to run: what a probe sees depends on the probes before it
SEEN = {Outcome.CAUGHT, Outcome.TRIPPED}

# By fault, probes that must catch it; none passes with a fault that it is named for here.
CAUGHT = {
    "norm-weight-plus-one": {"load", "mhc"},
    "relu-dropped": {"recall"},
    "first-tile-again": {"recall"},
    "entries-wrapped": {"recall"},
    "ties-to-the-higher-entry": {"recall"},
    "leak-of-one-entry-in-decode": {"bits"},
    "bos-left-out": {"text"},
    "thinking-tag-swapped": {"text"},
    "top-p-off-by-one": {"text"},
    "keys-four-times-too-wide": {"memory"},
    "no-inverse-rotation": {"quantisation", "rope"},
    "yarn-dropped": {"same", "ops"},
    "query-theta": {"rope"},
    "sinkhorn-of-sigmoids": {"mhc"},
    "one-token-post-off": {"mhc"},
    "eps-tenfold": {"projections"},
    "per-head-keys": {"attention"},
    "selected-wrapped": {"recall"},
    "entries-of-the-first-tile-alone": {"recall"},
    "late-rows-of-a-long-call": {"attention"},
    "third-entry-of-a-call-again": {"projections"},
    "late-keys-of-a-long-call": {"recall"},
    "late-selections-of-a-long-call": {"recall"},
    "late-entries-of-a-long-call": {"recall"},
    "narrow-keys-scaled-as-the-one-before": {"recall", "bits"},
    "gathered-entries-scaled-as-the-one-before": {"recall", "bits"},
    "experts-of-few-tokens-unrounded": {"bits", "same"},
    "experts-of-the-next-rank": {"routing"},
    "weights-of-another-slot": {"routing"},
    "pair-lost": {"routing"},
    "pairs-beyond-capacity-lost": {"routing"},
    "pair-counted-twice": {"routing"},
    "first-logits-of-a-long-call": {"projections"},
    "pending-token-lost": {"text"},
    "pending-token-of-the-step-before": {"text"},
    "raw-without-bos": {"text"},
    "likelihoods-of-twice-the-logits": {"text"},
    "last-token-of-an-answer-unread": {"text"},
    "index-scores-by-sigmoid": {"recall"},
    "one-selection-for-all": {"recall", "bits"},
    "stale-selections": {"attention"},
    "unfinished-entries-selected": {"ops"},
    "compressed-theta": {"rope"},
    "rope-frequencies-in-bf16": {"rope"},
    "rope-frequencies-inverted": {"rope"},
    "entries-rotated-at-their-number": {"rope"},
    "kv-normed-twice": {"projections"},
    "experts-normed-twice": {"mhc"},
    "first-projections-not-loaded": {"load"},
    "entries-zero": {"projections"},
    "output-rows-shuffled": {"projections"},
    "late-mixing-of-a-long-call": {"bits", "mhc"},
    "entries-masked": {"attention"},
    "cache-rotated-on-write": {"attention"},
    "softmax-scale-with-rope-dims-added": {"attention"},
    "gate-in-4-bits": {"load", "routing"},
    "first-matrix-of-another-expert": {"load", "routing"},
    "up-scaled-as-gate": {"load", "routing"},
    "expert-ids-off-by-a-rank": {"routing"},
    "scales-read-as-e4m3": {"load"},
    "fp8-scale-mantissa-lost": {"projections"},
    "fp8-scale-to-nearest-power": {"projections"},
    "fp8-scale-of-the-neighbour": {"projections"},
    "rope-dims-rounded": {"rope"},
}
AGAIN = ("one-token-post-off", "late-rows-of-a-long-call")  # others of recall and bits in files of their own


def test_the_page_has_a_cell_for_every_fault_and_every_probe():
    assert set(SAID) == {"", *FAULTS}
    assert {frozenset(cells) for cells in SAID.values()} == {frozenset(probe.name for probe in QUICK)}


def test_no_fault_of_the_page_is_uncaught_and_no_probe_fires_on_a_healthy_run():
    assert {cell["outcome"] for cell in SAID[""].values()} == {Outcome.MISSED.value}
    for cells in (cells for name, cells in SAID.items() if name):
        others = {cell["outcome"] for name, cell in cells.items() if name != "same"}  # without transformers too
        assert others & {outcome.value for outcome in SEEN}


@pytest.mark.parametrize("fault", CAUGHT)
def test_the_page_says_of_a_fault_that_the_probes_for_it_catch_it(fault):
    assert {SAID[fault][probe]["outcome"] for probe in CAUGHT[fault]} <= {outcome.value for outcome in SEEN}


def test_the_committed_page_is_that_of_the_matrix():
    found = {
        fault: {name: Cell(Outcome(cell["outcome"]), cell["evidence"]) for name, cell in cells.items()}
        for fault, cells in SAID.items()
    }
    healthy = found.pop("")
    text = (ROOT / "audits" / "faults.md").read_text(encoding="utf-8")
    made, facts = page("faults", found, healthy, {}, noticed(found)).markdown(), "\n## How this page was made\n"
    assert made.partition(facts)[0] == text.partition(facts)[0]
    assert CARRIED in NOT_CLAIMED


def test_rows_that_are_not_made_again_are_those_of_the_page(tmp_path):
    page_there = ROOT / "audits" / "faults.md"
    rows, facts = _kept(page_there, ["relu-dropped"])
    assert {name: {probe: cell.to_json() for probe, cell in cells.items()} for name, cells in rows.items()} == SAID
    assert f'commit: "{facts["commit"]}"' in page_there.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--again relu-droped: no such fault \(did you mean relu-dropped\?\)"):
        _kept(page_there, ["relu-droped"])
    with pytest.raises(ConfigError, match=r"none\.md: No such file or directory: only a page that is there"):
        _kept(tmp_path / "none.md", ["relu-dropped"])
    (tmp_path / "some.md").write_text(page_there.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "some.json").write_text(json.dumps({"relu-dropped": SAID["relu-dropped"]}), encoding="utf-8")
    with pytest.raises(ConfigError, match="has no row of "):
        _kept(tmp_path / "some.md", ["keys-lost"])


@pytest.mark.parametrize(
    "fault", [fault if fault in AGAIN else pytest.param(fault, marks=pytest.mark.slow) for fault in CAUGHT]
)
def test_a_fault_is_caught_by_the_probes_that_are_for_it(fault):
    cells = row(Subject(fault=FAULTS[fault]), [probe for probe in QUICK if probe.name in CAUGHT[fault]])
    assert {name: cell.outcome for name, cell in cells.items()} == dict.fromkeys(cells, Outcome.CAUGHT)
    assert set(cells) == CAUGHT[fault]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught_by_some_probe(fault):
    cells = row(Subject(fault=FAULTS[fault]), QUICK)
    assert SEEN & {cell.outcome for cell in cells.values()}


@pytest.mark.slow
def test_no_probe_fires_on_a_healthy_run():
    cells = row(Subject(), QUICK)
    assert {name for name, cell in cells.items() if cell.outcome is not Outcome.MISSED} == set()
