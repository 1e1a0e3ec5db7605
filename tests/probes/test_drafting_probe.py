"""The drafting probe: healthy runs pass, each fault fails on the finding that names it, and hollow runs are told."""

import re
from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fathom.kernels.ops import REFERENCE
from fathom.model.checkpoint.mtp import Head
from fathom.model.config import ModelConfig
from fathom.probes import drafting
from fathom.probes.drafting import EARLY, QUICK, SKIPPED, Pair, Segment, Text, Turns
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import TRIPWIRE, Verdict
from fathom.probes.judge.draft_oracle import FAULTS as READINGS
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.generate import Generation
from fathom.runtime.options import RunOptions
from fathom.runtime.sampling import Sampling
from tests.demo_heads import write_demo_with
from tests.make_checkpoint import DSPARK, tiny_config, write_checkpoint

MTP, BLOCK = Head.MTP, Head.DSPARK
# What drafts of a head are like, by fault.
AS_IF = {
    ("draft-stages-with-yarn", MTP): "yarn-beside-their-own-base",
    ("draft-stages-with-yarn", BLOCK): "yarn-beside-their-own-base",
    ("draft-stages-rotate-as-compressed", MTP): "rope-of-compressed-layers",
    ("draft-stages-rotate-as-compressed", BLOCK): "rope-of-compressed-layers",
    ("draft-taps-one-layer-early", MTP): EARLY,
    ("draft-taps-one-layer-early", BLOCK): EARLY,
    ("draft-features-skipped", MTP): SKIPPED,
    ("draft-features-skipped", BLOCK): SKIPPED,
    ("draft-collapsed-fed-back", MTP): "collapsed-fed-back",
    ("draft-block-causal", BLOCK): "block-causal",
}
# Where caches differ first, by fault.
LEFT = {
    "open-window-of-rejected-tokens": "frontier.kv of layer 1, row 0, at position 1 (1 right and 7 wrong",
    "rewind-of-the-position-alone": "attention.entry, rows of layer 1 stands at 2, not 0",
}
UNSEEN = "draft-taken-unseen"
CHANGED = "texts, of 4, that drafts by lookup change"


@pytest.fixture(scope="module")
def demo_heads(tmp_path_factory):
    """The demo with a random head of each kind."""
    folder = tmp_path_factory.mktemp("heads")
    made = {kind: folder / kind.name for kind in Head}
    for kind, directory in made.items():
        write_demo_with(kind, directory)
    return made


@pytest.fixture(autouse=True)
def no_heads(monkeypatch):
    """The demo as it is, whatever was trained for it."""
    monkeypatch.setattr(drafting, "HEADS_OF_DEMO", ())


def failed(findings):
    return [finding.what for finding in findings if finding.failed]


def of_head(directory, kind, fault=None, probe=QUICK):
    """What the drafts of a head show."""
    subject = Subject(directory, fault=fault)
    assert drafting._heads(subject) == {kind: subject}
    return list(drafting._equation_findings(kind, probe._moments(subject, kind)))


def rolled_back(subject, probe=QUICK):
    segments = drafting._segments(subject.config, probe.drafts)
    return [rolled for segment in segments for rolled in probe._rolled_back(subject, segment, silent)]


def test_the_demo_passes_and_says_that_it_has_no_head():
    report = run_probe(QUICK, Subject(), silent).report
    assert not report.failed
    assert "no draft head" in report.summary
    assert [table.title for table in report.parts] == [
        "Drafts that were accepted, greedy",
        "Drafts that were removed",
    ]


def test_heads_of_the_demo_that_were_never_trained_draft_as_they_should_and_in_vain(monkeypatch, demo_heads):
    monkeypatch.setattr(drafting, "HEADS_OF_DEMO", tuple(demo_heads.values()))
    report = run_probe(QUICK, Subject(), silent).report
    assert report.verdict is Verdict.VACUOUS
    assert all(" by mtp " in what or " by dspark " in what for what in failed(report.findings))
    told = [finding for finding in report.findings if "of drafts, furthest" in finding.what]
    assert [finding.what.partition(" of ")[0] for finding in told] == [
        "preview MTP: logits",
        "DSpark: logits",
        "DSpark: confidence",
    ]
    assert all(finding.measured < 0.5 for finding in told)


def test_every_fault_of_drafts_is_pursued_here():
    pursued = {name for name, _ in AS_IF} | set(LEFT) | {UNSEEN}
    assert pursued == {name for name, fault in FAULTS.items() if fault.in_drafts}
    assert set(AS_IF.values()) <= {*READINGS, EARLY, SKIPPED}


@pytest.mark.parametrize(("fault", "kind"), AS_IF)
def test_a_head_that_computes_something_else_is_told_by_what_it_is(demo_heads, fault, kind):
    what = failed(of_head(demo_heads[kind], kind, FAULTS[fault]))
    parts = ["logits"] if kind is MTP else ["logits", "confidence"]
    end = f"of drafts, furthest over its bound, as if {AS_IF[fault, kind]}"
    assert what == [f"{kind}: {part} {end}" for part in parts]


@pytest.mark.parametrize("kind", Head)
def test_a_head_that_is_off_by_little_in_another_way_is_like_nothing_known(demo_heads, kind):
    def longer(head):
        head.norm = head.norm * 1.001

    findings = of_head(demo_heads[kind], kind, Fault("local", "", "", head=longer))
    assert failed(findings) == [f"{kind}: logits of drafts, furthest over its bound"]
    (finding,) = (finding for finding in findings if finding.failed)
    assert "nearest reading" not in finding.evidence


@pytest.mark.parametrize("kind", Head)
def test_the_head_of_a_checkpoint_of_its_own(tmp_path, kind):
    write_checkpoint(tmp_path, tiny_config(**(DSPARK if kind is BLOCK else {})), seed=3, head=kind)
    assert failed(of_head(tmp_path, kind, probe=replace(QUICK, read=(2, 21)))) == []


def test_a_moment_without_steps_in_which_nothing_was_drafted_is_vacuous(monkeypatch, demo_heads):
    monkeypatch.setattr(drafting, "TURNS", (drafting.OWN,))
    (what,) = failed(of_head(demo_heads[MTP], MTP))
    assert what == f"preview MTP: drafts if {SKIPPED}"


@pytest.mark.parametrize("fault", LEFT)
def test_what_rejected_drafts_leave_is_told_by_layer_part_and_position(fault):
    first, *_ = failed(drafting._state_findings(rolled_back(Subject(fault=FAULTS[fault]))))
    assert LEFT[fault] in first


def test_a_tripwire_behind_it_hides_nothing_that_was_seen(demo_heads):
    subject = Subject(demo_heads[MTP], fault=FAULTS["rewind-of-the-position-alone"])
    state, trip = failed(run_probe(QUICK, subject, silent).report.findings)
    assert state.startswith("buffers of caches, of ")
    assert trip == f"{TRIPWIRE}attention.entry, rows"


def test_a_draft_that_nobody_compared_is_told_by_its_text():
    pairs = QUICK._texts(Subject(fault=FAULTS[UNSEEN]), {}, silent)["lookup"]
    what, *_ = failed(drafting._text_findings("lookup", pairs))
    assert what.startswith(f"{CHANGED}, first ")
    assert what.endswith(" without drafts")


# --- what it is made of


def test_segments_reach_over_the_ends_of_windows():
    assert drafting._segments(Subject().config, 7) == [Segment(0, 17), Segment(119, 129), Segment(247, 257)]
    of_flash = ModelConfig.from_json(tiny_config(sliding_window=128), "flash")
    assert drafting._segments(of_flash, 7) == [Segment(0, 129), Segment(247, 257)]


def test_texts_are_of_all_lengths_greedy_and_seeded():
    texts = list(drafting._chosen_texts(Subject(), 76))
    by_length = {}
    for text in texts:
        by_length.setdefault(len(text.prompt), set()).add(text.sampling.temperature)
    for size in (4, 16, 128):
        assert all(by_length[size + off] == {0, 0.8} for off in (-1, 0, 1))
    assert max(by_length) > 128
    assert len({text.sampling.seed for text in texts if text.sampling.temperature}) == len(texts) // 2
    assert texts[:4] == list(drafting._chosen_texts(Subject(), 4))


def test_turns_are_the_heads_nobodys_and_those_of_who_knows(monkeypatch):
    monkeypatch.setattr(drafting, "TURNS", (drafting.OWN, drafting.NONE, 2, 0))
    turns = Turns(Nines(), [1, 2, 3, 4, 5, 6], replace(Subject().config, vocab_size=6))
    assert turns(array("q", [1]), 2) == [9, 9]
    assert turns(array("q", [1, 2]), 2) == []
    assert turns(array("q", [1, 2, 3]), 4) == [4, 5, 1], "the third is wrong, and there is no more"
    assert turns(array("q", [1, 2, 3]), 1) == [5]
    assert (turns.kept, turns.alone) == ([(1, Nines.drafts)], [1])


class Nines:
    drafts = "drafts"

    def __call__(self, tokens, most):
        del tokens
        return [9] * most


def pair(tokens, plain, drafted, accepted, *, temperature=0.0, confidence=()):
    trace = SimpleNamespace(other_caches=lambda other: [(2, "frontier.kv")] if other is not trace else [])
    runs = [
        SimpleNamespace(record=Generation(tokens=plain, decode_s=2.0), caches=trace),
        SimpleNamespace(
            record=Generation(tokens=tokens, decode_s=1.0, drafted=drafted, accepted=accepted), caches=trace
        ),
    ]
    return Pair(Text([5] * 7, Sampling(temperature)), *runs, list(confidence))


def test_acceptance_is_counted_by_place_in_greedy_texts():
    told = torch.tensor([0.0, 0.0]), torch.tensor([0.0])
    pairs = [
        pair([1, 2], [1, 2], [4, 2], [2, 1], confidence=told),
        pair([1, 2], [1, 2], [1], [1]),
        pair([1, 2], [1, 2], [9], [9], temperature=1.0),
    ]
    places = drafting._acceptance(pairs)
    assert [(place.drafted, place.accepted, place.expected) for place in places] == [(5, 3, 0.5), (2, 1, 0.25)]
    shares, *_, ratio = drafting._measured("x", places, pairs)
    assert (shares.measured, shares.evidence) == (0.6, {"drafted": 5, "expected by confidence": 0.5})
    assert (ratio.measured, ratio.evidence) == (0.5, {"quartiles": [0.5, 0.5]})


@pytest.mark.parametrize(("drafted", "accepted"), [([], []), ([3], [0]), ([3], [3])])
def test_texts_whose_drafts_were_all_accepted_or_none_show_nothing(drafted, accepted):
    findings = list(drafting._text_findings("x", [pair([1], [1], drafted, accepted)]))
    assert [finding.verdict for finding in findings] == [Verdict.VACUOUS, Verdict.VACUOUS]
    changed, _ = drafting._text_findings("x", [pair([1, 2], [1, 3], drafted, accepted)])
    assert changed.verdict is Verdict.FAIL
    assert (
        changed.what == "texts, of 1, that drafts by x change, first 7 tokens, greedy: token 1 is 2, 3 without drafts"
    )


def test_a_run_that_leaves_other_caches_is_told():
    one, other = pair([1], [1], [3], [1]), pair([1], [1], [3], [1])
    same, left = drafting._text_findings("x", [one._replace(drafted=other.drafted)])
    assert (same.verdict, left.verdict) == (Verdict.PASS, Verdict.FAIL)
    assert left.what.endswith("leave other caches, first 7 tokens, greedy: frontier.kv of layer 2")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"ops": REFERENCE}, "--draft: ops reference"),
        ({"options": RunOptions(prefill_chunk=7)}, "--draft-tokens 7: .* --prefill-chunk is 7"),
        ({"group": SimpleNamespace(size=2)}, "it runs on one rank, and there are 2"),
    ],
)
def test_what_it_needs(changes, why):
    assert re.search(why, QUICK.needs(replace(Subject(), **changes)))


def test_a_model_of_few_positions_has_no_room(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=300), seed=1)
    assert "positions" in QUICK.needs(Subject(tmp_path))
