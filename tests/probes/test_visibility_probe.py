"""The visibility probe: passes on the demo, and each way to see the future fails on the finding that names it."""

from dataclasses import replace

import pytest
import torch

from model.config import LayerKind
from model.moe import HashGate
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.subject import Subject
from probes.visibility.page import picture, reached, staircase
from probes.visibility.probe import FULL, QUICK, selections
from probes.visibility.reach import Reach, entries_of, in_window
from tests.make_checkpoint import tiny_config, write_checkpoint

AFTER, BEYOND, LOST = (
    "rows moved by a token that comes after them",
    "rows moved by a past token outside of their window and attended entries",
    "share of rows not moved by a token of their window or attended entries",
)


def failed(fault):
    """Failed findings by what and layer, with their evidence."""
    report = run_probe(QUICK, Subject(fault=fault), silent).report
    return {(finding.what, finding.layer): finding.evidence for finding in report.findings if finding.failed}


def local(**ops):
    """A fault that replaces ops; each value makes the new op from the old one."""
    return Fault("local", "", "", ops=lambda old: old._replace(**{k: make(getattr(old, k)) for k, make in ops.items()}))


def test_the_demo_passes_and_every_kind_of_layer_was_looked_at():
    run = run_probe(QUICK, Subject(), silent)
    assert not run.report.failed, [finding for finding in run.report.findings if finding.failed]
    assert {finding.layer for finding in run.report.findings} == {None, 0, 1, 2, 3}
    assert not any(finding.verdict is Verdict.MEASURED for finding in run.report.findings)


def test_an_unfinished_block_is_seen_by_the_hca_layer_that_attends_to_it():
    found = failed(FAULTS["future-block-visible"])
    assert found[AFTER, 2] == {"token changed": 64, "row": 63}, "half a block early"
    assert {layer for _, layer in found} == {2, None}, "the other layers are well"
    leaks = [evidence for (what, _), evidence in found.items() if what.startswith("runs where changing")]
    assert len(leaks) == 2
    assert all(leak == {"t": 126, "first moved": "attention.mixed of layer 2, token 63"} for leak in leaks)


def test_a_window_that_holds_the_next_token():
    def ahead(attend):
        return lambda q, ring, *rest: attend(q, ring.roll(-1, 0), *rest)

    found = failed(local(attend=ahead))
    assert found[AFTER, 0] == {"token changed": 64, "row": 63}
    assert found["runs where changing token t + 1 moved the past", None] == {
        "t": 62,
        "first moved": "attention.mixed of layer 0, token 62",
    }


def test_a_leak_outside_of_attention_is_left_to_the_whole_model():
    def ahead(expand):
        return lambda y, *rest: expand(y.roll(-1, 0), *rest)

    found = failed(local(expand=ahead))
    assert set(found) == {
        ("runs where changing token t + 1 moved the past", None),
        ("runs where changing every token after t moved the past", None),
    }
    assert all(leak["first moved"] == "attention.streams of layer 0, token 62" for leak in found.values())


def test_an_entry_that_holds_tokens_of_the_next_block():
    def ahead(pool):
        return lambda *args: pool(*args).roll(-1, 0)

    found = failed(local(pool=ahead))
    leak = found["runs where changing token t + 1 moved the past", None]
    assert leak == {"t": 62, "first moved": "attention.entry of layer 1, entry 14"}, "its own tokens end at 59"


@pytest.mark.parametrize(("name", "layer"), [("ring-off-by-one", 0), ("entries-off-by-one", 1)])
def test_rows_read_in_the_wrong_place(name, layer):
    found = failed(FAULTS[name])
    assert (BEYOND, layer) in found
    assert (LOST, layer) in found


def test_a_model_that_does_not_read_its_input_is_vacuous():
    def deaf(model):
        table = model.embedding.weight
        model.embedding.weight = table[:1].repeat(len(table), 1)
        for block in model.blocks:
            gate = block.experts.gate
            if isinstance(gate, HashGate):
                gate.table = gate.table[:1].repeat(len(gate.table), 1)

    report = run_probe(QUICK, Subject(fault=Fault("deaf", "", "", inject=deaf)), silent).report
    assert [finding.verdict for finding in report.findings if finding.failed] == [Verdict.VACUOUS]
    assert "does not read its input" in report.findings[-1].evidence["why"]


def test_a_model_without_the_positions_is_vacuous():
    report = run_probe(replace(QUICK, tokens=1 << 21), Subject(), silent).report
    assert "the run takes 2097152 positions, the model has 1048576" in report.summary
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]


@pytest.mark.parametrize("overrides", [{"sliding_window": 200}, {"compress_ratios": [0, 4, 200, 4]}])
def test_the_prompt_leaves_every_window_and_ends_a_block(overrides, tmp_path):
    write_checkpoint(tmp_path, tiny_config(**overrides), seed=1)
    report = run_probe(QUICK, Subject(tmp_path), silent).report
    assert not report.failed
    assert "The prompt has 216 tokens" in report.parts[-1].text
    assert ("62, 126, 198. " if "compress_ratios" in overrides else "62, 126. ") in report.parts[-1].text


@pytest.mark.parametrize(
    ("ratios", "options", "formats"),
    [([128, 4, 0, 4], {"numerics": "plain", "dtype": "fp32"}, "f32"), ([4, 128, 128, 0], {}, "official")],
)
def test_other_checkpoints_pass(tmp_path, ratios, options, formats):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=ratios), seed=3, formats=formats)
    subject = Subject(tmp_path)
    report = run_probe(QUICK, replace(subject, options=subject.with_options(**options)), silent).report
    assert not report.failed, [finding for finding in report.findings if finding.failed]


def test_a_model_without_compressed_entries_passes_on_its_windows(tmp_path):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[0, 0], num_hidden_layers=2), seed=3)
    report = run_probe(QUICK, Subject(tmp_path), silent).report
    assert not report.failed
    assert not any("selections" in finding.what for finding in report.findings)


def test_layers_of_a_deep_model_are_a_sample_with_both_ends(tmp_path):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[4] * 11 + [128], num_hidden_layers=12), seed=1)
    assert FULL._layers(Subject(tmp_path).config) == [0, 4, 8, 10, 11]


def test_selections_by_hand():
    config = replace(Subject().config, index_topk=2)
    good = torch.full((12, 2), -1)  # ratio 4: positions 3 .. 6 see one entry, 7 .. 10 two, 11 three
    good[3:, 0], good[7:, 1] = 0, 1
    assert selections(config, {1: good}).measured == 0
    for t, row, what in (
        (3, [1, -1], "an unfinished block"),
        (2, [0, -1], "a block before its end"),
        (11, [0, -1], "too few"),
        (11, [2, 2], "one entry twice"),
        (11, [-3, 1], "no entry"),
    ):
        wrong = good.clone()
        wrong[t] = torch.tensor(row)
        finding = selections(config, {1: good, 3: wrong})
        assert finding.measured == 1, what
        assert (finding.evidence["csa layer"], finding.evidence["t"]) == (3, t), what


def test_expected_reach_by_hand():
    config = Subject().config  # layers SWA, CSA (4), HCA (128), CSA; window 16
    assert in_window(config, [2, 20], 19).nonzero().tolist() == [[0, t] for t in range(2, 18)]
    assert [entries_of(config, layer, 130) for layer in range(3)] == [(), (32, 33), (1,)]


def test_judging_reach_by_hand():
    window = torch.tensor([[False, True, True, False]])
    expected = window | torch.tensor([[False, False, False, True]])

    def verdicts(*moved):
        found = reached(Reach(0, (1,), torch.tensor([moved], dtype=torch.bool), window, expected))
        return [finding.failed for finding in found]

    assert verdicts(0, 1, 1, 1) == [False, False, False]
    assert verdicts(1, 1, 1, 1) == [True, False, False], "row 0 comes before the changed token 1"
    assert verdicts(0, 1, 1, 0) == [False, False, True], "row 3 attends to an entry that holds it"
    narrow = reached(Reach(0, (1,), expected, window, window))
    assert [finding.failed for finding in narrow] == [False, True, False], "row 3 does not see it"
    assert narrow[1].evidence == {"token changed": 1, "row": 3}


def test_the_pictures_show_what_moved():
    config = Subject().config
    assert config.layer_kind(2) is LayerKind.HCA
    positions = tuple(range(130))
    window = in_window(config, positions, 144)
    rows = torch.arange(144)
    moved = window | ((rows >= 127) & (torch.tensor(positions)[:, None] < 128))
    one = Reach(2, positions, moved, window, moved)
    assert staircase(config, one).rows == [(126, 0, 0), (127, 1, 1), (128, 1, 1)]
    values = picture(config, one).values
    assert len(values) == 9
    assert len(values[0]) == 9
    assert values[0][8] == 1, "all of block 0 moves rows 128 .. 143"
    assert values[0][2] == 0, "out of the window, and the block is not finished"
    assert values[8][0] == 0, "the past"
