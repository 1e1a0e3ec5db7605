"""The small Llama: its network is transformers', its first weights look codes up, the product reads its files."""

import json
import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig as TheirConfig
from transformers import LlamaForCausalLM

from fathom.model.errors import CheckpointError, ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.probes.demo_language.language import Answer, needle_document
from fathom.probes.demo_language.prompts import Prompt, fact_prompts
from fathom.probes.demo_language.vocabulary import BOS
from fathom.probes.subject import speaks_demo_language
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts import train_llama as command
from fathom.scripts.train.documents import Cell, draw_batch
from fathom.scripts.train.files import LLAMA, read_llama, write_llama
from fathom.scripts.train.initial import initialise_llama
from fathom.scripts.train.learning import LOOKING_UP, source_loss, train_llama
from fathom.scripts.train.learning import right_answers as answered
from fathom.scripts.train.llama_network import Network, Seen
from fathom.scripts.train.measure import right_answers, share

SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
CELLS = (Cell(64, (2, 3), (2, 3), 1.0, 0.5, 0.0),)


def fields(**changes):
    return LLAMA | SMALL | changes


def random_network(seed=0, **changes):
    """Every parameter moved off its initial value: no norm is 1."""
    network = Network(LlamaConfig.from_json(fields(**changes), "config"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else noise * parameter.shape[1] ** -0.5)
    return network


def started(seed=0, **changes):
    network = Network(LlamaConfig.from_json(fields(**changes), "config"))
    initialise_llama(network, seed)
    return network


def logits_of(network, ids, positions=None):
    positions = torch.arange(ids.shape[1]).expand_as(ids) if positions is None else positions
    return network(ids, positions)


@torch.no_grad()
def test_logits_are_those_of_transformers():
    network = random_network()
    theirs = TheirConfig(**{name: value for name, value in fields().items() if name != "torch_dtype"})
    model = LlamaForCausalLM(theirs).float().eval()
    model.load_state_dict(network.state_dict(), strict=True)
    ids = torch.randint(0, network.config.vocab_size, (3, 70), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(70) + torch.tensor([[0], [1000], [0]])
    positions[2, 40:] += 12345  # as the documents of training jump
    ours, expected = logits_of(network, ids, positions), model(ids, position_ids=positions).logits
    assert expected.std() > 0.5
    assert (ours - expected).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_the_product_computes_what_was_trained(tied, tmp_path):
    network = random_network(tie_word_embeddings=tied)
    write_llama(network, fields(tie_word_embeddings=tied), tmp_path)
    again = read_llama(tmp_path)
    for name, value in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16().float()), name
    model = load_any(tmp_path, RunOptions("plain", "fp32")).model
    ids = torch.randint(0, network.config.vocab_size, (50,), generator=torch.Generator().manual_seed(2))
    ours = model.logits(model(ids, model.new_state(50, 50)))
    assert (ours - logits_of(again, ids[None])[0]).abs().max() < 1e-4


def test_a_text_gets_the_bos_that_every_document_has(tmp_path):
    write_llama(random_network(), fields(), tmp_path)
    tokenizer = Tokenizer(tmp_path, LLAMA["vocab_size"])
    ids = tokenizer.encode([*tokenizer.before_text(), Text("The code of Alice is 47.")])
    assert ids[0] == BOS
    assert len(ids) == 8
    assert tokenizer.decode_segments(ids[1:]) == [Text("The code of Alice is 47.")]


def test_what_is_trained_speaks_the_demos_language(tmp_path):
    """By the tokenizer that train_llama writes, which is the demo's but for the BOS that it puts before a text."""
    write_llama(random_network(), fields(), tmp_path)
    assert speaks_demo_language(tmp_path)
    other = json.loads((tmp_path / "tokenizer.json").read_text())
    other["model"]["vocab"].popitem()
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    assert not speaks_demo_language(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    assert not speaks_demo_language(tmp_path)


def test_a_checkpoint_is_read_as_strictly_as_by_the_product(tmp_path):
    network = random_network()
    write_llama(network, fields(num_hidden_layers=3), tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        read_llama(tmp_path)
    mistral = fields(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64)
    write_llama(network, {k: v for k, v in mistral.items() if k not in ("attention_bias", "mlp_bias")}, tmp_path)
    with pytest.raises(ConfigError, match="sliding_window is 64"):
        read_llama(tmp_path)


def attention_of(seen):
    """Attention of every head, [b, H, t, t], of what a layer recorded."""
    q, k = seen.q.transpose(1, 2), seen.k.transpose(1, 2)
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
    return logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


@torch.no_grad()
def test_first_weights_look_back_and_find_the_name_asked_for():
    """Heads 0 and 1 of layer 0 read one and two tokens back; later layers prefer the code whose name is asked for."""
    network = Network(LlamaConfig.from_json(LLAMA, "config"))
    initialise_llama(network, 3)
    document = needle_document(random.Random(4), 512, 12, 12, chat=False, gap=128)
    ids, record = torch.tensor([document.ids]), [[] for _ in network.blocks()]
    network(ids, torch.arange(512)[None], record)
    back = attention_of(record[0][0])[0]
    for head, distance in ((0, 1), (1, 2)):
        assert back[head].diagonal(-distance).min() > 0.9
    for (seen,) in record[LOOKING_UP]:
        mass = attention_of(seen)[0].mean(0)  # [t, t]
        codes = torch.tensor([answer.source for answer in document.answers if answer.source >= 0])
        asked = [answer for answer in document.answers if answer.source >= 0]
        best = [int(codes[mass[answer.position, codes].argmax()]) == answer.source for answer in asked]
        assert sum(best) >= 6  # of 12; by chance one


def test_supervision_is_minus_the_log_of_the_mass_on_the_value():
    batch = draw_batch(random.Random(0), cells=CELLS, tokens=256)
    b, t = batch.ids.shape
    known = batch.sources >= 0
    flat = Seen(torch.zeros(b, t, 4, 8), torch.zeros(b, t, 2, 8))  # every token attends to all before it alike
    by_hand = sum(math.log(q + 1) for q in batch.queries[known].tolist()) / int(known.sum())
    assert float(source_loss(batch, [flat])) == pytest.approx(by_hand, rel=1e-5)
    row, source = (int(part[known][0]) for part in (batch.rows, batch.sources))
    keys = torch.zeros(b, t, 2, 8)
    keys[row, source, 1, 0] = 8**0.5 * 3.0  # KV head 1: heads 2 and 3
    drawn = source_loss(batch, [Seen(torch.ones(b, t, 4, 8), keys)])
    others = [(r, q) for r, q in zip(batch.rows[known].tolist(), batch.queries[known].tolist(), strict=True)]
    # the question itself, heads 2 and 3, now has e^3 for its value; another question of that row has it to compete with
    total = 0.0
    for (r, q), s in zip(others, batch.sources[known].tolist(), strict=True):
        crowd = math.log(q + 1)
        loud = math.log(q + math.exp(3.0)) if r == row and source <= q else crowd
        total += crowd / 2 + (loud - 3.0 * (r == row and s == source)) / 2
    assert float(drawn) == pytest.approx(total / len(others), rel=1e-5)


def curve(network, steps, seed, draw):
    losses = []
    train_llama(network, steps, seed, draw, lambda numbers: losses.append(numbers["language"]))
    return losses


def test_training_fits_its_documents():
    batch = draw_batch(random.Random(3), cells=CELLS, tokens=256)
    losses = curve(started(), 80, 0, lambda _: batch)
    guess = math.log(LLAMA["vocab_size"])
    assert losses[0] > guess  # less than nothing known
    assert losses[-1] < guess - 2  # two nats better than a guess, on the documents that were shown


def test_the_seed_decides_every_bit():
    torch.set_num_threads(1)
    one, same, other = started(0), started(0), started(1)
    draw = partial(draw_batch, cells=CELLS, tokens=128)
    assert curve(one, 3, 0, draw) == curve(same, 3, 0, draw)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert curve(started(0), 1, 1, draw) != curve(started(0), 1, 0, draw)  # other documents
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)  # other weights


def test_codes_and_facts_are_counted_apart():
    batch = draw_batch(random.Random(1), cells=CELLS, tokens=512)
    told = batch.sources >= 0
    logits = torch.zeros(*batch.ids.shape, LLAMA["vocab_size"])
    logits[batch.rows[told], batch.queries[told], batch.answers[told]] = 1.0
    found = answered(logits, batch)
    assert (found["needles"], found["facts"]) == (1.0, 0.0)
    assert math.isnan(found["marks"])


def test_right_answers_are_the_likeliest_tokens_of_the_product(tmp_path):
    write_llama(random_network(), fields(), tmp_path)
    model = load_any(tmp_path, RunOptions("plain", "fp32")).model
    ids = tuple(range(20, 60))
    best = model.logits(model(torch.tensor(ids), model.new_state(40, 40))).argmax(-1).tolist()
    prompt = Prompt("any", ids, (Answer(5, best[5]), Answer(20, best[20] + 1), Answer(39, best[39])))
    for chunk in (7, 40, 512):
        assert right_answers(model, prompt, chunk) == [True, False, True]
    assert share(model, [prompt, prompt]) == (4 / 6, 6)
    assert share(model, [prompt, replace(prompt, answers=prompt.answers[::2])], whole=True) == (1 / 2, 2)


def test_the_command_writes_a_checkpoint_and_says_what_it_knows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "LENGTHS", (256,))
    monkeypatch.setattr(command, "fact_prompts", lambda *, chat=False: fact_prompts(chat=chat)[:13])
    assert command.main(["--out", str(tmp_path / "made"), "--steps", "1", "--documents", "1", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "facts, chat" in said
    assert said.count(" 13 ") == 2
    assert "codes, 256 tokens" in said
    assert json.loads((tmp_path / "made" / "config.json").read_text())["model_type"] == "llama"
    made = read_llama(tmp_path / "made")
    start = Network(made.config)
    initialise_llama(start, 5)
    moved = (made.lm_head.weight - start.lm_head.weight).abs().max()
    assert 0 < moved < 1e-2  # one step of warm-up at 4e-5, and the rounding to BF16
