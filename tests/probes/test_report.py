import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from fathom.model.config import ModelConfig
from fathom.probes.fault import Fault
from fathom.probes.finding import (
    HeatMap,
    Plot,
    Table,
    Text,
    at_least,
    at_most,
    exactly,
    judged,
    measured,
    rows,
    vacuous,
)
from fathom.probes.report import Page, of_run, write
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.report import commit
from tests.fake_probes import BAD, FAILING, FAKES, GOOD, HOLLOW, PARTLY_HOLLOW, PASSING, TRIPPING, UNJUDGED, run_fake
from tests.make_checkpoint import tiny_config, write_checkpoint

COMMAND = "python -m scripts.probe passing"
FAULT = Fault("nothing-wrong", "Nothing is changed", "the tests")
CURVE = Plot("Recall by length", "tokens", "recall", {"layer 1": [(256, 1.0), (512, 0.9)]}, note="It falls.")
GRID = HeatMap("Needles", "tokens", "depth", ("256",), ("start",), [[0.5]])


@pytest.fixture(scope="module")
def subject():
    return Subject()


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    directory = tmp_path_factory.mktemp("a checkpoint: 1")
    write_checkpoint(directory, tiny_config(), seed=0)
    return Subject(directory)


def text_of(probe, subject):
    return page(run_fake(probe, subject), subject).markdown()


def page(run, subject):
    return of_run(run, subject, COMMAND)


def foot(text):
    """How a page says it was made, read by a YAML parser."""
    return yaml.safe_load(re.search("\n## How this page was made\n\n```yaml\n(.*)```\n$", text, re.DOTALL)[1])


class Cells(HTMLParser):
    """The tables of a page as a Markdown parser sees them."""

    def __init__(self):
        super().__init__()
        self.tables, self.inside = [], False

    def handle_starttag(self, tag, _):
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in {"td", "th"}

    def handle_data(self, data):
        if self.inside:
            self.tables[-1][-1][-1] += data.replace("\u00a0", " ")


def tables(text):
    parser = Cells()
    parser.feed(MarkdownIt("commonmark").enable("table").render(text))
    return parser.tables


def titles(text):
    return re.findall("^##? (.*)$", text, flags=re.MULTILINE)


def test_the_foot_says_what_ran(subject):
    facts = foot(text_of(PASSING, subject))
    config, loaded = ModelConfig.from_file(DEMO / "config.json"), subject.load()
    assert facts.pop("seconds") >= 0
    assert facts.pop("threads") >= 1
    assert facts.pop("torch")
    assert facts.pop("commit") == str(commit())
    assert facts == {
        "probe": "passing",
        "verdict": "pass",
        "checkpoint": "demo",
        "config": config.fingerprint,
        "weights": loaded.weights_fingerprint,
        "ops": "cpu",
        "numerics": "deployed",
        "dtype": "bf16",
        "device": "cpu",
        "prefill_chunk": 512,
        "entry_format": "dtype",
        "key_format": "dtype",
        "index_scores": "exact",
        "rank_tokens": "auto",
        "draft": "off",
        "draft_tokens": 0,
        "draft_confidence": 0.0,
        "fp8_products": "auto",
        "experts": "auto",
        "kv": [],
        "coda_adapters": None,
        "seed": 0,
        "prompt": "documents of the demo language",
        "command": COMMAND,
    }


def test_the_foot_of_another_run_differs(other):
    changed = replace(other, options=RunOptions(numerics="plain", dtype="fp32"), fault=FAULT, seed=7)
    facts = foot(text_of(PASSING, changed))
    assert facts["checkpoint"] == other.directory.name, "a colon in a name is no mapping"
    assert (facts["numerics"], facts["dtype"], facts["seed"]) == ("plain", "fp32", 7)
    assert facts["fault"] == "nothing-wrong"
    assert facts["prompt"] == "random token ids"


@pytest.mark.parametrize(
    ("probe", "value", "told"),
    [
        (PASSING, "pass", "Pass: 1 finding within bounds"),
        (FAILING, "fail", "Fail: 2 of 4 findings failed, 1 more vacuous"),
        (HOLLOW, "vacuous", "Vacuous: this run could not have shown a fault, which counts as a failure"),
        (PARTLY_HOLLOW, "vacuous", "Vacuous: 1 of 2 findings could not have come out otherwise, a failure"),
        (TRIPPING, "fail", "Fail: a tripwire ended the run"),
        (UNJUDGED, "fail", "Fail: nothing was judged, and a probe that cannot fail shows nothing"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_outcome_is_told_in_the_first_line(probe, value, told, subject):
    run = run_fake(probe, subject)
    assert run.report.verdict == value
    assert run.report.failed == (value != "pass")
    assert run.headline == told
    text = text_of(probe, subject)
    assert foot(text)["verdict"] == value
    assert text.startswith(f"# Does {probe.name} hold?\n\n**{told}.** {run.report.summary}\n\n")


def test_a_page_reads_from_verdict_and_picture_to_the_command(subject):
    probe = replace(PASSING, parts=(CURVE, Table("Numbers", ("a",), [[1]]), GRID, Text("Why", "Because.")))
    assert titles(text_of(probe, subject)) == [
        "Does passing hold?",
        "Recall by length",
        "Background",
        "Findings",
        "Numbers",
        "Needles",
        "Why",
        "What surprised us",
        "What this does not claim",
        "What it watches",
        "How this page was made",
    ]


def surprises(subject):
    return "What surprised us" in titles(text_of(PASSING, subject))


def test_surprises_are_told_of_the_healthy_demo_alone(subject, other, tmp_path):
    assert surprises(subject)
    assert not surprises(other)
    assert not surprises(replace(subject, fault=FAULT))
    assert not surprises(replace(subject, options=RunOptions(numerics="plain")))
    copied = tmp_path / "copied"
    copied.symlink_to(DEMO)
    assert surprises(Subject(copied)), "the weights decide, not the path"


def test_an_injected_fault_is_told_before_all_else(subject):
    text = text_of(FAILING, replace(subject, fault=FAULT))
    assert "A fault was injected on purpose, `nothing-wrong`**: Nothing is changed." in text.split("## Background")[0]
    assert "injected" not in text_of(FAILING, subject)


def test_failures_come_first_with_their_evidence(subject):
    text = text_of(FAILING, subject)
    found = tables(text)[0]
    assert found[0] == ["layer", "what", "measured", "bound", "verdict"]
    assert [row[4] for row in found[1:]] == ["fail", "fail", "vacuous", "pass"]
    assert found[1] == ["2", "recall, worst row", "0.42", ">= 0.99", "fail"]
    assert text.split("### What failed")[1].split("\n## ")[0].splitlines() == [
        *["", ""],
        *["- **layer 2, recall, worst row**: 0.42, want >= 0.99", "  - position: 4511", "  - missing entries: 7, 8"],
        *["- **census**", "  - why: no tensor"],
        *["- **recall at 64**", "  - why: 16 entries, top-k 32"],
    ]
    assert "### What failed" not in text_of(PASSING, subject)


def test_a_tripwire_is_told_with_its_place(subject):
    text = text_of(TRIPPING, subject)
    assert tables(text)[0][1] == ["3", "tripwire at logits", "", "", "fail"]
    for line in ("position: 17", "measured: 4 of 8 values not finite", "expected: finite"):
        assert f"  - {line}\n" in text


def test_many_failures_do_not_drown_the_page(subject):
    many = tuple(replace(BAD, what=f"thing {i}") for i in range(40))
    text = text_of(replace(FAILING, findings=many), subject)
    assert "And 28 more, in the JSON beside this page." in text
    assert text.count("missing entries") == 12


def test_layers_that_pass_share_a_row(subject):
    values = {1: 0.999, 2: 0.995, 3: 0.9, 4: 0.997, 7: 0.998}
    found = [judged("recall", value, at_least(0.99), "ms", layer=layer) for layer, value in values.items()]
    [table] = tables(text_of(replace(PASSING, findings=tuple(found)), subject))
    assert table[1:] == [
        ["3", "recall", "0.9 ms", ">= 0.99 ms", "fail"],
        ["1-2, 4, 7", "recall", "0.995 ms .. 0.999 ms", ">= 0.99 ms", "pass"],
    ]


def test_what_differs_in_more_than_the_layer_keeps_its_row():
    some = [judged("recall", 1.0, at_least(0.9), layer=layer) for layer in range(3)]
    other = [
        judged("recall", 1.0, at_least(0.8), layer=3),
        judged("recall", 1.0, at_least(0.9)),
        measured("recall", 1.0, layer=4),
        replace(judged("recall", 1.0, at_least(0.9), layer=5), rank=1),
        judged("another", 1.0, at_least(0.9), layer=6),
    ]
    assert [row.layer for row in rows([*some, *other])] == ["0-2", "3", "", "4", "5, rank 1", "6"]
    failed = [judged("recall", 0.5, at_least(0.9), layer=layer) for layer in range(3)]
    assert [row.layer for row in rows(failed)] == ["0", "1", "2"], "each failure is seen"


def test_a_value_just_past_its_bound_does_not_look_equal_to_it():
    [row] = rows([judged("recall", 0.989996, at_least(0.99))])
    assert (row.measured, row.bound) == ("0.989996", ">= 0.99")
    [row] = rows([judged("recall", 1e-5 + 1e-12, at_most(1e-5))])
    assert row.measured != "1e-05"
    [row] = rows([judged("bits that differ", 3, exactly(0))])
    assert (row.measured, row.bound) == ("3", "== 0")


def test_cells_keep_their_bars_lines_and_tags(subject):
    odd = "a|b\nc <b>bold</b> | e < (t + 1)"
    finding = judged(odd, 0.0, exactly(1), "a|b", why_not=odd)
    text = text_of(
        replace(PASSING, findings=(finding,), parts=(Table("T", (odd, "n"), [[odd, None], ["x", 2.5]]),)), subject
    )
    kept = "a|b c <b>bold</b> | e < (t + 1)"
    findings, table = tables(text)
    assert findings[1] == [kept, "0 a|b", "== 1 a|b", "fail"]
    assert table == [[kept, "n"], [kept, ""], ["x", "2.5"]]
    assert "<b>" not in text


def test_columns_of_numbers_are_aligned_to_the_right(subject):
    rows = [["a", 1, "1,204.5", None, "1K"], ["8 bits", 20, 0.123456, None, "3.96 (1.2)"]]
    part = Table("T", ("name", "count", "share", "nothing", "size"), rows)
    text = text_of(replace(PASSING, parts=(part,)), subject)
    assert (
        "| name | count | share | nothing | size |\n| :-- | --: | --: | --: | --: |\n"
        "| a | 1 | 1,204.5 |  | 1K |\n| 8 bits | 20 | 0.1235 |  | 3.96 (1.2) |" in text
    )


def test_pictures_stand_beside_the_page_under_names_of_their_own(subject):
    same = [
        replace(CURVE),
        replace(CURVE),
        replace(CURVE, title="Recall, by length!"),
        replace(CURVE, title="Recall by length 2"),
    ]
    made = page(run_fake(replace(PASSING, parts=(*same, GRID)), subject), subject)
    linked = re.findall(r"!\[(.*)\]\((.*)\)", made.markdown())
    assert [name for _, name in linked] == [name for name in made.files() if name.endswith(".svg")]
    assert [name for _, name in linked] == [
        "passing-recall-by-length.svg",
        "passing-recall-by-length.2.svg",
        "passing-recall-by-length.3.svg",
        "passing-recall-by-length-2.svg",
        "passing-needles.svg",
    ]
    assert linked[2][0] == "Recall, by length!"
    assert "It falls." in made.markdown()


def test_the_json_holds_what_the_page_holds(subject):
    finding = judged("worst", math.nan, at_most(1), seen=[1.0, math.inf], at={"row": math.nan})
    made = page(run_fake(replace(FAILING, findings=(GOOD, finding), parts=(CURVE, GRID)), subject), subject)
    data, facts = json.loads(made.files()["failing.json"]), foot(made.markdown())
    assert {key: data[key] for key in facts} == facts
    assert data["summary"] == made.summary
    assert data["question"] == "Does failing hold?"
    assert data["findings"][0] == GOOD.to_json("failing")
    assert data["findings"][1]["measured"] == "nan"
    assert data["findings"][1]["evidence"] == {"seen": [1.0, "inf"], "at": {"row": "nan"}}
    assert data["parts"][0]["series"] == {"layer 1": [[256, 1.0], [512, 0.9]]}
    assert [part["kind"] for part in data["parts"]] == ["Plot", "HeatMap"]


@pytest.mark.parametrize("probe", FAKES, ids=lambda probe: probe.name)
def test_no_page_names_a_path_of_the_machine(probe, other):
    made = page(run_fake(replace(probe, parts=(CURVE,)), other), other)
    for name, text in made.files().items():
        assert str(other.directory.parent) not in text, name
        assert str(Path(__file__).parents[2]) not in text, name


def test_a_page_is_the_same_bytes_again(subject):
    run = run_fake(replace(FAILING, parts=(CURVE, GRID)), subject)
    again = run_fake(replace(FAILING, parts=(CURVE, GRID)), Subject())
    assert page(run, subject).files() == page(replace(again, seconds=run.seconds), Subject()).files()


def test_writing_leaves_the_files_of_the_last_run_and_of_other_pages(subject, tmp_path):
    run = run_fake(replace(PASSING, parts=(CURVE, GRID)), subject)
    first = page(run, subject)
    write(first, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == first.files()
    longer = run_fake(replace(PASSING, name="passing-longer", parts=(CURVE,)), subject)
    write(page(longer, subject), tmp_path)
    (tmp_path / "passing-by-hand.svg").write_text("<svg/>")
    second = page(run_fake(replace(PASSING, parts=(GRID,)), subject), subject)
    write(second, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "passing-by-hand.svg",
        "passing-longer-recall-by-length.svg",
        "passing-longer.json",
        "passing-longer.md",
        "passing-needles.svg",
        "passing.json",
        "passing.md",
    ]
    assert (tmp_path / "passing.md").read_text() == second.markdown()


def test_an_error_leaves_the_files_that_were_there(subject, tmp_path, monkeypatch):
    first = page(run_fake(replace(PASSING, parts=(CURVE,)), subject), subject)
    write(first, tmp_path)
    second = page(run_fake(replace(PASSING, summary="Other.", parts=(GRID,)), subject), subject)
    genuine = Path.write_bytes

    def full(self, data):
        if self.suffix == ".md":
            genuine(self, data[:10])
            raise OSError(28, "No space left on device", str(self))
        return genuine(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write(second, tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == first.files()


def test_a_page_of_any_other_measurement(tmp_path):
    """Of parts that are not a probe's, with prose under the verdict, and without data."""
    facts = {"commit": "0123456789ab", "machine": 'two cores: "a|b"', "lengths": [1, 2]}
    parts = (Text("", "It was *asked*."), Table("Codes", ("n",), [[1]], note="One."))
    made = Page("codes", "Codes", "All found", "1 of 1.", parts, facts, None)
    write(made, tmp_path)
    text = (tmp_path / "codes.md").read_text()
    start = (
        "# Codes\n\n**All found.** 1 of 1.\n\nIt was *asked*.\n\n## Codes\n\n| n |\n| --: |\n| 1 |\n\nOne.\n\n## How"
    )
    assert text.startswith(start)
    assert foot(text) == facts
    assert [path.name for path in tmp_path.iterdir()] == ["codes.md"]


def test_vacuous_findings_give_their_reason(subject):
    text = text_of(replace(PASSING, findings=(vacuous("recall at 64", "16 entries | top-k 32", layer=3),)), subject)
    assert "- **layer 3, recall at 64**\n  - why: 16 entries \\| top-k 32" in text
