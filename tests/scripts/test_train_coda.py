"""CoDA training: the cache with gradients is that of inference, gradients are those of the function, files load."""

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from coda_gqa_l import CoDAGQALandmarkPerf2
from safetensors.torch import load_file
from torch.autograd import gradcheck
from torch.nn.functional import pad
from torch.utils.checkpoint import CheckpointError

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import fingerprint
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.trained import Trained
from fathom.model.variants import coda_attention
from fathom.model.variants.coda_settings import CodaSettings
from fathom.probes.demo_language.language import VALUE_AT
from fathom.probes.demo_language.vocabulary import PAD
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from fathom.scripts import train_coda
from fathom.scripts.cli import run
from fathom.scripts.train import coda as work
from fathom.scripts.train import coda_measure as measuring
from fathom.scripts.train.coda_banks import TrainingCache, prefill
from fathom.scripts.train.coda_measure import Case, documents, gap_of, learned, measure
from fathom.scripts.train.coda_network import Bounded, adapted, attentions, inference_memory, training_memory
from fathom.scripts.train.coda_page import closed, gained, gaps
from fathom.scripts.train.coda_training import Phase, optimiser, train
from fathom.scripts.train.documents import Cell, draw_batch, sequences, shuffled
from fathom.scripts.train.files import ADAPTERS as FILE
from fathom.scripts.train.files import LLAMA, read_llama, write_adapters, write_llama
from fathom.scripts.train.initial import initialise_llama
from fathom.scripts.train.learning import fit, language_loss
from fathom.scripts.train.llama_network import Network
from fathom.scripts.train.recipe import Recipe
from tests.coda_cases import ETA, GROUPS, HEADS, D, cache_of, corrected, mechanism, random_tokens, rows
from tests.llama_model import oracle, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2}
BOUNDED = Bounded(corrected(8, 4, 4), 16)
UNKNOWN = Trained("", "", "full")
CELLS = (Cell(64, (2, 3), (2, 3), 1.0, 0.0, 0.0),)
RECIPE = Recipe(phase1_steps=2, phase2_steps=2, accumulate=1)
DRAW = partial(draw_batch, cells=CELLS, tokens=128)


def base_network(seed=0):
    network = Network(LlamaConfig.from_json(LLAMA | SMALL, "config"))
    initialise_llama(network, seed)
    return network


def moved_network(seed=0):
    """Adapters with every parameter off its initial value: gates and lambdas differ from token to token."""
    network, generator = adapted(base_network(seed), seed, RECIPE), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in attentions(network):
            layer.lambda_proj.bias.fill_(-1.0)
            for parameter in layer.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
            layer.write_proj.weight.copy_(0.2 * torch.randn(layer.write_proj.weight.shape, generator=generator))
    return network


def random_settings(g):
    def one_of(*choices):
        return choices[int(torch.randint(len(choices), (), generator=g))]

    exact, summary, grows = one_of(0, 3, 9, 20), one_of(0, 2, 7, 40), one_of(False, True)
    return corrected(
        one_of(1, 5, 12),
        exact,
        summary,
        exact_at_start=1 + exact // 4 if grows and exact else None,
        summary_at_start=1 + summary // 4 if grows and summary else None,
        growth_horizon=200,
        novelty=one_of(0.3, 0.7),
        refresh_on_hit=one_of(False, True),
        gate_exact=one_of(0.1, 0.4),
        gate_summary=one_of(0.05, 0.3),
        exact_candidates=one_of(2, 8, 0),
        summary_candidates=one_of(5, 64, 0),
        overwrite_on_insert=one_of(True, False),
        memory_init=one_of("zeros", "normal"),
        route=one_of("key", "value"),
        lru_touch_between=one_of(True, False),
        gate_eta_in_blocks=one_of(True, False),
        lf_layout=one_of("pairs", "tail"),
    )


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(n, marks=pytest.mark.slow) for n in range(16, 40))])
def test_the_cache_with_gradients_is_that_of_inference(seed):
    g = torch.Generator().manual_seed(seed)
    settings, tokens, differential = random_settings(g), random_tokens(90, seed=seed), mechanism()._replace(norm=None)
    if seed % 4 == 0:  # as before any training: all tokens are worth the same, and the older come first
        tokens = tokens._replace(gates=torch.full((90,), 0.45))
    ours, theirs = TrainingCache(settings, GROUPS, D, ETA.clone(), seed=3), cache_of(settings, seed=3)
    done, strict = 0, seed % 3 == 1
    while done < 90:
        n = min(90 - done, int(torch.randint(1, 40, (), generator=g)))
        block, part = int(torch.randint(1, 30, (), generator=g)), rows(tokens, slice(done, done + n))
        out = prefill(ours, part, differential, block, strict=strict)
        expected = coda_attention.prefill(theirs, part, differential, block, strict=strict)
        assert (out - expected).abs().max() <= 1e-5
        done += n
    assert torch.equal(ours.exact.used, theirs.exact.used)
    assert torch.equal(ours.summary.used, theirs.summary.used)
    assert torch.equal(ours.last_used, theirs.exact.last_used)
    for bank, other in ((ours.exact, theirs.exact), (ours.summary, theirs.summary)):
        for name in ("keys", "values"):
            difference = (getattr(bank, name) - getattr(other, name)).abs()
            assert not difference.numel() or difference.max() <= 1e-5


# Two blocks are evicted past a ring of 2. Of 4 tokens of a block the exact bank may take 1 and the summary bank 3, so
# that every fate is there: kept, averaged, forgotten.
TINY = corrected(2, 3, 2, exact_candidates=1, summary_candidates=3, novelty=0.9)
TINY_BLOCK, TINY_TOKENS = 4, 14


def tiny(seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(TINY_TOKENS, h, 4, generator=g, dtype=torch.float64) for h in (2, 1, 1))
    gates = 0.15 + 0.8 * torch.rand(TINY_TOKENS, generator=g, dtype=torch.float64)
    return q, k, v, gates, torch.tensor([-1.0], dtype=torch.float64)


def last_block(settings, q, k, v, gates, eta_logit):
    """What the last block attends to, of q [t, H, D]."""
    cache = TrainingCache(settings, 1, 4, eta_logit)
    for first in range(0, TINY_TOKENS, TINY_BLOCK):
        part = slice(first, first + TINY_BLOCK)
        out = cache.attend(q[part][None], k[part], v[part])
        cache.write_block(k[part], v[part], gates[part])
    return out


@pytest.mark.parametrize("changes", [{}, {"route": "value"}, {"overwrite_on_insert": False}, {"refresh_on_hit": True}])
def test_gradients_through_evictions_are_those_of_the_function(changes):
    """Against finite differences in float64, with respect to every key, value, gate and the rate."""
    settings = corrected(2, 3, 2, exact_candidates=1, summary_candidates=3, novelty=0.9, **changes)
    q, *given = tiny(1)
    given = [part.requires_grad_() for part in given]
    assert gradcheck(lambda *parts: last_block(settings, q, *parts), given, eps=1e-6, atol=1e-7, rtol=1e-5)


def test_gradients_reach_what_was_evicted_and_nothing_that_was_forgotten():
    q, *given = tiny(1)
    k, v, gates, eta = (part.requires_grad_() for part in given)
    last_block(TINY, q, k, v, gates, eta).square().sum().backward()
    evicted = range(10)  # 12 tokens before the last block, of which 2 are in the ring
    blocks = ((0, 1), (2, 3, 4, 5), (6, 7, 8, 9))  # as they left together
    kept = {t for block in blocks for t in sorted(block, key=lambda t: -gates[t])[:3]}
    assert len(kept) == 8
    for t in evicted:
        reached = [bool(part.grad[t].abs().max() > 1e-8) for part in (k, v)]
        assert reached == [t in kept] * 2, t
        assert bool(gates.grad[t] != 0) <= (t in kept)
    assert sum(bool(gates.grad[t].abs() > 1e-8) for t in evicted) >= 6
    assert eta.grad.abs() > 1e-8


@torch.no_grad()
def test_training_and_inference_compute_one_network():
    network, batch = moved_network(), DRAW(random.Random(0))
    ids, t = batch.ids, batch.ids.shape[1]
    positions = torch.arange(t).expand_as(ids)
    bounded = BOUNDED._replace(block=7)
    together = network(ids, positions, training_memory(network, bounded, len(ids)))
    for row, expected in zip(ids, together, strict=True):
        alone = network(row[None], positions[:1], inference_memory(network, bounded))
        assert (alone[0] - expected).abs().max() < 1e-4
    unbounded = network(ids, positions)
    whole = training_memory(network, Bounded(corrected(t, 4, 4), 7), len(ids))
    assert (network(ids, positions, whole) - unbounded).abs().max() < 1e-4
    assert (together - unbounded).abs().max() > 0.1


@torch.no_grad()
def test_adapters_start_as_the_base():
    base = base_network()
    network, ids = adapted(base, 0, RECIPE), torch.arange(20, 60)[None]
    lam = [layer.lambda_proj.bias.sigmoid() for layer in attentions(network)]
    assert torch.cat(lam).tolist() == pytest.approx([0.0024726] * 8, rel=1e-4)
    for layer in attentions(network):
        layer.lambda_proj.bias.fill_(-100.0)  # no noise stream at all
    ours = network(ids, torch.arange(40)[None])
    assert (ours - base(ids, torch.arange(40)[None])).abs().max() < 1e-4


@torch.no_grad()
def test_the_file_loads_into_the_published_module(tmp_path):
    network = moved_network(2)
    config = network.config
    write_adapters(network, UNKNOWN, tmp_path)
    stored = load_file(tmp_path / FILE)
    x = torch.randn(50, config.hidden_size, generator=torch.Generator().manual_seed(5))
    for i, layer in enumerate(attentions(network)):
        module = CoDAGQALandmarkPerf2(
            embed_dim=128,  # H * D: the module has no other head_dim than E / H
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            window=64,
            num_landmarks_exact=4,
            num_landmarks_summary=4,
            rope_base=config.rope_theta,
            rope_interleaved=False,
            head_norm_mode="identity",
        ).eval()
        prefix = f"layer_{i}.coda."
        state = {name.removeprefix(prefix): part for name, part in stored.items() if name.startswith(prefix)}
        assert set(state) == set(module.state_dict()) - {"rope.inv_freq", "head_norm.weight"}
        short = 128 - config.hidden_size  # the module's stream is wider: zeros
        for name in ("q_proj", "k_proj", "v_proj", "lambda_proj", "write_proj"):  # [.., E]
            state[f"{name}.weight"] = pad(state[f"{name}.weight"], (0, short))
        state["o_proj.weight"] = pad(state["o_proj.weight"], (0, 0, 0, short))
        missing, unexpected = module.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"rope.inv_freq", "head_norm.weight"}
        padded = pad(x, (0, short))
        memory = module.init_state(batch_size=1, device=torch.device("cpu"), dtype=torch.float32)
        theirs, _ = module.prefill_chunked(padded[None], memory, block_size=16)
        ours = layer(x[None], network.rotation(torch.arange(50)[None]), None)
        assert (ours[0] - theirs[0, :, : config.hidden_size]).abs().max() < 2e-5
        assert not theirs[0, :, config.hidden_size :].any()


@pytest.mark.parametrize("phase", [Phase(1, RECIPE, None), Phase(2, RECIPE, BOUNDED)], ids=["unbounded", "bounded"])
def test_a_phase_moves_the_adapters_and_nothing_else(phase):
    network = adapted(base_network(), 0, RECIPE)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    train(network, phase, 0, DRAW, lambda _: None)
    same = {name for name, value in network.state_dict().items() if torch.equal(value, before[name])}
    adapters = {name for name in before if ".self_attn." in name}
    memory_only = {name for name in adapters if "write_proj" in name or "summary_eta_logit" in name}
    untouched = set(before) - adapters
    assert same == (untouched if phase.bounded else untouched | memory_only)


def test_every_parameter_moves_at_its_published_rate():
    """q, k, v and o at 5e-5 with weight decay; lambda and theta, write gate and eta at 1e-3; half of it in phase 2."""
    network = adapted(base_network(), 0, Recipe())
    for phase, scale in ((Phase(1, Recipe(), None), 1), (Phase(2, Recipe(), BOUNDED), 0.5)):
        groups = optimiser(network, phase).param_groups
        assert [group["peak"] for group in groups] == [scale * 5e-5, scale * 1e-3, scale * 1e-3]
        assert [group["weight_decay"] for group in groups] == [0.01, 0, 0]
        assert [len(group["params"]) for group in groups] == [2 * 4, 2 * 3, 2 * 3]


def test_rates_rise_and_fall_as_published():
    """Updates are counted, and the cosine ends at 2,000 and 600 of them, as the training script has it."""
    first, second = (Phase(number, Recipe(), None).rate() for number in (1, 2))
    assert [first(step, 1.0) for step in (0, 49, 99, 100)] == pytest.approx([0.01, 0.5, 1.0, 1.0])
    assert first(1050, 1.0) == second(325, 1.0) == pytest.approx(0.5)
    assert first(2000, 1.0) == second(600, 1.0) == pytest.approx(0, abs=1e-12)
    assert second(24, 1.0) == pytest.approx(0.5)


def test_an_update_is_of_the_mean_gradient_of_its_runs():
    """Four rows in one batch, or in two batches that are accumulated: plain gradient descent gives the same weights."""
    rows, moved = torch.randint(20, 60, (4, 24), generator=torch.Generator().manual_seed(0)), []
    for batch in (4, 2):
        network, draw, seen = adapted(base_network(), 0, RECIPE), shuffled(rows, batch), []
        weight = attentions(network)[0].q_proj.weight
        before, rng = weight.detach().clone(), random.Random(0)

        def loss_of(_, network=network, draw=draw, rng=rng):
            drawn = draw(rng)
            loss = language_loss(network(drawn.ids, drawn.positions), drawn)
            return loss, {"language": loss.item()}

        descent = torch.optim.SGD([{"params": [weight], "peak": 1.0}], 1.0)
        fit(network, [descent], 1, lambda _, peak: peak, loss_of, seen.append, accumulate=4 // batch, clip=1e9)
        moved.append((weight.detach() - before, seen[0]["language"]))
    (one, loss), (two, mean) = moved
    assert torch.allclose(one, two, rtol=1e-3, atol=1e-7)
    assert one.abs().max() > 1e-4
    assert mean == pytest.approx(loss, rel=1e-5)


def test_what_left_the_ring_has_no_gradient_when_it_is_detached():
    network = moved_network()
    kept, cut = (
        gradients(network, partial(training_memory, network, bounded), checkpointing=False)
        for bounded in (BOUNDED, BOUNDED._replace(detach=True))
    )
    assert len(kept) == 2 * 10
    assert len(cut) == 2 * 8  # weight and bias of a write gate have none; eta still moves what is held
    assert not torch.allclose(kept[0], cut[0])


def test_a_text_is_cut_into_rows_that_are_all_seen_before_any_again():
    cut = sequences([1], list(range(10, 32)), 6)
    assert cut.tolist() == [[1, *range(at, at + 5)] for at in (10, 15, 20, 25)]
    assert sequences([1], [10, 11], 6).shape == (0, 6)
    draw, rng = shuffled(cut, 2), random.Random(0)
    firsts = [int(row[1]) for _ in range(4) for row in draw(rng).ids]
    assert sorted(firsts[:4]) == sorted(firsts[4:]) == [10, 15, 20, 25]


def test_a_loss_that_is_no_number_ends_the_training():
    network = adapted(base_network(), 0, RECIPE)
    with torch.no_grad():
        attentions(network)[0].q_proj.weight.fill_(torch.nan)
    with pytest.raises(ConfigError, match=r"phase 1: the loss of update 1 is nan; lower --rate"):
        train(network, Phase(1, RECIPE, None), 0, DRAW, lambda _: None)


def gradients(network, memory, *, checkpointing):
    batch = DRAW(random.Random(1))
    network.zero_grad()
    given = memory(len(batch.ids))
    logits = network(batch.ids, batch.positions, given, checkpointing=checkpointing)
    language_loss(logits, batch).backward()
    return [p.grad.clone() for layer in attentions(network) for p in layer.parameters() if p.grad is not None]


def test_checkpointing_changes_no_gradient_where_it_is_allowed():
    network = moved_network()
    plain, twice = (gradients(network, lambda _: None, checkpointing=on) for on in (False, True))
    assert len(plain) == 2 * 7
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(plain, twice, strict=True))


def test_checkpointing_over_the_banks_is_wrong():
    """The reason for the refusal: a bounded layer called a second time attends to what the first time has written."""
    network = moved_network()
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(network, partial(training_memory, network, BOUNDED), checkpointing=True)
    with pytest.raises(AssertionError):
        train(network, Phase(2, RECIPE, BOUNDED), 0, DRAW, lambda _: None, checkpointing=True)


def test_checkpointing_of_phase_2_is_refused_in_one_line(tmp_path, capsys):
    write_llama(base_network(), LLAMA | SMALL, tmp_path / "base")
    flags = [str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--checkpointing", "2"]
    assert run(lambda: train_coda.main(flags)) == 2
    said = capsys.readouterr().err
    assert said.startswith("--checkpointing 2: refused; phase 2 writes the banks as it goes")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_perplexity_and_recall_are_those_of_the_logits():
    """A network that knows nothing, and one that is told: perplexity is the vocabulary, recall 0 or 1."""
    base = base_network()
    with torch.no_grad():
        base.lm_head.weight.zero_()
    (document,) = documents(256, 1, 0)
    (line,) = measure([Case("flat", base, None)], 256, [document])
    assert line.perplexity == pytest.approx(base.config.vocab_size, rel=1e-4)
    assert line.surprise == pytest.approx(base.config.vocab_size, rel=1e-4)
    assert sum(line.asked) == measuring.CODES == 8
    assert line.recall == 0  # the first of equals is the special token 0
    by_quarter = [0, 0, 0, 0]
    for answer in document.answers:
        name = document.ids[answer.position - 1]  # "... of X is V": X was first told two tokens before its V
        by_quarter[(document.ids.index(name) + 2) * 4 // 256] += 1
    assert line.asked == by_quarter
    assert by_quarter[3] == 0  # a quarter of the document lies between what was told and the first question
    assert min(by_quarter[:2]) > 0


@torch.no_grad()
def test_what_is_measured_bounded_is_what_the_product_computes(tmp_path):
    """Perplexities and codes of two documents, from logits of the runtime over the files that the command writes."""
    write_llama(base_network(), LLAMA | SMALL, tmp_path)
    network = adapted(read_llama(tmp_path), 0, RECIPE)  # as the product reads it: rounded to BF16
    for mine, its in zip(attentions(network), attentions(moved_network()), strict=True):
        mine.load_state_dict(its.state_dict())
    kv = "coda:window=16,exact=8,summary=8,block=32"
    told = Trained(network.config.fingerprint, fingerprint(Checkpoint.open(tmp_path)), kv)
    write_adapters(network, told, tmp_path)
    options = RunOptions("plain", "fp32", coda_adapters=str(tmp_path / FILE))
    bounded = replace(options, kv=(f"all={kv}",))
    settings, given = Bounded(corrected(16, 8, 8), 32), documents(256, 2, 3)
    found = {}
    for name, each in (("unbounded", options), ("bounded", bounded)):
        model = load_any(tmp_path, each).model
        losses, answers, right = [], [], 0
        for document in given:
            ids = torch.tensor(document.ids[: document.ids.index(PAD)] if PAD in document.ids else document.ids)
            logits = model.logits(model(ids, model.new_state(len(ids), len(ids))))
            lost = -logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            at = [answer.position for answer in document.answers if answer.source >= 0]
            losses.append(lost)
            answers.append(lost[at])
            right += int((logits[at].argmax(1) == ids[torch.tensor(at) + 1]).sum())
        wanted = [float(torch.cat(part).mean().exp()) for part in (losses, answers)]
        (line,) = measure([Case(name, network, None if name == "unbounded" else settings)], 256, given)
        assert [line.perplexity, line.surprise] == pytest.approx(wanted, rel=1e-4)
        assert sum(line.right) == right
        found[name] = line
    one, other = found["unbounded"], found["bounded"]
    assert abs(one.perplexity / other.perplexity - 1) > 1e-3, "ten times what is tolerated"
    assert abs(one.surprise / other.surprise - 1) > 1e-3


@pytest.mark.parametrize(("length", "gap"), [(256, 64), (512, 128), (1024, 128)])
def test_codes_are_told_long_before_they_are_asked_for(length, gap):
    given = documents(length, 24, 1)
    for document in given:
        assert len(document.answers) == 8
        first = min(answer.position + 1 for answer in document.answers) - VALUE_AT  # where the first question begins
        told = [document.ids.index(answer.token) for answer in document.answers]
        assert first - max(told) >= gap
        assert max(answer.source for answer in document.answers) < first - gap
    assert gap_of(length) == gap
    assert gaps([length]) == f"{gap} tokens"
    assert gaps([256, 1024]) == "64 tokens (of 256), 128 tokens (of 1024)"


def test_learned_tells_codes_from_other_tokens():
    network = adapted(base_network(), 0, RECIPE)
    given = documents(256, 1, 0)
    with torch.no_grad():
        network.model.embed_tokens.weight[:, 0] = -1.0
        for answer in given[0].answers:
            network.model.embed_tokens.weight[answer.token, 0] = 30.0
        first = attentions(network)[0]
        first.write_proj.weight[0, 0], first.write_proj.bias[0] = 2.0, -4.0
    of_first, of_second = learned(network, given, BOUNDED)
    assert of_first.gate_of_codes > 0.9
    assert of_first.gate_of_others < 0.3
    assert of_second.gate_of_codes == pytest.approx(0.1192, abs=1e-4)  # as it starts
    assert of_first.eta == pytest.approx(0.0474, abs=1e-4)


def test_the_command_trains_measures_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(work, "CODA_CELLS", CELLS)
    write_llama(base_network(), LLAMA | SMALL, tmp_path / "base")
    flags = "--phase1-steps 2 --phase2-steps 2 --window 16 --exact 4 --summary 4 --block 32 --documents 1 --lengths 256"
    out, page = tmp_path / "out", tmp_path / "page.md"
    given = [str(tmp_path / "base"), "--out", str(out), "--page", str(page), "--checkpointing", "1", *flags.split()]
    assert train_coda.main(given) == 0
    lines = json.loads((out / "train-coda.json").read_text())["lines"]
    assert len(lines) == 9
    base, cold, first = (lines[i]["perplexity"] for i in (0, 1, 2))
    assert abs(base / first - 1) < 0.05  # two warm-up steps from the base, over everything
    assert cold != base
    assert all(sum(line["asked"]) == 8 for line in lines)
    text = page.read_text()
    assert text.replace("(page-", "(train-coda-") == (out / "train-coda.md").read_text()
    assert "\n## 256 tokens, 8 codes in each of 1 documents\n" in text  # by which findings look for it
    shown = [f"{lines[4]['perplexity']:.2f}", f"{lines[4]['divergence']:.4f}", f"{100 * lines[4]['agreement']:.1f} %"]
    assert f"| phase 2, bounded | {' | '.join(shown)} | {lines[4]['surprise']:.2f} |" in text
    names = set(load_file(out / FILE))
    assert names == set(load_file(out / "phase-1" / FILE))
    assert len(names) == 2 * 10
    assert "layer_1.coda.summary_eta_logit" in names


def test_what_is_given_back_is_a_share_of_what_was_lost():
    def line(right=0, loss=0.0):
        return measuring.Line("any", 512, losses=[loss], right=[right], asked=[100])

    assert closed(line(100), line(20), line(80)).endswith("gives back 75 %.")
    assert closed(line(50), line(60), line(80)) == "The cold swap loses no codes here."
    costs = gained(line(loss=1.0), line(loss=3.0), line(loss=1.5))
    assert costs == "Of the 2.0000 nats of a token that the cold swap costs, the training gives back 75 %."
    assert gained(line(loss=1.0), line(loss=0.9), line(loss=1.1)).endswith("nothing was to be given back.")
    assert "back 150 %. It ends below the base" in gained(line(loss=1.0), line(loss=3.0), line(loss=0.0))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A checkpoint of another kind, shape and tokenizer than the small Llama: Mistral, its head tied."""
    folder = tmp_path_factory.mktemp("other")
    oracle("mistral", vocab_size=320, num_hidden_layers=2, tie_word_embeddings=True).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


TEXT = [str(ROOT / "README.md"), str(ROOT / "model" / "variants" / "README.md")]
SIZES = {"length": 96, "window": 16, "exact": 8, "summary": 8, "block": 16, "held-out-tokens": 700, "batch": 4}
FAST = {"accumulate": 1, "rate": 5e-3, "phase1-steps": 16, "phase2-steps": 16, "phase1-warm-up": 4, "phase2-warm-up": 4}


def text_run(model, out, *flags):
    constants = (part for name, value in (SIZES | FAST).items() for part in (f"--{name}", str(value)))
    return [str(model), "--out", str(out), "--text", *TEXT, *constants, *flags]


def test_adapters_of_any_text_lower_its_loss_and_are_the_same_again(other_model, tmp_path):
    """Held-out Markdown, over the bounded cache: untrained adapters, trained ones; and the same command twice."""
    outs = [tmp_path / name for name in ("once", "again")]
    for out in outs:
        assert train_coda.main(text_run(other_model, out)) == 0
    data = json.loads((outs[0] / "train-coda.json").read_text())
    lines = {line["name"]: line for line in data["lines"]}
    cold, first, second = (
        lines[name]["perplexity"]
        for name in ("cold swap: base weights, bounded", "phase 1, bounded", "phase 2, bounded")
    )
    assert second < first < 0.8 * cold
    assert lines["base, full cache"]["divergence"] == 0 < lines["cold swap: base weights, bounded"]["divergence"]
    assert "asked" not in lines["base, full cache"], "no codes in a text"
    assert data["facts"]["text"] == ["README.md", "model/variants/README.md"]
    for name in (FILE, f"phase-1/{FILE}"):
        once, again = (load_file(out / name) for out in outs)  # a header's metadata has no order
        assert once.keys() == again.keys()
        assert all(torch.equal(once[part], again[part]) for part in once)


def test_an_interrupted_run_leaves_phase_1_and_nothing_is_written_over_it(other_model, tmp_path, monkeypatch, capsys):
    trained = work.train

    def stopped(network, phase, *given, **more):
        if phase.number == 2:
            raise KeyboardInterrupt
        trained(network, phase, *given, **more)

    monkeypatch.setattr(work, "train", stopped)
    out = tmp_path / "out"
    given = text_run(other_model, out, "--phase1-steps", "1")
    assert run(lambda: train_coda.main(given)) == 130
    assert [path.name for path in out.rglob("*") if path.is_file()] == [FILE]
    kept = (out / "phase-1" / FILE).read_bytes()
    capsys.readouterr()
    assert run(lambda: train_coda.main(given)) == 2
    assert capsys.readouterr().err == f"{out}: exists and is not empty\n"
    assert (out / "phase-1" / FILE).read_bytes() == kept


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length", "16"], "--length 16: fits into --window 16, nothing would be evicted"),
        (["--length", "999"], "--length 999: beyond the model's max_position_embeddings 256"),
        (["--lengths", "512"], "--lengths: means nothing with --text"),
        (["--coda", "novelty=x"], "--coda novelty=x: "),
        (["--coda", "published=1"], "--coda published=1: there are no gradients of published rules"),
        (["--coda", "eta_logit=-1"], "eta_logit has a flag of its own"),
        (["--seed", "-1"], "--seed -1: want 0 to 2^63 - 1"),
        (["--held-out", "{short}"], "0 sequences of 96 tokens, want at least 1; a smaller --length makes more"),
        (["--text", "{short}"], "0 sequences of 96 tokens, want at least 2; a smaller --length makes more"),
        (["--text", "{bytes}"], "byte 0 is no UTF-8"),
    ],
)
def test_a_text_run_that_cannot_be_is_refused_in_one_line(flags, message, other_model, tmp_path, capsys):
    (tmp_path / "short").write_text("too short")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    given = [flag.format(short=tmp_path / "short", bytes=tmp_path / "bytes") for flag in flags]
    assert run(lambda: train_coda.main(text_run(other_model, tmp_path / "out", *given))) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--rate", "nan", "nan: want a number of at least 0"),
        ("--beta2", "1", "1: want a number of at least 0 and below 1"),
        ("--accumulate", "0", "0: want a whole number of at least 1"),
        ("--window", "1.5", "1.5: want a whole number of at least 1"),
    ],
)
def test_a_constant_out_of_bounds_is_refused(flag, value, message, capsys):
    assert run(lambda: train_coda.main(["nowhere", "--out", "out", flag, value])) == 2
    assert capsys.readouterr().err == f"python -m scripts.train_coda: argument {flag}: {message}\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "100"], "--lengths 100: want at least 256"),
        (["--page", "/no/such/folder/page.md"], "cannot be written there"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_work(flags, message, tmp_path, capsys):
    write_llama(base_network(), LLAMA | SMALL, tmp_path / "base")
    assert run(lambda: train_coda.main([str(tmp_path / "base"), "--out", str(tmp_path / "out"), *flags])) == 2
    assert message in capsys.readouterr().err


def test_lengths_beyond_the_positions_are_refused_before_any_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(work, "train", None)
    write_llama(base_network(), LLAMA | SMALL, tmp_path / "base")
    flags = [str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--lengths", "256", "99999999"]
    assert run(lambda: train_coda.main(flags)) == 2
    said = capsys.readouterr().err
    assert said == "--lengths 99999999: beyond the model's max_position_embeddings 65536\n"
    assert not (tmp_path / "out").exists()


def test_published_rules_have_no_gradients():
    published = CodaSettings.published(window=4, exact=2, summary=2, rope="half")
    with pytest.raises(AssertionError, match="published rules"):
        TrainingCache(published, GROUPS, D, ETA)
    assert HEADS % GROUPS == 0
