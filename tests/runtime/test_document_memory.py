"""`runtime.memory_db.Memory` beside a run that never stopped; `scripts.memory_db` runs it, and its tests the rest."""

import pytest

from fathom.model.errors import StateError
from fathom.runtime.errors import PromptError
from fathom.runtime.generate import prefill
from fathom.runtime.memory_db import Memory
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.quantised_state import quantise_state
from tests.llama_model import oracle, write_tokenizer

TEXT, MORE, QUESTION = "The quick brown fox jumps over it", ", and over it", " and the lazy dog"
BOUNDED = ("all=coda:window=4,exact=2,summary=2,block=4",)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    oracle(vocab_size=264, bos_token_id=256, eos_token_id=[257, 100], num_hidden_layers=2).save_pretrained(path)
    write_tokenizer(path)
    return path


def opened(directory, kv=BOUNDED):
    return Memory.open(directory, RunOptions("plain", "fp32", kv=kv))


@pytest.mark.parametrize("kv", [BOUNDED, ()], ids=["coda", "full"])
def test_a_memory_answers_as_a_run_that_never_stopped_and_stays_as_it_was(directory, tmp_path, kv):
    memory, pieces = opened(directory, kv), []
    assert memory.tokens == 0
    assert memory.ingest(TEXT) == memory.tokens == 1 + len(TEXT)
    assert memory.ingest(MORE) == len(MORE)
    answer = memory.ask(QUESTION, max_new_tokens=5, tell=pieces.append)
    assert "".join(pieces) == answer.text
    model, tokenizer = memory.loaded.model, memory.tokenizer
    state, wanted = model.new_state(200, 200), []
    for ids in ([256, *tokenizer.encode_text(TEXT)], tokenizer.encode_text(MORE), tokenizer.encode_text(QUESTION)):
        logits = prefill(model, state, ids, lambda _: None)
    while len(wanted) < len(answer.tokens):
        wanted.append(int(logits.argmax()))
        logits = prefill(model, state, wanted[-1:], lambda _: None)
    assert answer.tokens == wanted
    assert memory.ask(answer.prompt, max_new_tokens=5) == answer, "ids as well as text, and nothing was remembered"
    memory.save(tmp_path / "state")
    again = Memory.load(tmp_path / "state", directory)
    assert again.options.kv == (("0,1=coda:window=4,exact=2,summary=2,block=4",) if kv else ())
    assert again.ask(QUESTION, max_new_tokens=5) == answer
    assert [layer["total_evictions"] for layer in again.banks()] == ([memory.tokens - 4] * 2 if kv else [])


def test_a_merged_memory_is_put_behind_the_first_and_the_other_stays(directory):
    first = opened(directory)
    second = first.empty()
    first.ingest(TEXT)
    second.ingest(MORE)
    alone = second.ask(QUESTION, max_new_tokens=3)
    kept = first.merge(second)
    assert first.tokens == 2 + len(TEXT) + len(MORE)
    assert (kept.ring_first, kept.ring_second) == (0, 2 * 4)
    assert second.ask(QUESTION, max_new_tokens=3) == alone
    assert first.ask(QUESTION, max_new_tokens=3).ended in ("eos", "limit")
    full = opened(directory, ())
    full.ingest(TEXT)
    with pytest.raises(StateError, match="layer 0 keeps full; only bounded caches"):
        full.merge(full)


def test_a_demo_document_is_read_and_asked():
    memory = Memory.open(DEMO, RunOptions(kv=("csa=shard",)))
    memory.ingest("The capital of France")
    assert memory.ask(" is", max_new_tokens=1).text == " Paris"


def test_what_cannot_be_done_is_one_line(directory, tmp_path):
    memory = opened(directory)
    with pytest.raises(PromptError, match="empty"):
        memory.ingest("")
    memory.ingest(TEXT)
    with pytest.raises(PromptError, match="empty"):
        memory.ask("")
    memory.save(tmp_path / "state")
    quantise_state(tmp_path / "state", 8, tmp_path / "small")
    small = Memory.load(tmp_path / "small", directory)
    assert small.bits == 8
    assert len(small.ask(QUESTION, max_new_tokens=2).tokens) == 2
    for done in (lambda: small.ingest(MORE), lambda: small.save(tmp_path / "no"), lambda: small.merge(small)):
        with pytest.raises(StateError, match="small: quantised to 8 bits; such a state is asked, not"):
            done()
    shard = opened(directory, ("all=shard:rank=4,sinks=1,window=2",))
    shard.ingest(TEXT)
    with pytest.raises(StateError, match="this memory: a shard layer takes a document in one go"):
        shard.ingest(MORE)
