"""The audit of states: what is asked, how answers are counted, and that the page says what was measured."""

import json
import math
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

from model.llama.adapters import shapes
from probes.demo_language.language import encode
from probes.demo_language.vocabulary import BOS, vocabulary_size
from runtime.load import load_any
from runtime.options import RunOptions
from scripts import measure_memory_db
from scripts.cli import run
from scripts.database.measure import BOTH, CODES, MERGED, Score, ask, documents, parts, read, score
from tests.llama_model import oracle

KV = "all=coda:window=8,exact=4,summary=4,block=8"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    oracle(vocab_size=vocabulary_size(), num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(path)
    config = load_any(path, RunOptions("plain")).model.config
    generator = torch.Generator().manual_seed(0)
    drawn = {
        f"layer_{layer}.coda.{name}": torch.randn(shape, generator=generator) * 0.3
        for layer in range(2)
        for name, shape in shapes(config).items()
    }
    save_file(drawn, path / "adapters")
    return path


def test_documents_tell_what_is_asked_and_nothing_of_each_other():
    a, b = documents(200, 3, 2)
    assert documents(200, 3, 2) == [a, b] != documents(200, 4, 2)
    for given in (a, b):
        assert given.ids[0] == BOS
        assert 150 < len(given.ids) <= 202
        assert len(given.codes) == CODES
        for question in given.codes:
            at = question.told
            assert given.ids[at] == question.answer
            assert given.ids[at - 5 : at][2:] == question.ids[2:]  # "The" may open the document
        assert all(question.ids[0] == encode("The")[0] for question in given.facts)
        assert sum(map(len, parts(given, 50).values())) == CODES + len(given.facts)
    assert not {question.ids[3] for question in a.codes} & {question.ids[3] for question in b.codes}


def test_each_question_starts_from_the_state_and_leaves_it(directory):
    loaded = load_any(directory, RunOptions("plain", "fp32", kv=(KV,)))
    given = documents(100, 0, 1)[0]
    state = read(loaded, given.ids)
    one = ask(loaded, state, given.codes)
    assert state.position == len(given.ids)
    for found, again, question in zip(one, ask(loaded, state, given.codes[::-1])[::-1], given.codes, strict=True):
        assert torch.equal(found, again)
        fresh = read(loaded, given.ids)
        assert torch.equal(found, loaded.model.logits(loaded.model(torch.tensor(question.ids), fresh)))


def test_answers_are_counted_and_distributions_compared():
    questions = documents(100, 0, 1)[0].codes[:2]
    logits = torch.zeros(2, 2, vocabulary_size())
    logits[0, -1, questions[0].answer] = 3.0
    logits[1, -1, questions[1].answer - 1] = 3.0
    other = deepcopy(logits)
    other[0] = 0
    found = score(list(logits), questions, list(other))
    assert (found.right, found.total, len(found.nats)) == (1, 2, 4)
    n = vocabulary_size()
    assert found.nats[1] == pytest.approx(math.log((n - 1 + math.e**3) / n) - 3 / n, rel=1e-3)
    assert found.nats[2:] == pytest.approx([0, 0], abs=1e-6)
    total = Score()
    for right in (1, 3):
        total.add(Score(right, 4))
    assert (total.share, total.error) == (0.5, 0.25)


def test_the_page_says_what_was_measured(directory, tmp_path, capsys):
    out = tmp_path / "page.md"
    flags = ["--model", str(directory), "--coda-adapters", str(directory / "adapters"), "--kv", KV, "--page", str(out)]
    assert measure_memory_db.main([*flags, "--lengths", "64", "--pairs", "1", "--dtype", "fp32"]) == 0
    text, data = out.read_text(), json.loads(out.with_suffix(".json").read_text())
    assert str(tmp_path) not in text
    assert "16 of 16 questions put to a state that was saved and loaded had logits equal" in text
    one = data["lengths"][0]
    assert one["merged"][MERGED][BOTH]["total"] == 2 * CODES
    assert f"| {MERGED} | " in text
    exact, eight, four = (one["bytes"][f"adapters, bounded{part}"] for part in ("", ", 8 bits", ", 4 bits"))
    assert four < eight < exact
    nats = [one["states"][f"adapters, bounded{part}"]["facts"]["kl_mean"] for part in ("", ", 8 bits", ", 4 bits")]
    assert nats[0] == 0 < nats[1] < nats[2]
    capsys.readouterr()
    assert run(lambda: measure_memory_db.main([*flags, "--kv", "all=coda:published=1"])) == 2
    assert "published=1, which averages one half" in capsys.readouterr().err
