"""The experiment of Shard's stream: what it counts, what it codes, and when it shows nothing."""

import shutil
from dataclasses import replace

import pytest
import torch

from fathom.model.errors import ConfigError
from fathom.probes.finding import Verdict
from fathom.probes.kv_stream import EXACT, RANDOM, STREAMS, TRAINED, KvStream, Stream, write_random
from fathom.probes.kv_variants import FULL_CACHE, PLAIN
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.load import load_any
from fathom.runtime.memory import new_state
from fathom.runtime.options import DEMO
from tests.llama_model import oracle

PROBE = KvStream(texts=2, written=60, marks=(20, 60), forced=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    oracle(vocab_size=1024, head_dim=16, num_hidden_layers=2, max_position_embeddings=2048).save_pretrained(directory)
    shutil.copy(DEMO / "tokenizer.json", directory)
    return directory


@pytest.fixture(scope="module")
def report(llama):
    return run_probe(replace(PROBE, llama=str(llama)), Subject(options=PLAIN), silent).report


def found(report, what):
    (finding,) = (finding for finding in report.findings if finding.what == what)
    return finding


def test_what_is_told_is_what_the_texts_show(report):
    assert not report.failed
    for model in (RANDOM, TRAINED):
        assert found(report, f"{model}: divergence of the full cache from itself, nats").measured == 0
        texts = [found(report, f"{model}, {stream}: texts as with the full cache") for stream in STREAMS]
        assert all(one.evidence == {"of": 2, "tokens": 60} for one in texts)
        (table,) = (part for part in report.parts if part.title.lower() == model.lower())
        assert [row[1] for row in table.rows] == ["2 of 2", *(f"{one.measured} of 2" for one in texts)]
    coarse, fine = (
        found(report, f"{RANDOM}, {stream}: divergence from the full cache, nats") for stream in ("4 bits", "8 bits")
    )
    assert coarse.measured > 10 * fine.measured > 0, "the bits of the stream are what is measured"
    assert found(report, f"{RANDOM}: divergence with 4 bits over that with 8 bits").measured == pytest.approx(
        coarse.measured / fine.measured
    )


def test_nothing_but_the_stream_is_coded(tmp_path):
    """A prompt of sinks and window leaves the full cache's bits; one token more is coded."""
    config = write_random(tmp_path, 0)
    drawn = torch.randint(config.vocab_size, (EXACT + 2,), generator=torch.Generator().manual_seed(0))

    def logits(kv):
        model = load_any(tmp_path, replace(PLAIN, kv=kv)).model
        state = new_state(model, len(drawn), 512, EXACT)
        rows = [model.logits(model(part, state)) for part in (drawn[:EXACT], *drawn[EXACT:].split(1))]
        return [row[-1] for row in rows]

    whole, coded = logits(()), logits(("all=shard:rank=24,bits=4",))
    assert torch.allclose(whole[0], coded[0], atol=1e-5)
    assert (whole[2] - coded[2]).abs().max() > 1e-4 > (whole[0] - coded[0]).abs().max()


def test_shares_and_texts_are_counted_up_to_the_first_difference():
    one = Stream(alike=[60, 30, 10], kl=0.1, same=0.9)
    probe = replace(PROBE, texts=3)
    assert str(probe._texts(one)) == "1 of 3"
    assert probe._tokens(one, 20) == pytest.approx((20 + 20 + 10) / 60)
    assert probe._tokens(one, 60) == pytest.approx(100 / 180)


def test_a_stream_that_changes_no_distribution_is_vacuous():
    same = Stream([60, 60], 0.0, 1.0)
    report = PROBE.report({RANDOM: dict.fromkeys((FULL_CACHE, *STREAMS), same)})
    verdicts = {finding.what: finding.verdict for finding in report.findings}
    assert verdicts[f"{RANDOM}: divergence with 4 bits over that with 8 bits"] is Verdict.VACUOUS
    assert report.failed


def test_what_it_needs(tmp_path):
    assert "--numerics plain --dtype fp32" in PROBE.needs(Subject())
    assert PROBE.needs(Subject(options=PLAIN)) is None
    write_random(tmp_path, 0)  # no tokenizer
    probe = replace(PROBE, llama=str(tmp_path), texts=1, written=2, marks=(2,))
    with pytest.raises(ConfigError, match="no model of the demo language"):
        probe.measure(Subject(options=PLAIN), silent)
