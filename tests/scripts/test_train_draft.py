"""Draft heads over the demo: what is written is DeepSeek's layout, and the networks are the published equations."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import found_head, stage_and_rest
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.probes.demo_language.vocabulary import EOS, PAD, build_tokenizer
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts import train_draft as command
from fathom.scripts.train import draft_learning
from fathom.scripts.train.documents import Cell
from fathom.scripts.train.draft_learning import draw_text, is_projection, judge, run_main, shares, walk
from fathom.scripts.train.draft_network import Anchors, Drafts, Run
from fathom.scripts.train.files import write_draft
from fathom.scripts.train.initial import initialise_draft
from fathom.scripts.train.layers import merge
from fathom.scripts.train_draft import NOISE, fields, new_head
from tests.stored_weights import decoded

CONFIG = ModelConfig.from_file(DEMO / "config.json")
SHORT = Cell(64, (2, 3), (2, 3), 1.0, 0.5, 0.0)

E4M3, E8M0, F32, BF16, I8 = "F8_E4M3", "F8_E8M0", "F32", "BF16", "I8"


def linear_of(name, rows, columns):
    """An FP8 linear whose weight is [rows, columns], with its scale per 128 x 128."""
    return {f"{name}.weight": (E4M3, (rows, columns)), f"{name}.scale": (E8M0, (rows // 128, columns // 128))}


def block():
    """A stage's block at the demo's widths: hidden 128, 4 heads of 128, latents of 128, 2 output groups of 64 rows."""
    tensors = {f"{name}.weight": (BF16, (128,)) for name in ("attn_norm", "ffn_norm", "attn.q_norm", "attn.kv_norm")}
    tensors |= {"attn.attn_sink": (F32, (4,)), "ffn.gate.weight": (BF16, (8, 128)), "ffn.gate.bias": (F32, (8,))}
    for name, rows, columns in (("wq_a", 128, 128), ("wq_b", 512, 128), ("wkv", 128, 128), ("wo_a", 128, 256)):
        tensors |= linear_of(f"attn.{name}", rows, columns)
    tensors |= linear_of("attn.wo_b", 128, 128)
    for w in ("w1", "w2", "w3"):
        tensors |= linear_of(f"ffn.shared_experts.{w}", 128, 128)
        for e in range(8):
            tensors[f"ffn.experts.{e}.{w}.weight"] = (I8, (128, 64))
            tensors[f"ffn.experts.{e}.{w}.scale"] = (E8M0, (128, 4))
    for site in ("hc_attn", "hc_ffn"):
        tensors |= {f"{site}_fn": (F32, (24, 512)), f"{site}_base": (F32, (24,)), f"{site}_scale": (F32, (3,))}
    return tensors


FINAL = {
    "norm.weight": (BF16, (128,)),
    "hc_head_fn": (F32, (4, 512)),
    "hc_head_base": (F32, (4,)),
    "hc_head_scale": (F32, (1,)),
}
MTP = {
    0: linear_of("e_proj", 128, 128)
    | linear_of("h_proj", 128, 128)
    | {"enorm.weight": (BF16, (128,)), "hnorm.weight": (BF16, (128,))}
    | FINAL
}
DSPARK = {
    0: linear_of("main_proj", 128, 384) | {"main_norm.weight": (BF16, (128,))},
    1: {},
    2: FINAL
    | {
        "markov_head.markov_w1.weight": (BF16, (1024, 64)),
        "markov_head.markov_w2.weight": (BF16, (1024, 64)),
        "confidence_head.proj.weight": (BF16, (1, 192)),
    },
}
WANTED = {"mtp": ("preview MTP", MTP), "dspark": ("DSpark", DSPARK)}


@pytest.fixture(scope="module", params=WANTED)
def made(request, tmp_path_factory):
    """The head's name, and its checkpoint after two steps on tiny documents."""
    folder = tmp_path_factory.mktemp("draft") / "made"
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"CELLS": (SHORT,), "TOKENS": 128, "PROMPTS": 1}.items():
            patched.setattr(draft_learning, name, value)
        assert command.main([request.param, "--out", str(folder), "--steps", "2", "--seed", "3"]) == 0
    return request.param, folder


def test_tensors_are_those_of_the_release_at_the_demos_widths(made):
    name, folder = made
    head, stages = WANTED[name]
    stored = Checkpoint.open(folder).shapes()
    wanted = {f"mtp.{stage}.{rest}": kind for stage, own in stages.items() for rest, kind in (block() | own).items()}
    assert {stored_name: kind for stored_name, kind in stored.items() if stored_name.startswith("mtp.")} == wanted
    found = found_head({stored_name: stage_and_rest(stored_name) for stored_name in wanted}, CONFIG)
    assert (found.head, found.stages, found.unexpected, found.fault) == (head, len(stages), frozenset(), None)


def test_the_main_model_stays_as_it_is(made):
    _, folder = made
    for file in (*sorted(DEMO.glob("*.safetensors")), DEMO / "tokenizer.json"):
        assert (folder / file.name).read_bytes() == file.read_bytes()
    ours, theirs = (json.loads((path / "model.safetensors.index.json").read_text()) for path in (folder, DEMO))
    assert {k: v for k, v in ours["weight_map"].items() if not k.startswith("mtp.")} == theirs["weight_map"]
    stored = Checkpoint.open(folder).tensors.values()
    assert ours["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)


def test_the_config_says_what_head_it_is(made):
    name, folder = made
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (folder, DEMO))
    changed = {k: v for k, v in ours.items() if k not in theirs or theirs[k] != v}
    stages = len(WANTED[name][1])
    wanted = {"num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 128, 4, *[0] * stages]}
    if name == "dspark":
        wanted |= {"dspark_block_size": 5, "dspark_noise_token_id": NOISE, "dspark_markov_rank": 64}
        wanted["dspark_target_layer_ids"] = [1, 2, 3]
    assert changed == wanted
    assert load(folder, RunOptions()).census.mtp_stages == stages


def test_a_checkpoint_that_has_a_head_is_not_given_another(made, tmp_path):
    _, folder = made
    with pytest.raises(ConfigError, match="has a draft head"):
        command.main(["mtp", "--model", str(folder), "--out", str(tmp_path / "out")])


def test_no_text_holds_the_noise_token():
    assert build_tokenizer().id_to_token(NOISE).startswith("<｜place▁holder▁no▁")


def random_head(name, seed=0):
    """Every parameter moved off its initial value, so that none of them is a one, a zero or a copy of another."""
    head, generator = new_head(name, CONFIG, Checkpoint.open(DEMO)), torch.Generator().manual_seed(seed)
    initialise_draft(head, seed)
    with torch.no_grad():
        for value in head.state_dict().values():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))
    return head


def random_run(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    streams = torch.randn(4, 2, length, 4, 128, generator=generator).bfloat16()
    ids = torch.randint(15, CONFIG.vocab_size, (2, length), generator=generator)
    return Run(ids, streams, torch.randn(2, length, CONFIG.vocab_size, generator=generator))


def normed(x, weight=None):
    x = x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt()
    return x if weight is None else x * weight


def rotated(x, position, sign=1):
    """The last 64 of x [..., 128] as complex numbers, turned by position * theta^(-2i / 64)."""
    pairs = torch.view_as_complex(x[..., 64:].unflatten(-1, (32, 2)).contiguous())
    angle = sign * position * CONFIG.rope_theta ** (-torch.arange(32) / 32)
    return torch.cat([x[..., :64], torch.view_as_real(pairs * torch.polar(torch.ones(32), angle)).flatten(-2)], -1)


def row(attn, x, position):
    """A row of a ring, of x [128]."""
    return rotated(normed(attn.wkv.weight @ x, attn.kv_norm.weight), position)


def attention(attn, x, position, rows):
    """x [128] at a position over rows [k, 128] -> [128]."""
    q = attn.wq_b.weight @ normed(attn.wq_a.weight @ x, attn.q_norm.weight)
    q = rotated(normed(q.view(4, 128)), position)
    scores = torch.cat([q @ rows.T * 128**-0.5, attn.attn_sink[:, None]], 1)
    out = rotated(scores.softmax(1)[:, :-1] @ rows, position, -1).view(2, 256)
    low = torch.stack([W @ part for W, part in zip(attn.wo_a.weight.view(2, 64, 256), out, strict=True)])
    return attn.wo_b.weight @ low.flatten()


def through(stage, X, attend):
    """One token's streams [4, 128] through a block, whose attention is `attend` of its normed input."""
    x, post, comb = stage.hc_attn(X[None])
    X = merge(X[None], attend(stage.attn_norm(x)[0])[None], post, comb)
    x, post, comb = stage.hc_ffn(X)
    return merge(X, stage.ffn(stage.ffn_norm(x), torch.zeros(1, dtype=torch.int64)), post, comb)[0]


def mtp_drafts(head, run, document, p):
    """Logits of the places behind one anchor: a ring of rows up to p, then each place's own."""
    stage, ids, ring, logits, X = head.stage, run.ids[document], {}, [], None
    for position in range(p + head.places):
        fed = run.streams[-1, document, position].float() if position <= p else X
        u = stage.e_proj.weight @ normed(head.embedding[ids[position + 1]], stage.enorm.weight)
        X = u + torch.stack([stage.h_proj.weight @ normed(h, stage.hnorm.weight) for h in fed])

        def attend(x, position=position):
            ring[position] = row(stage.attn, x, position)
            rows = [ring[key] for key in range(max(0, position - 15), position + 1)]
            return attention(stage.attn, x, position, torch.stack(rows))

        X = through(stage, X, attend)
        if position >= p:
            logits.append(head.head @ normed(stage.hc_head(X[None])[0], stage.norm.weight))
    return torch.stack(logits), None


def dspark_drafts(head, run, document, p):
    """Logits and confidence of the block behind one anchor."""
    first, last, ids = head.first, head.last, run.ids[document]
    main = {}
    for position in range(max(0, p - 15), p + 1):
        tapped = torch.cat([run.streams[i, document, position].mean(0).float() for i in (1, 2, 3)])
        main[position] = normed(first.main_proj.weight @ tapped, first.main_norm.weight)
    slots = [head.embedding[token].expand(4, -1) for token in (ids[p + 1], *[NOISE] * 4)]
    for stage in head.blocks():
        read = [stage.attn_norm(stage.hc_attn(X[None])[0])[0] for X in slots]
        rows = [row(stage.attn, x, position) for position, x in main.items()]
        rows = torch.stack(rows + [row(stage.attn, x, p + 1 + i) for i, x in enumerate(read)])
        slots = [
            through(stage, X, lambda x, i=i, rows=rows, attn=stage.attn: attention(attn, x, p + 1 + i, rows))
            for i, X in enumerate(slots)
        ]
    logits, confidence, markov = [], [], last.markov_head
    for i, X in enumerate(slots):
        h, e = last.hc_head(X[None])[0], markov.markov_w1.weight[ids[p + 1 + i]]
        logits.append(head.head @ normed(h, last.norm.weight) + markov.markov_w2.weight @ e)
        confidence.append(last.confidence_head.proj.weight[0] @ torch.cat([h, e]))
    return torch.stack(logits), torch.stack(confidence)


@torch.no_grad()
@pytest.mark.parametrize(("name", "drafted"), [("mtp", mtp_drafts), ("dspark", dspark_drafts)])
def test_drafts_are_those_of_the_equations_written_for_one_anchor(name, drafted):
    head, run = random_head(name), random_run(40)
    anchors = Anchors(torch.tensor([0, 1, 1]), torch.tensor([0, 14, 31]))  # no whole window, nearly one, one that slid
    found = head(run, anchors)
    for n, (document, p) in enumerate(zip(*(part.tolist() for part in anchors), strict=True)):
        logits, confidence = drafted(head, run, document, p)
        assert logits.std() > 0.1
        assert (found.logits[n] - logits).abs().max() < 1e-4
        if confidence is not None:
            assert (found.confidence[n] - confidence).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("name", WANTED)
def test_the_product_drafts_what_was_trained(name, tmp_path):
    """Plain numerics to rounding; of the deployed ones, what is simulated in training is nearer than plain ones are."""
    head, far = random_head(name, 1), {}
    write_draft(head, DEMO, fields(head), tmp_path)
    stored = load_file(tmp_path / "model-mtp.safetensors")
    experts = CONFIG.n_routed_experts
    head.load_state_dict({part: decoded(stored, part, experts) for part in head.state_dict()})
    ids = torch.randint(15, CONFIG.vocab_size, (40,), generator=torch.Generator().manual_seed(2))
    for numerics in ("plain", "deployed"):
        loaded = load(tmp_path, RunOptions(numerics, "fp32", draft=name, draft_tokens=3))
        listener = loaded.head.listener(head.places)
        with listening(loaded.model, {sites.STREAMS: listener}):
            loaded.model(ids[:-1], loaded.model.new_state(40, 40))
        drafted = loaded.head.draft(listener, ids.tolist(), 39, head.places, loaded.head.new_state(head.places))
        run = run_main(loaded.model, torch.cat([ids, torch.tensor(drafted.tokens)])[None])
        for simulated in (False, True):
            head.simulate(on=simulated)
            found = head(run, Anchors(torch.tensor([0]), torch.tensor([38])))
            far[numerics, simulated] = (found.logits[0] - drafted.logits).abs().mean()
            if name == "dspark" and (numerics, simulated) == ("plain", False):
                assert (found.confidence[0] - drafted.confidence).abs().max() < 1e-4
    assert far["plain", False] < 1e-5
    assert far["deployed", True] < far["deployed", False]


def test_drafts_are_counted_while_those_before_them_are_right():
    """One document of six tokens and a pad; the main model says 3 4 5 6 behind its second, the document does too."""
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, PAD]])
    said = torch.tensor([2, 3, 4, 5, 6, 9, 9])
    run = Run(ids, torch.zeros(1, 1, 7, 4, 128), torch.eye(10)[said][None])
    drafted = torch.tensor([[3, 4, 5], [4, 7, 6], [7, 6, 8], [6, 8, 8]])
    anchors = Anchors(torch.zeros(4, dtype=torch.int64), torch.tensor([0, 1, 2, 3]))
    judged = judge(run, anchors, Drafts(50 * torch.eye(10)[drafted], None))
    assert judged.counts.tolist() == [[True] * 3, [True] * 3, [True, True, False], [True, False, False]]
    assert judged.right.tolist() == [[True] * 3, [True, False, True], [False, True, False], [True, False, False]]
    assert judged.before.tolist() == [[True] * 3, [True, True, False], [True, False, False], [True, True, False]]
    assert shares(judged) == {"place 1": 3 / 4, "place 2": 1 / 2, "place 3": 1.0}
    assert walk(judged) == 1  # all three drafts of the first anchor are right: the next token is the end
    later = type(judged)(*(part[1:] for part in judged))
    assert walk(later) == 2  # one draft is right, then one more
    assert (judged.loss[judged.right & judged.counts] < judged.loss[~judged.right & judged.counts].min()).all()


def test_documents_end_as_the_main_model_ends_them():
    model = load(DEMO, RunOptions()).model
    text = draw_text(model, random.Random(0), (SHORT,), 1.0)
    run = run_main(model, text.ids)
    rows, positions = text.own.nonzero(as_tuple=True)
    agree = run.logits[rows, positions - 1].argmax(-1) == text.ids[rows, positions]
    assert agree.float().mean() > 0.98  # but for near ties: one call for all tokens rounds otherwise than one for each
    for ids, own in zip(text.ids.tolist(), text.own.tolist(), strict=True):
        assert own.count(True) >= 1
        end = len(own) - own[::-1].index(True)
        assert own.index(True) + own.count(True) == end
        assert set(ids[end:]) <= {PAD}
        assert EOS not in ids[own.index(True) : end - 1]
    none = draw_text(model, random.Random(0), (SHORT,), 0.0)
    assert not none.own.any()


def test_only_projections_are_muons():
    names = {name for name, _ in random_head("dspark").named_parameters() if is_projection(name)}
    assert {"mtp.0.main_proj.weight", "mtp.1.attn.wq_a.weight", "mtp.2.ffn.shared_experts.w1.weight"} <= names
    others = ("markov", "confidence", "hc_", "gate.weight")
    assert not [name for name in names if any(part in name for part in others)]


def test_the_seed_decides_every_bit(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(draft_learning, "CELLS", (SHORT,))
    monkeypatch.setattr(draft_learning, "TOKENS", 64)
    model = load(DEMO, RunOptions()).model

    def trained(seed):
        head = new_head("dspark", CONFIG, Checkpoint.open(DEMO))
        initialise_draft(head, seed)
        draft_learning.train_draft(head, model, 2, seed, lambda _: None)
        return head.state_dict()

    one, same, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["mtp.0.main_proj.weight"], other["mtp.0.main_proj.weight"])
