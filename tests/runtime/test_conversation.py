"""Turns over one state: what the model has read is what `runtime.text` makes of the turns, to the token, and the state
is that of these tokens, however it came to them."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from fathom.model.checkpoint.mtp import Head
from fathom.model.errors import CapacityError, StateError
from fathom.model.state import State
from fathom.runtime import conversation as module
from fathom.runtime.conversation import Conversation, Format, Stopped
from fathom.runtime.errors import PromptError
from fathom.runtime.generate import Generation, generate, prefill
from fathom.runtime.load import load, load_any
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sampling import Sampling
from fathom.runtime.statefile import copy_state, load_state, save_state
from fathom.runtime.text.encoding import encode_messages
from fathom.runtime.text.messages import check_messages
from fathom.runtime.text.tokenizer import Tokenizer
from tests.llama_model import LLAMA3, oracle, write_tokenizer
from tests.make_checkpoint import DSPARK, tiny_config, write_checkpoint

PLAIN = RunOptions("plain", "fp32", prefill_chunk=8)
QUESTIONS = ("What is the capital of France?", "What is the capital of Japan?", "What is the currency of Japan?")
CHAT, THINKING = Format(), Format(thinking=True)


@pytest.fixture(scope="module")
def loaded():
    return load(DEMO, PLAIN)


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return Tokenizer(DEMO, loaded.model.config.vocab_size)


class Spy:
    """A model that notes which token it reads at which position, of any state."""

    def __init__(self, model):
        self.model, self.read, self.count = model, [], 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, tokens, state):
        self.read[state.position :] = tokens.tolist()
        self.count += len(tokens)
        return self.model(tokens, state)


@pytest.fixture
def talk(loaded, tokenizer):
    return lambda form=CHAT, context=512: Conversation(
        loaded._replace(model=Spy(loaded.model)), PLAIN, tokenizer, form, context
    )


def said(talk, text, limit=None, **more):
    """Say something and take all of the answer; returns its tokens."""
    record = Generation()
    assert list(talk.reply(text, sampling=Sampling(), record=record, limit=limit, **more).tokens) == [
        token for token in record.tokens if token not in talk.loaded.model.config.eos_token_ids
    ]
    return record.tokens


def encoded(talk, turns):
    """The official encoding of turns up to where the model is to answer."""
    segments = encode_messages(check_messages(turns), thinking=talk.form.thinking, effort=talk.form.effort)
    return talk.tokenizer.encode(segments)


def logits_after(talk, tokens):
    """The logits of a fresh run of these tokens, and of the conversation's state after one more token."""
    model = talk.loaded.model.model
    fresh = prefill(model, model.new_state(512, 8), tokens, lambda _: None)
    return fresh, model.logits(model(torch.tensor(tokens[-1:]), talk.state)[-1:])[0]


@pytest.mark.parametrize(
    "form", [CHAT, Format(thinking=True, effort="Think hard.", system="You answer.")], ids=["chat", "thinking"]
)
def test_what_was_read_is_the_encoding_of_the_whole_conversation(talk, form):
    talk = talk(form)
    for question in QUESTIONS:
        before = talk.turns
        chosen = said(talk, question)
        assert talk.turns[:-2] == before
        assert talk.turns[-1]["content"].endswith("."), "the demo ends its answers"
        assert ("reasoning_content" in talk.turns[-1]) == form.thinking
        wanted = encoded(talk, talk.turns[:-1]) + chosen
        assert talk.tokens == wanted
        assert talk.held == talk.loaded.model.read == wanted[:-1], "the last token chosen is not run"
    fresh, ours = logits_after(talk, wanted)
    assert (fresh - ours).abs().max() < 1e-3  # rounding of fp32 is below 1e-4 here, another token in the past above 1


def test_only_what_is_new_is_run(talk):
    """Without thinking each token once; with it, an answer is read once more, without its reasoning."""
    chat, thinking = talk(), talk(THINKING)
    chosen = []
    for question in QUESTIONS:
        said(chat, question)
        chosen.append(said(thinking, question))
    assert chat.loaded.model.count == len(chat.held)
    prompts = [len(encoded(thinking, thinking.turns[: 2 * turn + 1])) for turn in range(3)]
    kept = [0, *(length - 1 for length in prompts[:-1])]  # all but <think>, in place of which </think> comes
    new = [length - held for length, held in zip(prompts, kept, strict=True)]
    assert thinking.loaded.model.count == sum(new) + sum(len(tokens) - 1 for tokens in chosen)


def test_an_answer_is_that_of_generate_over_the_same_messages(talk):
    talk = talk(THINKING)
    for question in QUESTIONS:
        chosen = said(talk, question)
    model, record = talk.loaded.model.model, Generation()
    prompt = encoded(talk, talk.turns[:-1])
    rules = {"eos": model.config.eos_token_ids, "limit": 100, "sampling": Sampling(), "progress": lambda _: None}
    list(generate(model, model.new_state(512, 8), prompt, record=record, **rules))
    assert record.tokens == chosen


def test_an_answer_that_is_spelled_otherwise_is_read_as_its_text_is_encoded(talk, monkeypatch):
    """ " Tokyo" byte by byte: nobody's encoding of that text, so the state cannot go on with it."""
    talk = talk()
    by_bytes = [token for letter in " Tokyo" for token in talk.tokenizer.encode_text(letter)]
    assert talk.tokenizer.encode_text(" Tokyo") != by_bytes

    def spelled(model, state, prompt, *, record, progress, **_):
        prefill(model, state, prompt, progress)
        record.tokens += by_bytes
        yield from by_bytes

    with monkeypatch.context() as patch:
        patch.setattr(module, "generate", spelled)
        list(talk.reply(QUESTIONS[1], sampling=Sampling(), record=Generation()).tokens)
    assert talk.turns[-1] == {"role": "assistant", "content": " Tokyo"}
    chosen = said(talk, QUESTIONS[0])
    assert talk.tokens == encoded(talk, talk.turns[:-1]) + chosen
    assert talk.loaded.model.read == talk.tokens[:-1]


@pytest.mark.parametrize("form", [CHAT, THINKING], ids=["chat", "thinking"])
@pytest.mark.parametrize("draft", ["lookup", "mtp", "dspark"])
def test_a_conversation_with_drafts_is_the_same(tmp_path, tokenizer, form, draft):
    """Also broken off, and over turns: what is looked up are tokens of all turns, and a head goes on from the last."""
    if draft != "lookup":
        kind, more = {"mtp": (Head.MTP, {}), "dspark": (Head.DSPARK, DSPARK)}[draft]
        write_checkpoint(tmp_path, tiny_config(vocab_size=1024, **more), seed=4, head=kind)
    options = replace(PLAIN, draft=draft, draft_tokens=4)
    both = load(DEMO if draft == "lookup" else tmp_path, options)
    told = []
    for chosen in (options, PLAIN):
        talk = Conversation(both._replace(directory=DEMO), chosen, tokenizer, form, 512)
        said = []
        for text, taken in zip(QUESTIONS, (20, 7, 20), strict=True):
            record = Generation()
            reply = talk.reply(text, sampling=Sampling(0.7, 1.0, 5), record=record, limit=20).tokens
            said.append([token for _, token in zip(range(taken), reply, strict=False)])
            reply.close()
            said.append(logits_of(talk))
        told.append(said)
        if chosen.draft != "off":
            assert record.drafted, "nothing was drafted"
            if draft != "lookup" and form is THINKING:
                assert talk.drafting.drafter.state.first < talk.state.position - record.prompt, (
                    "the prompt was read too"
                )
            if draft != "lookup":
                drafter = talk.drafting.drafter
                assert (drafter.before, drafter.state.position <= talk.state.position) == (0, True)
                assert talk.state.position - drafter.state.position <= 5, "behind the last draft nothing is left but it"
    ours, wanted = told
    for one, other in zip(ours, wanted, strict=True):
        assert one == other if isinstance(one, list) else torch.equal(one, other)


def logits_of(talk):
    """What the state says next; a state in use is not moved on by it."""
    copy = talk.loaded.model.new_state(512, 8, rewind=talk.state.kept)
    copy_state(talk.state, copy)
    return talk.loaded.model.logits(talk.loaded.model(torch.tensor([5]), copy))[0]


@pytest.mark.parametrize("form", [CHAT, THINKING], ids=["chat", "thinking"])
def test_an_answer_broken_off_is_a_turn_and_the_next_one_follows_it(talk, form):
    talk = talk(form)
    tokens = talk.reply(QUESTIONS[0], sampling=Sampling(), record=Generation()).tokens
    with closing(tokens):
        part = [next(tokens), next(tokens)]
    text = talk.tokenizer.decode(part)
    turn = {"reasoning_content": text, "content": ""} if form.thinking else {"content": text}
    assert talk.turns[-1] == {"role": "assistant", **turn}
    chosen = said(talk, QUESTIONS[1])
    assert talk.tokens == encoded(talk, talk.turns[:-1]) + chosen
    assert talk.loaded.model.read == talk.tokens[:-1]
    assert "Tokyo" in talk.turns[-1]["content"]


@pytest.mark.parametrize("form", [CHAT, THINKING], ids=["chat", "thinking"])
@pytest.mark.parametrize("before", [0, 1])
def test_a_message_stopped_while_it_is_read_was_never_said(talk, form, before):
    never, stopped = talk(form), talk(form)
    for question in QUESTIONS[:before]:
        said(never, question)
        said(stopped, question)

    def stop(_):
        raise Stopped

    with pytest.raises(Stopped):
        said(stopped, "The old farmer carried a letter to the town. " * 3, progress=stop)
    assert (stopped.turns, stopped.tokens) == (never.turns, never.tokens)
    assert said(stopped, QUESTIONS[2]) == said(never, QUESTIONS[2])
    assert stopped.loaded.model.read == never.loaded.model.read


def test_an_error_in_a_call_costs_the_state_and_no_turn(talk, monkeypatch):
    talk = talk()
    said(talk, QUESTIONS[0])
    turns = talk.turns
    with monkeypatch.context() as patch:
        patch.setattr(State, "reserve", lambda *_: pytest.fail("broken"))
        with pytest.raises(pytest.fail.Exception):
            said(talk, QUESTIONS[1])
    assert talk.turns == turns
    assert talk.state is None
    chosen = said(talk, QUESTIONS[1])
    assert talk.loaded.model.read == talk.tokens[:-1]
    assert talk.tokens == encoded(talk, talk.turns[:-1]) + chosen


def test_a_full_context_is_told_and_nothing_is_lost(talk, tmp_path):
    small = talk(context=24)
    said(small, QUESTIONS[0])
    kept = (small.turns, small.tokens, small.held)
    with pytest.raises(CapacityError, match="the context of 24 tokens has no room for this message: with it"):
        said(small, QUESTIONS[1])
    assert (small.turns, small.tokens, small.held) == kept
    small.save(tmp_path / "full")
    large = talk()
    large.load(tmp_path / "full")
    assert "Tokyo" in large.tokenizer.decode(said(large, QUESTIONS[1]))
    with pytest.raises(StateError, match=r"full: holds 18 tokens, --max-context is 9$"):
        talk(context=9).load(tmp_path / "full")


def test_an_answer_ends_with_the_context(talk):
    talk = talk(context=14)
    said(talk, QUESTIONS[0])
    assert talk.full
    assert len(talk.held) == 14
    assert len(talk.tokens) == 15, "the last token chosen is not run"


@pytest.mark.parametrize("form", [CHAT, THINKING], ids=["chat", "thinking"])
def test_a_saved_conversation_goes_on_as_if_it_had_not_been(talk, form, tmp_path):
    straight, loaded = talk(form), talk(form)
    first = said(straight, QUESTIONS[0])
    straight.save(tmp_path / "talk")
    said(loaded, "Something else.", limit=3)
    loaded.load(tmp_path / "talk")
    assert (loaded.turns, loaded.tokens, loaded.held) == (straight.turns, straight.tokens, straight.held)
    assert said(loaded, QUESTIONS[1]) == said(straight, QUESTIONS[1])
    assert loaded.tokens == straight.tokens
    loaded.reset()
    assert said(loaded, QUESTIONS[0]) == first


def test_a_conversation_saved_after_a_message_was_taken_back(talk, tmp_path):
    one, other = talk(), talk()
    said(one, QUESTIONS[0])

    def stop(_):
        raise Stopped

    with pytest.raises(Stopped):
        said(one, "The old farmer carried a letter to the town. " * 3, progress=stop)
    one.save(tmp_path / "talk")
    other.load(tmp_path / "talk")
    assert other.held == one.held != one.tokens[: len(one.held)]
    said(other, QUESTIONS[1])
    assert other.tokens == encoded(other, other.turns[:-1]) + other.tokens[len(encoded(other, other.turns[:-1])) :]
    assert other.turns[1]["content"] == one.turns[1]["content"]


def test_generate_takes_a_saved_conversation(talk, loaded, tmp_path):
    talk = talk()
    said(talk, QUESTIONS[0])
    talk.save(tmp_path / "talk")
    state = loaded.model.new_state(64, 8)
    assert load_state(tmp_path / "talk", state, loaded) == talk.tokens[-1]
    assert state.position == len(talk.held)


def test_what_cannot_be_loaded_leaves_the_conversation(talk, loaded, tokenizer, tmp_path):
    here = talk()
    with pytest.raises(StateError, match="nothing to save"):
        here.save(tmp_path / "empty")
    said(here, QUESTIONS[0])
    here.save(tmp_path / "talk")
    kept = (here.turns, here.tokens, here.held)
    save_state(tmp_path / "state", here.state, loaded, None)
    save_state(tmp_path / "odd", here.state, loaded, None, '{"raw": false, "turns": [], "tokens": [], "beyond": []}')
    other = load(DEMO, RunOptions("plain", "bf16", prefill_chunk=8))
    raw = talk(Format(raw=True))
    damaged = bytearray((tmp_path / "talk").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    for conversation, name, why in (
        (here, "state", "holds no conversation"),
        (here, "odd", "its conversation cannot be read"),
        (here, "damaged", "does not match its checksum"),
        (raw, "talk", "a conversation in the chat format, this one is raw text"),
        (Conversation(other, other and RunOptions("plain"), tokenizer, CHAT, 64), "talk", "saved with dtype"),
    ):
        with pytest.raises(StateError, match=why):
            conversation.load(tmp_path / name)
    assert (here.turns, here.tokens, here.held) == kept
    assert "Tokyo" in here.tokenizer.decode(said(here, QUESTIONS[1]))


@pytest.mark.parametrize("kv", ["full", "shard:rank=8,window=4", "coda:window=4,exact=2,summary=2"])
def test_raw_turns_of_a_llama_follow_each_other_whatever_it_remembers(tmp_path, kv):
    oracle(vocab_size=264, rope=LLAMA3, bos_token_id=256, eos_token_id=257, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    write_tokenizer(tmp_path)
    options = RunOptions("plain", "fp32", prefill_chunk=512, kv=(f"all={kv}",))
    loaded, tokenizer = load_any(tmp_path, options), Tokenizer(tmp_path, 264)
    with pytest.raises(PromptError, match="no chat format of a llama model"):
        Conversation(loaded, options, tokenizer, CHAT, 128)
    straight, broken = (Conversation(loaded, options, tokenizer, Format(raw=True), 128) for _ in range(2))
    first, second = "The quick brown fox jumps over", " and then"
    chosen = said(straight, first, limit=5)
    assert straight.tokens == [256, *tokenizer.encode_text(first), *chosen]
    said(broken, first, limit=5)
    broken.save(tmp_path / "talk")
    broken.load(tmp_path / "talk")
    more = said(straight, second, limit=5)
    assert straight.tokens == [256, *tokenizer.encode_text(first), *chosen, *tokenizer.encode_text(second), *more]
    assert straight.held == straight.tokens[:-1]
    assert said(broken, second, limit=5) == more
