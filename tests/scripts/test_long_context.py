"""The walk through a long document: what it reads, what it asks, and that the asking leaves no trace."""

import copy
import json
import random
from dataclasses import replace

import pytest
import torch

from kernels.ops import CPU
from probes.demo_language import words
from probes.demo_language.language import needle_sentence
from probes.demo_language.vocabulary import BOS, vocabulary
from probes.finding import Verdict
from probes.subject import Subject
from runtime.options import RunOptions
from runtime.plan.planner import Planner
from scripts.cli import run
from scripts.long import document as documents
from scripts.long import walk as walks
from scripts.long.document import GAP, code_places, long_document
from scripts.long.report import overlaps, report
from scripts.long.snapshot import restore, snapshot
from scripts.long.timing import COMPONENTS, REST, Clock, component
from scripts.long.walk import Mark, Walk, spread
from scripts.long_context import main
from scripts.paths import AUDITS

MARKS, CHUNK = (1024, 2048), 400
DECODED, RESERVED = 8, 16  # tokens that are decoded at a mark, and at the last: the page's are 32 and 64 or more


@pytest.fixture(scope="module", autouse=True)
def _few_decoded():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walks, "DECODED", DECODED)
        patch.setattr(documents, "RESERVED", RESERVED)
        yield


@pytest.fixture(scope="module")
def document():
    return long_document(MARKS[-1], 0)


@pytest.fixture(scope="module")
def walked(document):
    """A walk to 2048 tokens that asked for four codes at each mark, its marks, and the clock."""
    clock = Clock()
    model = Subject(options=RunOptions(prefill_chunk=CHUNK), ops=clock.watch(CPU)).model
    clock.start()
    walk = Walk(model, clock, document, MARKS, CHUNK, 4)
    return walk, [step for step in walk.run() if isinstance(step, Mark)]


@pytest.mark.parametrize("length", [1024, 1025, 3000, 8192])
def test_a_document_tells_each_code_once_where_it_says(length):
    document, texts = long_document(length, 3), {i: text for text, i in vocabulary().items()}
    assert len(document.ids) == length
    assert document.ids[0] == BOS
    assert document.ids.count(BOS) == 1
    assert (
        len({code.name for code in document.codes})
        == len({code.code for code in document.codes})
        == len(document.codes)
    )
    told = "".join(texts[i] for i in document.ids[1:])
    for code in document.codes:
        assert document.ids[code.position] == code.token
        assert document.ids[code.position - 5 : code.position] in (
            code.question,
            [vocabulary()["The"], *code.question[1:]],
        )
        assert told.count(needle_sentence(code.name, code.code)) == told.count(f" code of {code.name} ") == 1
    for end in document.ends[1:]:
        assert texts[document.ids[end - 1]] == "."


def test_codes_are_shared_out_over_stretches_that_double():
    places = code_places(1 << 20, len(words.NAMES))
    assert len(places) == 66
    for low in (0, *(1 << i for i in range(10, 20))):
        stretch = [place for place in places if low <= place < max(1024, 2 * low)]
        assert len(stretch) == 6
        assert stretch[0] - low < 0.1 * max(1024, 2 * low)  # its beginning is not left out
        assert max(1024, 2 * low) - stretch[-1] > RESERVED + GAP  # and all can be asked for at its end
    assert places == sorted(places)


def test_stops_are_ends_of_sentences_with_room_before_the_mark(document):
    for mark in MARKS:
        stop = document.stop_before(mark)
        assert stop in document.ends
        assert mark - RESERVED - 11 < stop <= mark - RESERVED
        assert len(document.told_before(stop)) == {1024: 33, 2048: 66}[mark]
        assert all(code.position + GAP < stop for code in document.told_before(stop))


def test_the_walk_ends_at_the_last_position(walked, document):
    walk, marks = walked
    assert walk.state.position == MARKS[-1]
    assert [mark.length for mark in marks] == list(MARKS)
    assert [mark.read for mark in marks] == [document.stop_before(mark) for mark in MARKS]
    assert [len(mark.decode_wall) for mark in marks] == [DECODED, MARKS[1] - marks[1].read]
    assert [len(mark.prefill_wall) for mark in marks] == [
        marks[0].read // CHUNK,
        (marks[1].read - marks[0].read - DECODED) // CHUNK,
    ]


def test_the_questions_leave_no_trace(walked, document):
    walk, marks = walked
    ids, state = torch.tensor(document.ids), walk.model.new_state(MARKS[-1], CHUNK)
    for mark in marks:
        for part in ids[state.position : mark.read].split(CHUNK):
            walk.model(part, state)
        for token in ids[state.position :][: len(mark.decode_wall)].split(1):
            walk.model(token, state)
    assert state.position == MARKS[-1]
    for plain, asked in zip(state.layers, walk.state.layers, strict=True):
        for name, tensor in plain.tensors(MARKS[-1]).items():
            assert torch.equal(tensor, asked.tensors(MARKS[-1])[name]), name


def test_every_answer_is_that_of_the_prompt_alone(walked, document):
    walk, marks = walked
    for mark in marks:
        told = spread(document.told_before(mark.read), 4)
        assert [answer.position for answer in mark.answers] == [code.position for code in told]
        for code, answer in list(zip(told, mark.answers, strict=True))[::3]:
            prompt = torch.tensor([*document.ids[: mark.read], *code.question])
            state = walk.model.new_state(len(prompt), CHUNK)
            for part in prompt.split(CHUNK):
                hidden = walk.model(part, state)
            logits = walk.model.logits(hidden[-1:])[0]
            others = torch.cat((logits[: code.token], logits[code.token + 1 :]))
            assert answer.rank == int((others > logits[code.token]).sum()) == 0
            # deployed numerics: a last bit may cross an FP8 boundary where calls end elsewhere
            assert answer.margin == pytest.approx((logits[code.token] - others.max()).item(), abs=0.5)
            assert answer.probability == pytest.approx(logits.softmax(0)[code.token].item(), abs=0.02)
            assert answer.back == pytest.approx(1 - code.position / mark.read)


@pytest.mark.parametrize("position", [1, 3, 127, 128, 130, 301])
def test_a_state_comes_back_bit_by_bit(position):
    model = Subject().model
    rng = random.Random(position)
    ids = torch.tensor([BOS, *(rng.randrange(300, 900) for _ in range(600))])
    state = model.new_state(700, 300)
    for part in ids[:position].split(300):
        model(part, state)
    before = [cache.tensors(position) for cache in state.layers]
    before = [{name: x.clone() for name, x in tensors.items()} for tensors in before]
    saved = snapshot(state)
    expected = model(ids[position : position + 150], copied := copy.deepcopy(state))
    model(ids[-200:], state)
    restore(state, saved)
    assert state.position == position
    for tensors, cache in zip(before, state.layers, strict=True):
        now = cache.tensors(position)
        assert tensors.keys() == now.keys()
        assert all(torch.equal(tensors[name], now[name]) for name in now)
    assert torch.equal(model(ids[position : position + 150], state), expected)
    assert state.position == copied.position


def test_the_clock_gives_each_op_its_time(walked):
    _, marks = walked
    for mark in marks:
        for components, whole in (
            (mark.prefill_components, mark.prefill_processor),
            (mark.decode_components, mark.decode_processor),
        ):
            assert set(components) == set(COMPONENTS)
            assert all(seconds >= 0 for seconds in components.values())
            assert sum(components.values()) == pytest.approx(sum(whole) / len(whole), rel=0.5)  # medians of each
            assert components[REST] < 0.5 * sum(components.values())
    clock = Clock()
    ops = clock.watch(CPU._replace(select=lambda *_: sum(range(2_000_000)), hadamard=lambda x: x))
    clock.start()
    ops.select(1, 2)
    ops.hadamard(1)
    found = clock.stop()
    assert max(found, key=found.__getitem__) == "select"
    assert found["select"] > 20 * found["rounding"] > 0


def test_attend_is_told_apart_by_what_it_reads():
    x = object()
    assert component("attend", (x, x, 0, 16, None, 0, None, x)) == "attend, SWA"
    assert component("attend", (x, x, 0, 16, x, 128, None, x)) == "attend, HCA"
    assert component("attend", (x, x, 0, 16, x, 4, x, x)) == "attend, CSA"


def test_the_page_says_where_a_difference_is_noise():
    spans = {1: (1.0, 2.0), 2: (1.9, 3.0), 3: (3.1, 4.0), 4: (0.5, 5.0)}
    marks = [{"length": length, "decode_wall": span} for length, span in spans.items()]
    assert "overlaps that of the mark before at 2, 4 tokens:" in overlaps(marks)
    assert overlaps(marks[1:3]) == "No spread of a decoded token overlaps that of the mark before."
    assert overlaps(marks[:1]) == ""


def test_the_command_writes_a_page_and_can_write_it_again(tmp_path, capsys):
    first, again, data = tmp_path / "first", tmp_path / "again", tmp_path / "found.json"
    first.mkdir()
    again.mkdir()
    flags = ["--lengths", "1024", "--questions", "2", "--prefill-chunk", "300"]
    assert main([*flags, "--json", str(data), "--out", str(first)]) == 0
    assert "at 1024 tokens: a call" in capsys.readouterr().err
    assert main([*flags, "--saved", str(data), "--out", str(again)]) == 0
    page = (first / "long-context.md").read_text()
    assert 'command: "python -m scripts.long_context --lengths 1024 --questions 2 --prefill-chunk 300"' in page
    assert "| codes found, all marks | 1 |" in page
    assert str(tmp_path) not in page
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in again.iterdir())
    assert {"long-context.json", "long-context.md", "long-context-prefill-by-context.svg"} <= set(names)
    for name in names:
        ours, theirs = (
            [line for line in (folder / name).read_text().splitlines() if "seconds" not in line]
            for folder in (first, again)
        )
        assert ours == theirs, name

    found = json.loads(data.read_text())
    subject = Subject(options=RunOptions(prefill_chunk=300))
    loaded = subject.load()
    plan = Planner(subject.config, loaded.census, loaded.sharding, subject.options, 0, "cpu").plan(1024)
    by_hand, call, late = found["allocated_bytes"], found["call_bytes"]["1024"], found["marks"][0]
    grown = {
        "marks": [late | {"length": 32768}, late | {"length": 65536}],
        "call_bytes": {"32768": 1, "65536": 5 << 20},
    }

    def failed(changed, planned=plan):
        return [f.what for f in report(found | changed, by_hand, planned).findings if f.verdict is Verdict.FAIL]

    assert failed({}) == []
    assert 0.5 * plan.call.nbytes < call <= plan.call.nbytes
    assert failed({"position": 1023}) == ["position of the state at the end"]
    assert failed({"allocated_bytes": by_hand | {"entries": 1}}) == ["bytes of all caches"]
    assert failed(grown) == ["and they grew from 32768 tokens to 65536"]
    much = {"call_bytes": {"1024": plan.call.nbytes + 1}}
    assert failed(much) == ["tensors of a call, at the mark where they are most"]
    assert failed({}, replace(plan, caches={})) == ["the same as planned"]

    data.write_text(json.dumps(found | {"weights": "0"}))
    for arguments, words_of_it in (
        ([*flags, "--saved", str(data)], "weights is 0, here it is"),
        (["--lengths", "1024,2000000"], "--lengths: 2000000 tokens, the model has 1048576 positions"),
        ([*flags, "--saved", str(first / "long-context.md")], "no result of a walk (ValueError: damaged JSON"),
    ):
        assert run(lambda given=arguments: main([*given, "--out", str(again)])) == 2
        assert words_of_it in capsys.readouterr().err
    data.write_text(json.dumps(found | {"position": 900}))
    assert run(lambda: main([*flags, "--saved", str(data), "--out", str(again)])) == 2
    assert "the walk stopped at 900 of 1024 tokens" in capsys.readouterr().err
    before = {path: path.read_bytes() for path in AUDITS.glob("long-context*")}
    for arguments, words_of_it in (
        (["--lengths", "512", "--out", str(again)], "too few for a question"),
        (["--lengths", "1024", "--prefill-chunk", "993", "--out", str(again)], "before 1024 tokens, a call has 992"),
        (["--lengths", "1024"], "--lengths: audits has the page of a run without it; --out FOLDER takes this one's"),
        (["--seed", "1"], "--seed: audits has the page of a run without it"),
    ):
        assert run(lambda given=arguments: main(given)) == 2
        assert words_of_it in capsys.readouterr().err
    assert {path: path.read_bytes() for path in AUDITS.glob("long-context*")} == before
