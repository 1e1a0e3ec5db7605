"""What ranks exchange and how long a call takes, by where experts lie: against numbers of V4-Pro written out here."""

from dataclasses import replace
from itertools import combinations
from math import comb

import pytest
import torch

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.published import published_configs, published_tensors
from fathom.model.choices import ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.ranks.ranks import evenly, undivided
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.experts import Work, faster, planner
from fathom.runtime.plan.fullest import pairs
from fathom.runtime.plan.gpus import GPUS, named
from fathom.runtime.plan.prefill import overlapped

B200 = GPUS["b200"].rates
MB = 1e6
LAYERS, CSA, HIDDEN, INNER, EXPERTS, K = 61, 30, 7168, 3072, 384, 6  # of V4-Pro
CODED = 1 + 1 / 128  # bytes of a number in FP8 with its part of a scale


def published(name):
    config = ModelConfig.from_file(published_configs()[name])
    return config, census(published_tensors(config, "fp4"), config)


@pytest.fixture(scope="module")
def pro():
    return published("deepseek-v4-pro")


@pytest.fixture(scope="module")
def flash():
    return published("deepseek-v4-flash")


@pytest.fixture(scope="module")
def eight(pro):
    """Planners of V4-Pro on eight ranks."""
    return {way: planner(*pro, options(), 8, way) for way in (ROWS, WHOLE)}


def options(chunk=8192, device="cuda", **more):
    return RunOptions(device=device, prefill_chunk=chunk, **more)


def received(found):
    return {one.what: one.nbytes for one in found.exchanges}


def of_layers(found, part):
    """Bytes that a rank receives in a layer, of all exchanges of a sublayer."""
    return sum(one.times * one.nbytes for one in found.exchanges if one.what.startswith(f"{part}, ")) / LAYERS


def test_bytes_of_a_long_call_by_rows(eight):
    found = eight[ROWS].prefill(8192, 8192, B200)
    t, kept = 8192, 7 / 8
    assert received(found) == {
        "embedded tokens": 2 * t * (HIDDEN * 2 + 4),
        "attention, input": t * HIDDEN * 2 * kept,
        "attention, selection": t * 1024 * 4 * kept,
        "attention, low rank": t * 16 * 1024 * CODED * kept,
        "attention, output": t / 8 * HIDDEN * 2 * kept,
        "experts, input": t * HIDDEN * CODED * kept,
        "experts, ids and weights": t * K * 8 * kept,
        "experts, between their matrices": t * (K + 1) * INNER * CODED * kept,
        "experts, output": t / 8 * HIDDEN * 2 * kept,
        "output of the last layer": t * HIDDEN * 2 * kept,
        "logits of a token": 129280 * 4 * kept,
        "what ranks compare": 7 * 8 * (1 + 2 * 31 + 3 * CSA) // 62,  # tokens; KV and entry; and a key
    }
    assert round(of_layers(found, "experts") / MB, 1) == 220.3
    times = {one.what: one.times for one in found.exchanges}
    assert (times["experts, input"], times["attention, selection"], times["what ranks compare"]) == (61, 30, 62)


def test_bytes_of_a_long_call_of_whole_experts(eight):
    found = eight[WHOLE].prefill(16384, 16384, B200)
    t, kept, reached = 16384, 7 / 8, 1 - comb(336, 6) / comb(384, 6)
    assert 7 * reached == pytest.approx(3.88, abs=0.01)  # other ranks that a token's row goes to
    experts = {what: (one.times, one.nbytes) for one in found.exchanges if (what := one.what).startswith("experts")}
    assert experts == {  # in two halves
        "experts, ids and weights": (122, t / 2 * K * 8 * kept),
        "experts, dispatch": (122, int(t / 2 * kept * reached * HIDDEN * CODED)),
        "experts, combine": (122, t / 2 / 8 * K * kept * HIDDEN * 2),
    }
    assert of_layers(found, "attention") == of_layers(eight[ROWS].prefill(16384, 16384, B200), "attention")
    once = {one.what: one for one in eight[WHOLE].prefill(16384, 16384, B200, parts=1).exchanges}
    assert (once["experts, dispatch"].times, once["experts, dispatch"].nbytes) == (
        61,
        pytest.approx(2 * experts["experts, dispatch"][1], abs=2),
    )


def test_bytes_of_a_token(eight):
    rows, whole = ({one.what: one for one in eight[way].token(8192, B200).exchanges} for way in (ROWS, WHOLE))
    assert rows["experts, between their matrices"].nbytes == 7 * INNER * 2 * 7 // 8
    assert rows["experts, output"].nbytes == rows["attention, output"].nbytes == HIDDEN * 2 * 7 // 8
    assert whole["experts, outputs of all"] == ("experts, outputs of all", 61, 2 * K * (HIDDEN * 2 + 4))
    assert sum(one.times for one in rows.values()) - sum(one.times for one in whole.values()) == LAYERS


def test_numbers_are_not_coded_where_they_are_not_rounded_or_few(pro, eight):
    plain = {way: planner(*pro, options(numerics="plain"), 8, way).prefill(8192, 8192, B200) for way in (ROWS, WHOLE)}
    assert round(of_layers(plain[ROWS], "experts") / MB, 1) == 424.2
    assert received(plain[WHOLE])["experts, dispatch"] == pytest.approx(
        received(eight[WHOLE].prefill(8192, 8192, B200))["experts, dispatch"] * 2 / CODED, rel=1e-6
    )
    assert received(plain[WHOLE])["attention, low rank"] == 8192 * 16 * 1024 * 2 * 7 / 8
    few, more = (received(eight[ROWS].prefill(t, 8192, B200)) for t in (32, 33))
    assert "experts, input" not in few, "each rank has all tokens"
    assert few["experts, between their matrices"] == 32 * 7 * INNER * 2 * 7 / 8
    assert more["experts, between their matrices"] == int(33 * 7 * INNER * CODED * 7 / 8)


def test_numbers_of_cut_groups_are_not_coded(flash):
    """Of V4-Flash on 32 ranks each has 64 of 2,048 columns of SwiGLU, half a group; inputs of 4,096 are whole."""
    found = received(planner(*flash, options(), 32, ROWS).prefill(8192, 8192, B200))
    assert found["experts, between their matrices"] == 8192 * 7 * 2048 * 2 * 31 / 32
    assert found["experts, input"] == 8192 * 4096 * CODED * 31 / 32


@pytest.mark.parametrize(("tokens", "parts"), [(33, 1), (8192, 1), (16383, 1), (16384, 2)])
def test_few_tokens_travel_to_experts_at_once(pro, tokens, parts):
    """In a half each expert gets 128 tokens; a call of up to 32 goes to all ranks."""
    own = planner(*pro, options(rank_tokens="own"), 2, WHOLE)
    times = {one.what: one.times for one in own.prefill(tokens, 8192, B200).exchanges}
    assert times["experts, dispatch"] == times["experts, combine"] == parts * LAYERS
    few = {one.what: one.times for one in own.prefill(32, 8192, B200).exchanges}
    assert "experts, dispatch" not in few
    assert few["experts, input"] == few["experts, outputs of all"] == LAYERS


def test_the_fullest_rank_of_a_token(pro):
    config = pro[0]
    assert round(pairs(config, evenly(EXPERTS, 0, 8), 1), 2) == 2.16
    assert pairs(config, undivided(EXPERTS), 1) == K
    for total, ranks, k in ((6, 3, 2), (8, 2, 3), (12, 4, 6), (6, 6, 4)):
        small = replace(config, n_routed_experts=total, num_experts_per_tok=k)
        drawn = list(combinations(range(total), k))
        largest = [max(sum(e // (total // ranks) == rank for e in one) for rank in range(ranks)) for one in drawn]
        assert pairs(small, evenly(total, 0, ranks), 1) == pytest.approx(sum(largest) / len(drawn), rel=1e-12)


def test_the_fullest_rank_of_many_tokens(pro):
    """Against tokens whose experts are drawn; of 400 draws the mean is within a few thousandths."""
    draws = torch.Generator().manual_seed(5)
    for tokens, ranks in ((512, 8), (2048, 4)):
        experts, most = evenly(EXPERTS, 0, ranks), []
        for _ in range(400):
            ids = torch.rand(tokens, EXPERTS, generator=draws).topk(K, sorted=False).indices
            most.append(int((ids // experts.size).flatten().bincount().max()))
        assert pairs(pro[0], experts, tokens) == pytest.approx(sum(most) / len(most), rel=0.005)


def test_what_an_overlap_hides():
    # the second half's rows are there before the first half's experts are done, and outputs follow them
    assert overlapped(1.0, 2.0, 3.0, 1.0, 2) == 2 + 3 + 3 + 1
    assert overlapped(9.0, 2.0, 3.0, 1.0, 2) == 9 + 3 + 3 + 1, "the shared expert takes longer than all rows"
    assert overlapped(1.0, 5.0, 1.0, 4.0, 2) == 5 + 5 + 4 + 4, "the link is never free"
    assert overlapped(1.0, 2.0, 3.0, 1.0, 1) == 2 + 3 + 1
    for stages in ((0.3, 0.7, 2.0, 0.1), (2.0, 0.1, 0.4, 3.0), (0.0, 1.0, 1.0, 1.0)):
        shared, dispatch, routed, combine = stages
        found = overlapped(*stages, 2)
        link, products = 2 * (dispatch + combine), shared + 2 * routed
        assert max(link, products) <= found <= link + products


def test_products_of_a_call(eight):
    """Routed experts: all are read, by halves of the tokens twice, until multiplying takes longer."""
    read = LAYERS * EXPERTS * 3 * INNER * HIDDEN * (0.5 + 1 / 32) / 8 / 8e12
    for way in (ROWS, WHOLE):
        assert eight[way].prefill(8192, 8192, B200).products["routed experts"] == pytest.approx(read)
    assert eight[WHOLE].prefill(8192, 8192, B200, parts=2).products["routed experts"] == pytest.approx(2 * read)
    t = 65536
    multiplied = 2 * LAYERS * t * K * 3 * INNER * HIDDEN / 8 / 4.5e15
    rows, whole = (eight[way].prefill(t, t, B200) for way in (ROWS, WHOLE))
    assert rows.products["routed experts"] == pytest.approx(multiplied)
    assert multiplied < whole.products["routed experts"] < 1.03 * multiplied, "the fullest rank"
    shared = 2 * LAYERS * t * 3 * INNER * HIDDEN / 8 / 4.5e15  # a rank's rows for all tokens, or all rows for its own
    assert rows.products["shared expert"] == pytest.approx(shared)
    assert whole.products["shared expert"] == pytest.approx(shared)
    slow = eight[ROWS].prefill(t, t, B200._replace(fp8=B200.bf16))
    assert slow.products["routed experts"] == pytest.approx(2 * multiplied)
    few = eight[ROWS].prefill(4, 8192, B200).products["routed experts"]
    assert few == pytest.approx(read * (1 - (1 - K / EXPERTS) ** 4)), "of experts that no token goes to nothing is read"
    heads = 2 * 2 * LAYERS * t * 128 / 8 * 512 * 128 / 2.25e15  # the window alone
    entries = 2 * 2 * t * 128 / 8 * 512 * (31 * (t // 2 // 128) + CSA * 1024) / 2.25e15
    assert rows.products["attention"] == pytest.approx(heads + entries)
    assert rows.products["index scores"] == pytest.approx(2 * CSA * t / 8 * 64 * 128 * (t // 2 // 4) / 2.25e15)


def test_what_is_hidden_is_of_both(eight):
    whole, rows = (eight[way].prefill(8192, 8192, B200) for way in (WHOLE, ROWS))
    travelling = sum(one.seconds(B200.link) for one in whole.exchanges if one.what.endswith(("dispatch", "combine")))
    assert 0 < whole.hidden < travelling
    assert whole.seconds == pytest.approx(whole.multiplying + whole.exchanging - whole.hidden)
    assert rows.hidden == 0
    assert eight[WHOLE].prefill(100, 8192, B200).hidden == 0, "each rank has all tokens"


def test_the_way_that_is_faster(pro, flash):
    """Long prompts go whole, which takes fewer bytes, long answers of V4-Pro by rows, of which each rank reads less."""
    long, answer = Work(1 << 20, 1), Work(128, 4096)
    assert faster(*flash, options(), 8, "b200", long).way == WHOLE
    assert faster(*pro, options(1 << 15), 8, "b200", long).way == WHOLE
    assert faster(*pro, options(512), 8, "b200", long).way == WHOLE
    chosen = faster(*pro, options(1 << 15), 8, "b200", answer)
    assert chosen.way == ROWS
    assert chosen.seconds[ROWS] < chosen.seconds[WHOLE]
    assert f"{chosen.seconds[ROWS]:.3g} s by arithmetic for 128 tokens of prompt and 4,096 new ones" in chosen.why
    assert f"{chosen.seconds[WHOLE]:.3g} s whole" in chosen.why


def test_times_are_sums_of_calls_and_tokens(pro, eight):
    found = faster(*pro, options(), 8, "b200", Work(20_000, 11)).seconds
    for way, one in eight.items():
        calls = [one.prefill(count, end, B200) for count, end in ((8192, 8192), (8192, 16384), (3616, 20_000))]
        wanted = sum(call.seconds for call in calls) + 10 * one.token(20_011, B200).seconds
        assert found[way] == pytest.approx(wanted)


def test_where_times_do_not_decide(pro):
    work, auto = Work(8192), options()
    for gpu, device in ((None, "cuda"), ("mi300x", "cuda"), (None, "cpu")):
        found = faster(*pro, options(device=device), 8, gpu, work)
        assert (found.way, found.seconds) == (ROWS, {})
        assert found.why == f"no link between ranks is known of {gpu or 'this device'}, to estimate times with"
    assert faster(*pro, options(experts=WHOLE), 8, None, work) == (WHOLE, "--experts says so", {})
    found = faster(*pro, auto, 64, "b200", work)  # 48 columns of SwiGLU on each
    assert found.way == WHOLE
    assert found.why.startswith("not the other way: 64 ranks: moe_intermediate_size, columns of SwiGLU: 48 rows")
    for experts in ("auto", ROWS, WHOLE):
        with pytest.raises(ConfigError, match="5 ranks: "):
            faster(*pro, options(experts=experts), 5, "b200", work)


def test_a_cache_or_a_draft_does_not_change_the_choice(pro):
    work = Work(8192, 16)
    plain = faster(*pro, options(), 8, "b200", work)
    assert faster(*pro, options(kv=("all=shard",)), 8, "b200", work) == plain
    assert faster(*pro, options(draft="lookup", draft_tokens=5), 8, "b200", work) == plain


@pytest.mark.parametrize(
    ("device", "gpu"),
    [("NVIDIA B200", "b200"), ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", None)],
)
def test_a_gpu_by_the_name_that_torch_tells(device, gpu):
    assert named(device) == gpu
    assert gpu is None or GPUS[gpu].rates is not None
