"""The experiment of states: what is asked, how answers are counted, and that the page says what was measured."""

import math
import shutil
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from fathom.model.llama.adapters import shapes
from fathom.probes.demo_language.language import encode
from fathom.probes.demo_language.vocabulary import BOS, vocabulary_size
from fathom.probes.evaluation import Share, ask
from fathom.probes.finding import Verdict
from fathom.probes.memory_db import ABOUT, BOTH, BOUNDED, CODES, MERGED, QUICK, Tally, behind, documents
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.load import load_any
from fathom.runtime.options import DEMO, RunOptions
from tests.llama_model import oracle

KV = "all=coda:window=8,exact=4,summary=4,block=8"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    oracle(vocab_size=vocabulary_size(), num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(path)
    shutil.copy(DEMO / "tokenizer.json", path)
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
        assert sum(map(len, given.parts(50).values())) == CODES + len(given.facts)
    assert not {question.ids[3] for question in a.codes} & {question.ids[3] for question in b.codes}


def test_each_question_starts_from_the_state_and_leaves_it(directory):
    loaded = load_any(directory, RunOptions("plain", "fp32", kv=(KV,)))
    given = documents(100, 0, 1)[0]
    state, ids = behind(loaded, given.ids), [question.ids for question in given.codes]
    one = ask(loaded.model, state, ids)
    assert state.position == len(given.ids)
    for found, again, question in zip(one, ask(loaded.model, state, ids[::-1])[::-1], ids, strict=True):
        assert torch.equal(found, again)
        fresh = behind(loaded, given.ids)
        assert torch.equal(found, loaded.model.logits(loaded.model(torch.tensor(question), fresh)))


def test_answers_are_counted_and_distributions_compared():
    questions, n = documents(100, 0, 1)[0].codes[:2], vocabulary_size()
    logits = torch.zeros(2, 2, n)
    logits[0, -1, questions[0].answer] = 3.0
    logits[1, -1, questions[1].answer - 1] = 3.0
    other = deepcopy(logits)
    other[0] = 0
    found = Tally()
    found.add(list(logits), questions, list(other))
    assert (found.all, len(found.nats)) == (Share(1, 2), 4)
    assert found.nats[1] == pytest.approx(math.log((n - 1 + math.e**3) / n) - 3 / n, rel=1e-3)
    assert found.nats[2:] == pytest.approx([0, 0], abs=1e-6)
    total = Tally([Share(1, 4), Share(3, 4)])
    assert (total.all.share, total.error) == (0.5, 0.25)


def test_the_page_says_what_was_measured(directory):
    subject = Subject(directory, RunOptions("plain", "fp32"))
    probe = replace(QUICK, adapters=str(directory / "adapters"), cache=KV, lengths=(64,))
    report = run_probe(probe, subject, silent).report
    loaded, known = report.findings
    assert (loaded.measured, loaded.bound.value, loaded.verdict) == (16, 16, Verdict.PASS)
    assert known.verdict is Verdict.VACUOUS, "weights that nobody trained find nothing"
    tables = {
        part.title: {row[0]: dict(zip(part.columns, row, strict=True)) for row in part.rows}
        for part in report.parts[:2]
    }
    states, merged = tables["One document of 64 tokens"], tables["Two documents of 64 tokens in one state"]
    assert merged[MERGED].keys() == {"state", *ABOUT, BOTH}
    exact, eight, four = (
        int(states[f"{BOUNDED}{part}"]["bytes"].replace(",", "")) for part in ("", ", 8 bits", ", 4 bits")
    )
    assert four < eight < exact
    assert states[BOUNDED]["KL, mean"] is None
    eight, four = (float(states[f"{BOUNDED}, {bits} bits"]["KL, mean"]) for bits in (8, 4))
    assert 0 < eight < four
    with pytest.raises(ValueError, match="published=1, which averages one half"):
        run_probe(replace(probe, cache="all=coda:published=1"), subject, silent)
    assert "no adapters" in QUICK.needs(subject)
