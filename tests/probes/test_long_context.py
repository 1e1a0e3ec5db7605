"""The walk through a long document: what it reads, what it asks, and that the asking leaves no trace."""

import copy
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.probes import long_context
from fathom.probes.demo_language import words
from fathom.probes.demo_language.language import needle_sentence
from fathom.probes.demo_language.vocabulary import BOS, vocabulary
from fathom.probes.evaluation import restore, snapshot
from fathom.probes.finding import Verdict
from fathom.probes.long_context import (
    COMPONENTS,
    FULL,
    GAP,
    REST,
    Clock,
    Found,
    Walk,
    code_places,
    component,
    long_document,
    overlaps,
    spread,
)
from fathom.probes.probe import silent
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.planner import Planner
from fathom.scripts.probe import main

MARKS, CHUNK = (1024, 2048), 400
DECODED, RESERVED = 8, 16  # tokens that are decoded at a mark, and at the last: the page's are 32 and 64 or more


@pytest.fixture(scope="module")
def document():
    return long_document(MARKS[-1], 0)


@pytest.fixture(scope="module")
def walked(document):
    """A walk to 2048 tokens that asked for four codes at each mark, its marks, and the clock."""
    clock = Clock()
    model = Subject(options=RunOptions(prefill_chunk=CHUNK), ops=clock.watch(CPU)).model
    clock.start()
    walk = Walk(model, clock, document, MARKS, CHUNK, 4, DECODED, RESERVED)
    return walk, list(walk.run(silent))


@pytest.mark.parametrize("length", [1024, 1025, 3000, 8192])
def test_a_document_tells_each_code_once_where_it_says(length):
    document, texts = long_document(length, 3), {i: text for text, i in vocabulary().items()}
    assert len(document.ids) == length
    assert document.ids[0] == BOS
    assert document.ids.count(BOS) == 1
    for part in ({code.question[3] for code in document.codes}, {code.token for code in document.codes}):
        assert len(part) == len(document.codes)
    told = "".join(texts[i] for i in document.ids[1:])
    for code in document.codes:
        assert document.ids[code.position] == code.token
        assert document.ids[code.position - 5 : code.position] in (
            code.question,
            [vocabulary()["The"], *code.question[1:]],
        )
        name, value = texts[code.question[3]].strip(), texts[code.token].strip()
        assert told.count(needle_sentence(name, value)) == told.count(f" code of {name} ") == 1
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
        stop = document.stop_before(mark, RESERVED)
        assert stop in document.ends
        assert mark - RESERVED - 11 < stop <= mark - RESERVED
        assert len(document.told_before(stop)) == {1024: 33, 2048: 66}[mark]
        assert all(code.position + GAP < stop for code in document.told_before(stop))


def test_the_walk_ends_at_the_last_position(walked, document):
    walk, marks = walked
    assert walk.state.position == MARKS[-1]
    assert [mark.length for mark in marks] == list(MARKS)
    assert [mark.read for mark in marks] == [document.stop_before(mark, RESERVED) for mark in MARKS]
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
    marks = [SimpleNamespace(length=length, decode_wall=span) for length, span in spans.items()]
    assert "overlaps that of the mark before at 2, 4 tokens:" in overlaps(marks)
    assert overlaps(marks[1:3]) == "No spread of a decoded token overlaps that of the mark before."
    assert overlaps(marks[:1]) == ""


def test_a_walk_is_judged_by_the_plan_and_by_hand(walked):
    walk, marks = walked
    subject = Subject(options=RunOptions(prefill_chunk=CHUNK))
    loaded = subject.load()
    plan = Planner(subject.config, loaded.census, loaded.sharding, subject.options, 0, "cpu").plan(MARKS[-1])
    by_hand, calls = walk.state.nbytes(), dict(walk.held())
    found = Found(MARKS[-1], MARKS[-1], CHUNK, 1.0, "a core", walk.base_bytes, by_hand, marks, calls)

    def failed(planned=plan, **changed):
        report = long_context.report(replace(found, **changed), by_hand, planned)
        return [finding.what for finding in report.findings if finding.verdict is Verdict.FAIL]

    assert failed() == []
    assert 0.5 * plan.call.nbytes < max(calls.values()) <= plan.call.nbytes
    assert failed(position=1023) == ["position of the state at the end"]
    assert failed(allocated_bytes=by_hand | {"entries": 1}) == ["bytes of all caches"]
    late = [replace(marks[0], length=32768), replace(marks[1], length=65536)]
    grown = {"marks": late, "call_bytes": {32768: 1, 65536: 5 << 20}}
    assert failed(**grown) == ["and they grew from 32768 tokens to 65536"]
    much = {MARKS[0]: plan.call.nbytes + 1}
    assert failed(call_bytes=much) == ["tensors of a call, at the mark where they are most"]
    assert failed(replace(plan, caches={})) == ["the same as planned"]


def test_what_cannot_be_walked_is_said():
    assert "2000000 positions" in replace(FULL, lengths=(1024, 2_000_000)).needs(Subject())
    assert "too few for a question" in replace(FULL, lengths=(512,)).vacuous(Subject())
    chunk = Subject(options=RunOptions(prefill_chunk=993))
    assert "before 1024 tokens a call has 944, and those of this run have 993" in FULL.vacuous(chunk)
    assert FULL.vacuous(Subject()) is None


def test_an_experiment_is_asked_for_by_name_and_writes_its_page(tmp_path, capsys):
    flags = ["long-context", "--set", "lengths=1024", "--set", "questions=2", "--prefill-chunk", "300"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    page = (tmp_path / "long-context.md").read_text()
    assert "python -m scripts.probe long-context --set lengths=1024 --set questions=2 --out " in page
    assert "| codes found, all marks | 1 |" in page
    assert str(tmp_path) not in page
    assert (tmp_path / "long-context-prefill-by-context.svg").exists()
