"""The oracle of the draft heads: its blocks against transformers' layer, and what the equations say of the rest."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import Head
from fathom.model.config import ModelConfig
from fathom.model.rounding import ROUNDINGS
from fathom.probes.judge.draft_oracle import FAULTS, RIGHT, Block, Dspark, Dspark41, Mtp, SlotBlock, acts, skipping
from fathom.probes.judge.oracle import E4M3_KV, E4M3_LINEAR, Noise, Parameters
from tests.draft_parameters import Given, random_head
from tests.make_checkpoint import tiny_config
from tests.transformers_model import oracle

CONFIG = ModelConfig.from_json(tiny_config(), "tiny")  # window 16
WINDOW, VOCAB = CONFIG.sliding_window, CONFIG.vocab_size
N = 24  # rows of the main model
ROUNDING = {True: ROUNDINGS["deployed"], False: ROUNDINGS["plain"]}
SLOTS = torch.tensor([7, 500, 500, 500, 500])
BOTH = {"rope-of-compressed-layers", "yarn-beside-their-own-base"}
OF_MTP = {"first-embedding-zero", "collapsed-fed-back"}
OF_V41 = {"pre-not-carried"}


def exact(replicas=0):
    return Noise(torch.bfloat16, replicas)


@pytest.fixture(scope="module")
def mtp_values():
    return random_head(CONFIG, Head.MTP)


@pytest.fixture(scope="module")
def dspark_values():
    return random_head(CONFIG, Head.DSPARK)


def mtp_of(values, *, deployed=True, noise=None, reading=RIGHT, config=CONFIG):
    return Mtp(config, values, stages=1, rounding=ROUNDING[deployed], noise=noise or exact(), reading=reading)


def dspark_of(values, *, deployed=True, noise=None, reading=RIGHT, config=CONFIG):
    return Dspark(config, values, stages=3, rounding=ROUNDING[deployed], noise=noise or exact(), reading=reading)


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mtp_rows(n=N):
    streams = draw(N, CONFIG.hc_mult, CONFIG.hidden_size)
    following = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(2))
    return streams[:n], following[:n]


def taps(n=N):
    return draw(N, 3, CONFIG.hc_mult, CONFIG.hidden_size)[:n]


# --- against transformers


class Held:
    """A cache of keys before those of the call."""

    def __init__(self, keys):
        self.keys = keys

    def update(self, keys, values, layer):
        del values, layer
        both = torch.cat((self.keys, keys), 2)
        return both, both


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A sliding layer of scored experts as transformers runs it, in float64 where it does not ask for fp32."""
    model = oracle((0,), hash_layers=0, seed=5)
    directory = tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory)
    config = ModelConfig.from_file(directory / "config.json")
    checkpoint = Checkpoint.open(directory)
    read = Parameters(checkpoint, census(checkpoint.shapes(), config))
    of_stage = {name: name.removeprefix("layers.0.") for name in read.mappings}
    values = {f"mtp.{stage}.{leaf}": read[name] for name, leaf in of_stage.items() for stage in range(3)}
    values["head.weight"] = read["head.weight"]
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    return SimpleNamespace(model=model.double(), layer=model.model.layers[0], config=config, values=Given(values))


def rotation(theirs, streams, positions):
    names = ("main", "compress")
    return {name: theirs.model.model.rotary_emb(streams[:, :, 0], positions[None], layer_type=name) for name in names}


@torch.no_grad()
def test_a_block_of_mtp_is_a_decoder_layer_of_transformers(theirs):
    n, window = 150, theirs.config.sliding_window
    streams, at = draw(1, n, 4, 64), torch.arange(150)
    behind = at[:, None] - at
    mask = torch.zeros(n, n, dtype=torch.float64).masked_fill((behind < 0) | (behind >= window), float("-inf"))
    expected = theirs.layer(
        streams,
        position_embeddings=rotation(theirs, streams, at),
        position_ids=at[None],
        attention_mask=mask[None, None],
    )
    head = mtp_of(theirs.values, deployed=False, config=theirs.config)
    ours = Block(head, 0, at, streams, 0).value("streams", at)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    h = theirs.model.model.hc_head(expected)
    torch.testing.assert_close(head.hyper_head(expected), h, rtol=1e-5, atol=1e-5)
    logits = theirs.model.lm_head(theirs.model.model.norm(h))
    torch.testing.assert_close(head.outcome(ours, at)[2], logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("n", [3, 150])
def test_a_block_of_dspark_is_their_layer_behind_a_cache_of_main_keys(theirs, n):
    main_x, streams = draw(1, n, 64), draw(1, 5, 4, 64, seed=3)
    before, at = torch.arange(n), n + torch.arange(5)
    attention = theirs.layer.self_attn
    keys = attention.kv_norm(attention.kv_proj(main_x))
    turned = rotation(theirs, main_x[:, :, None], before)["main"]
    keys = apply_rotary_pos_emb(keys[:, None], *turned)[:, :, -theirs.config.sliding_window :]
    expected = theirs.layer(
        streams,
        position_embeddings=rotation(theirs, streams, at),
        position_ids=at[None],
        attention_mask=None,
        past_key_values=Held(keys),
    )
    head = dspark_of(theirs.values, deployed=False, config=theirs.config)
    for stage in range(3):
        rows = Block(head, stage, before, streams, 0).keys(main_x, before)
        torch.testing.assert_close(rows[:, None, -theirs.config.sliding_window :], keys, rtol=1e-5, atol=1e-5)
        ours = SlotBlock(head, stage, at, streams, rows).value("streams", at)
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def normed(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + CONFIG.rms_norm_eps).sqrt() * weight


def linear(x, weight, deployed):
    return (E4M3_LINEAR.rounded(x) if deployed else x) @ weight.T


# --- MTP


@pytest.mark.parametrize("deployed", [False, True])
def test_the_input_of_mtp_is_two_normed_linears_added(mtp_values, deployed):
    streams, following = mtp_rows(3)
    enorm, hnorm, e_proj, h_proj = (
        mtp_values[f"mtp.0.{name}.weight"] for name in ("enorm", "hnorm", "e_proj", "h_proj")
    )
    token = linear(normed(mtp_values["embed.weight"][following], enorm), e_proj, deployed)
    own = linear(normed(streams, hnorm), h_proj, deployed)
    entered = mtp_of(mtp_values, deployed=deployed).entered(streams[None], following, torch.arange(3))
    torch.testing.assert_close(entered[0], token[:, None] + own)


def test_rows_of_mtp_are_the_same_one_by_one(mtp_values):
    head, (streams, following) = mtp_of(mtp_values), mtp_rows()
    whole = head.draft(streams, following, 1)
    for n in range(1, N + 1):
        part = head.draft(streams[:n], following[:n], 1)
        torch.testing.assert_close(part.streams[:, -1], whole.streams[:, n - 1])
        torch.testing.assert_close(part.keys[:, -1], whole.keys[:, n - 1])


@pytest.mark.parametrize(("row", "seen"), [(N - WINDOW - 1, False), (N - WINDOW, True)])
def test_a_draft_of_mtp_sees_the_window(mtp_values, row, seen):
    head, (streams, following) = mtp_of(mtp_values), mtp_rows()
    other = streams.clone()
    other[row] = draw(*other[row].shape, seed=9)
    logits = [head.draft(rows, following, 1).logits for rows in (streams, other)]
    assert torch.equal(*logits) != seen


def test_a_further_draft_of_mtp_is_a_row_of_its_own_streams(mtp_values):
    head, (streams, following) = mtp_of(mtp_values), mtp_rows()
    out = head.draft(streams, following, 4)
    assert torch.equal(out.ids, out.logits[0].argmax(-1))
    for step in range(1, 4):
        longer = torch.cat((streams, out.streams[0, N - 1 : N - 1 + step]))
        again = head.draft(longer, torch.cat((following, out.ids[:step])), 1)
        torch.testing.assert_close(again.logits[:, 0], out.logits[:, step])
        torch.testing.assert_close(again.streams, out.streams[:, : N + step])


def test_drafts_of_mtp_can_be_given(mtp_values):
    head, rows = mtp_of(mtp_values), mtp_rows()
    free = head.draft(*rows, 3)
    assert torch.equal(head.draft(*rows, 3, free.ids).logits, free.logits)
    forced = head.draft(*rows, 3, (free.ids + 1) % VOCAB)
    assert torch.equal(forced.logits[:, 0], free.logits[:, 0])
    assert not torch.allclose(forced.logits[:, 1], free.logits[:, 1])


# --- DSpark


def test_main_keys_are_of_the_mean_of_the_streams(dspark_values):
    head, streams = dspark_of(dspark_values, deployed=False), taps()
    shift = draw(N, 3, CONFIG.hc_mult, CONFIG.hidden_size, seed=4)
    same = streams + shift - shift.mean(2, keepdim=True)
    for keys, again in zip(head.main_keys(streams), head.main_keys(same), strict=True):
        torch.testing.assert_close(keys, again)


@pytest.mark.parametrize("deployed", [False, True])
def test_main_keys_of_each_stage_by_hand(dspark_values, deployed):
    """At position 0, where nothing is rotated."""
    nope = CONFIG.head_dim - CONFIG.qk_rope_head_dim
    hidden = taps(1).mean(2).flatten(1)
    projected = linear(hidden, dspark_values["mtp.0.main_proj.weight"], deployed)
    main_x = normed(projected, dspark_values["mtp.0.main_norm.weight"])
    for stage, keys in enumerate(dspark_of(dspark_values, deployed=deployed).main_keys(taps(1))):
        wkv, norm = (dspark_values[f"mtp.{stage}.attn.{name}.weight"] for name in ("wkv", "kv_norm"))
        expected = normed(linear(main_x, wkv, deployed), norm)
        if deployed:
            expected = torch.cat((E4M3_KV.rounded(expected[:, :nope]), expected[:, nope:]), -1)
        torch.testing.assert_close(keys[0], expected)


def test_slots_stand_behind_the_last_row_and_go_through_all_stages(dspark_values):
    head, at, nope = dspark_of(dspark_values), N + torch.arange(5), CONFIG.head_dim - CONFIG.qk_rope_head_dim
    main_keys = head.main_keys(taps())
    streams = dspark_values["embed.weight"][SLOTS][None, :, None].expand(-1, -1, CONFIG.hc_mult, -1)
    for stage, rows in enumerate(main_keys):
        block = SlotBlock(head, stage, at, streams, rows)
        keys, streams = block.value("attention.kv", at), block.value("streams", at)
        assert torch.equal(E4M3_KV.rounded(keys[..., :nope]), keys[..., :nope])
    torch.testing.assert_close(head.draft(main_keys, SLOTS).h, head.hyper_head(streams))


@pytest.mark.parametrize(("row", "seen"), [(N - WINDOW - 1, False), (N - WINDOW, True)])
def test_all_slots_see_the_same_rows_of_the_main_model(dspark_values, row, seen):
    head, other = dspark_of(dspark_values), taps().clone()
    other[row] = draw(*other[row].shape, seed=9)
    h = [head.draft(head.main_keys(rows), SLOTS).h for rows in (taps(), other)]
    moved = (h[0] != h[1]).any(-1)[0]
    assert moved.tolist() == [seen] * 5


def test_a_slot_sees_those_behind_it(dspark_values):
    head, other = dspark_of(dspark_values), SLOTS.clone()
    other[4] = 3
    keys = head.main_keys(taps())
    moved = (head.draft(keys, SLOTS).h != head.draft(keys, other).h).any(-1)[0]
    assert moved.tolist() == [True] * 5


def test_the_markov_chain_and_the_confidence_by_hand(dspark_values):
    head = dspark_of(dspark_values)
    out = head.draft(head.main_keys(taps()), SLOTS)
    w1, w2 = (dspark_values[f"mtp.2.markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    previous = torch.cat((SLOTS[:1], out.ids[:-1]))
    torch.testing.assert_close(out.logits[0], out.base[0] + w1[previous] @ w2.T)
    assert torch.equal(out.ids, out.logits[0].argmax(-1))
    of_h, of_previous = dspark_values["mtp.2.confidence_head.proj.weight"][0].tensor_split([CONFIG.hidden_size])
    torch.testing.assert_close(out.confidence[0], out.h[0] @ of_h + w1[previous] @ of_previous)
    expected = normed(out.h[0], dspark_values["mtp.2.norm.weight"]) @ dspark_values["head.weight"].T
    torch.testing.assert_close(out.base[0], expected)


def test_drafts_of_dspark_can_be_given(dspark_values):
    head = dspark_of(dspark_values)
    keys = head.main_keys(taps())
    free = head.draft(keys, SLOTS)
    assert torch.equal(head.draft(keys, SLOTS, free.ids[:4]).logits, free.logits)
    forced = head.draft(keys, SLOTS, (free.ids + 1) % VOCAB)
    assert torch.equal(forced.base, free.base)
    assert (forced.logits != free.logits).any(-1)[0].tolist() == [False] + [True] * 4


# --- rounding, and faults


def parts(values, noise, reading=RIGHT):
    """Everything that both heads give."""
    mtp_values, dspark_values = values
    mtp = mtp_of(mtp_values, noise=noise, reading=reading).draft(*mtp_rows(12), 3)
    dspark = dspark_of(dspark_values, noise=noise, reading=reading)
    keys = dspark.main_keys(taps())
    drafts = dspark.draft(keys, SLOTS)
    return (
        {name: getattr(mtp, name) for name in ("streams", "keys", "logits")},
        {name: getattr(drafts, name) for name in ("h", "base", "logits", "confidence")}
        | {"keys": torch.stack(keys, 1)},
    )


@pytest.fixture(scope="module")
def right(mtp_values, dspark_values):
    return parts((mtp_values, dspark_values), exact())


def test_replicas_surround_the_exact_values(mtp_values, dspark_values, right):
    for alone, moved in zip(right, parts((mtp_values, dspark_values), exact(3)), strict=True):
        for name, x in alone.items():
            assert moved[name].shape == (4, *x.shape[1:])
            torch.testing.assert_close(moved[name][:1], x)
            off = (moved[name][1:] - x).norm(dim=-1) / x.norm(dim=-1)
            assert off.min() > 0
            assert off.median() < 0.1, name


def differing(some, others):
    return {name for name, x in some.items() if not torch.equal(x, others[name])}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_changes_the_head_that_has_it(name, mtp_values, dspark_values, right):
    mtp, dspark = map(differing, right, parts((mtp_values, dspark_values), exact(), FAULTS[name]))
    assert bool(mtp) == (name in BOTH | OF_MTP) == acts(FAULTS[name], Mtp)
    assert bool(dspark) == (name not in OF_MTP | OF_V41) == acts(FAULTS[name], Dspark)
    assert acts(FAULTS[name], Dspark41) == (name not in OF_MTP)
    if name == "confidence-normed":
        assert dspark == {"confidence"}
    if name == "collapsed-fed-back":
        assert mtp == {"streams", "keys", "logits"}


def test_rows_that_were_skipped_are_zero_and_change_the_draft(mtp_values, dspark_values, right):
    mtp, dspark = parts((mtp_values, dspark_values), exact(), skipping({5, N - 2}))
    assert differing(right[0], mtp) == set(mtp)
    assert differing(right[1], dspark) == set(dspark)
    assert (dspark["keys"] == 0).all(-1).nonzero()[:, -1].unique().tolist() == [5, N - 2]
