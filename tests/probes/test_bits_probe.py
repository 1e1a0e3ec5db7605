"""The bits probe: on the demo nothing differs, and whoever sees, loses or keeps too much is named where it begins."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fathom.kernels.formats.stored import Dense, Slots
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.attention import CsaAttention, HcaAttention
from fathom.model.config import LayerKind
from fathom.model.moe import HashGate
from fathom.model.observe import sites
from fathom.probes import bits
from fathom.probes.bits import FULL, QUICK, Compared, Reach, Tally, heat_map, judge, poison, prefixes, reached, sees
from fathom.probes.bits import selections as judged_selections
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.probe import run_probe, silent
from fathom.probes.shared.exact import exact
from fathom.probes.shared.trace import Difference, Trace, _multipliers, row_digests
from fathom.probes.subject import Subject, run_tokens
from fathom.runtime.options import RunOptions
from tests.exact_ops import EXACT
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

AFTER, BEYOND, LOST = (
    "rows moved by a token that comes after them",
    "rows moved by a past token outside of their window and attended entries",
    "share of rows not moved by a token of their window or attended entries",
)
DECODED = "decoded on, 6 tokens one by one: runs, of 3, that differ at a site"
CUT = "cut into calls: runs, of 2, that differ at a site"
CACHES = "cut into calls: runs that leave something else in caches"


def local(inject=None, **ops):
    """A fault that changes a model, or replaces ops; each value makes the new op from the old one."""
    if inject is not None:
        return Fault("local", "", "", inject=inject)
    return Fault("local", "", "", ops=lambda old: old._replace(**{k: make(getattr(old, k)) for k, make in ops.items()}))


def failures(findings):
    """Failed findings by what they are, with layer and evidence."""
    return {finding.what: (finding.layer, finding.evidence) for finding in findings if finding.failed}


def seen(fault):
    """Failures of the first experiment, by what and layer."""
    _, findings = QUICK.seen(Subject(fault=fault), silent)
    return {(finding.what, finding.layer): finding.evidence for finding in findings if finding.failed}


def run(experiment, subject, probe=QUICK):
    """Failures of one of the others."""
    groups, findings = getattr(probe, experiment)(subject, silent)
    return failures([*(finding for what, runs in groups.items() for finding in judge(what, runs)), *findings])


def test_the_demo_passes_and_every_experiment_was_made():
    report = run_probe(QUICK, Subject(), silent).report
    assert not report.failed, failures(report.findings)
    assert {finding.layer for finding in report.findings} == {None, 0, 1, 2, 3}
    assert sum(finding.verdict is Verdict.MEASURED for finding in report.findings) == 2
    assert [row[:3] for row in report.parts[0].rows] == [
        ("token t + 1 changed", 2, 0),
        ("every token after t changed", 2, 0),
        ("decoded on, 6 tokens one by one", 3, 0),
        ("cut into calls", 2, 0),
        ("stored in another form", 2, 0),
        *((name, 1, 0) for name in ("run 2", "after prompt B", "in turns with B")),
        ("saved and restored half way", 1, 0),
        ("in memory that held NaN", 1, 0),
    ]


# --- what a token sees


def test_an_unfinished_block_is_seen_by_the_hca_layer_that_attends_to_it():
    fault = FAULTS["future-block-visible"]
    found = seen(fault)
    assert found[AFTER, 2] == {"token changed": 64, "row": 63}, "half a block early"
    assert {layer for _, layer in found} == {2}, "the other layers are well"
    leaks = run("followed", Subject(fault=fault))
    assert len(leaks) == 2
    assert all(layer == 2 for layer, _ in leaks.values())
    assert {leak["first place"] for _, leak in leaks.values()} == {"attention.mixed of layer 2, token 63"}


@pytest.mark.parametrize(("name", "layer"), [("ring-off-by-one", 0), ("entries-off-by-one", 1)])
def test_rows_read_in_the_wrong_place(name, layer):
    assert {(BEYOND, layer), (LOST, layer)} <= seen(FAULTS[name]).keys()


def test_a_window_that_is_one_token_short_is_the_least_that_shows():
    assert seen(FAULTS["window-one-short"]).keys() == {(LOST, 0), (LOST, 2)}


def _roll(op):
    return lambda x, *rest: op(x.roll(-1, 0), *rest)


@pytest.mark.parametrize(
    ("op", "ahead", "place"),
    [
        ("attend", lambda op: lambda q, ring, *rest: op(q, ring.roll(-1, 0), *rest), "mixed of layer 0, token 62"),
        ("expand", _roll, "streams of layer 0, token 62"),
        # of an entry whose own tokens end at 59
        ("pool", lambda op: lambda *given: op(*given).roll(-1, 0), "entry of layer 1, entry 14"),
    ],
)
def test_a_look_ahead_anywhere_moves_the_past(op, ahead, place):
    found = run("followed", Subject(fault=local(**{op: ahead})))
    assert len(found) == 2
    assert {evidence["first place"] for _, evidence in found.values()} == {f"attention.{place}"}


def test_a_model_that_does_not_read_its_input_is_vacuous():
    def deaf(model):
        table = model.embedding.weight
        model.embedding.weight = table[:1].repeat(len(table), 1)
        for block in model.blocks:
            gate = block.experts.gate
            if isinstance(gate, HashGate):
                gate.table = gate.table[:1].repeat(len(gate.table), 1)

    (found,) = run("followed", Subject(fault=local(deaf))).values()
    assert "does not read its input" in found[1]["why"]


def test_layers_of_a_deep_model_are_a_sample_with_both_ends(tmp_path):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[4] * 11 + [128], num_hidden_layers=12), seed=1)
    assert FULL._layers(Subject(tmp_path).config) == [0, 4, 8, 10, 11]


def test_selections_by_hand():
    config = replace(Subject().config, index_topk=2)
    good = torch.full((12, 2), -1)  # ratio 4: positions 3 .. 6 see one entry, 7 .. 10 two, 11 three
    good[3:, 0], good[7:, 1] = 0, 1
    assert judged_selections(config, {1: good}).measured == 0
    for t, row, what in (
        (3, [1, -1], "an unfinished block"),
        (2, [0, -1], "a block before its end"),
        (11, [0, -1], "too few"),
        (11, [2, 2], "one entry twice"),
        (11, [-3, 1], "no entry"),
    ):
        wrong = good.clone()
        wrong[t] = torch.tensor(row)
        finding = judged_selections(config, {1: good, 3: wrong})
        assert finding.measured == 1, what
        assert (finding.evidence["csa layer"], finding.evidence["t"]) == (3, t), what


def test_what_a_row_sees_by_hand():
    config = Subject().config  # layers SWA, CSA (4), HCA (128), CSA; window 16
    assert sees(config, 0, 2, 40).nonzero()[:, 0].tolist() == [*range(2, 18)]
    assert sees(config, 2, 100, 260).nonzero()[:, 0].tolist() == [*range(100, 116), *range(127, 260)]
    selected = torch.full((60, 1), -1)
    selected[30], selected[40], selected[50] = 2, 3, 4
    # token 10 is in entry 2, and in entry 3 by its first series
    assert sees(config, 1, 10, 60, selected).nonzero()[:, 0].tolist() == [*range(10, 26), 30, 40]


def test_judging_reach_by_hand():
    expected = torch.tensor([[False, True, True, True]])

    def verdicts(*moved):
        return [finding.failed for finding in reached(Reach(0, (1,), torch.tensor([moved]).bool(), expected))]

    assert verdicts(0, 1, 1, 1) == [False, False, False]
    assert verdicts(1, 1, 1, 1) == [True, False, False], "row 0 comes before the changed token 1"
    assert verdicts(0, 1, 1, 0) == [False, False, True], "row 3 attends to an entry that holds it"
    narrow = [*reached(Reach(0, (1,), expected, torch.tensor([[False, True, True, False]])))]
    assert [finding.failed for finding in narrow] == [False, True, False], "row 3 does not see it"
    assert narrow[1].evidence == {"token changed": 1, "row": 3}


def test_the_picture_shows_what_moved():
    config, positions = Subject().config, tuple(range(130))
    moved = torch.stack([sees(config, 2, p, 144) for p in positions])
    values = heat_map(LayerKind.HCA, Reach(2, positions, moved, moved)).values
    assert [len(values), len(values[0])] == [9, 9]
    assert values[0][8] == 1, "all of block 0 moves rows 128 .. 143"
    assert values[0][2] == 0, "out of the window, and the block is not finished"
    assert values[8][0] == 0, "the past"


# --- how a prompt is cut


def test_a_lost_frontier_shows_in_the_first_entry_that_needed_it():
    found = run("cut", Subject(fault=FAULTS["frontier-lost"]))
    layer, evidence = found[CUT]
    assert (layer, evidence["first run"]) == (1, "21 tokens in calls of 3")
    assert (evidence["first place"], evidence["runs with other logits"]) == ("attention.entry of layer 1, entry 0", 2)
    layer, evidence = found[CACHES]
    assert (layer, evidence["first part"]) == (1, "entries.rows of layer 1")
    assert evidence["components"] == ["entries", "frontier", "indexer_frontier", "indexer_keys", "window"]
    assert found[DECODED][1]["first place"] == "attention.entry of layer 1, entry 5"


class OneBeforeTheEnd(HcaAttention):
    """Sees the entry of the open block from the one position before the block's last on."""

    def beyond_window(self, x, latent, call, cache):
        beyond = super().beyond_window(x, latent, call, cache)
        early = call.count == 1 and (call.first + 2) % beyond.ratio == 0
        return beyond._replace(entries=Slots(cache.entries.data, None, -1)) if early else beyond


class OneInPlace(CsaAttention):
    """Attends in decode to the entry that the next block will have, in place of the last one selected."""

    def beyond_window(self, x, latent, call, cache):
        beyond = super().beyond_window(x, latent, call, cache)
        if call.count > 1:
            return beyond
        selected = beyond.selected.clone()
        selected[:, -1] = (call.first + 1) // beyond.ratio
        return beyond._replace(entries=Slots(cache.entries.data, None, -1), selected=selected)


def leaking(kind):
    def inject(model):
        for block in model.blocks:
            if type(block.attention) is kind.__base__:
                block.attention.__class__ = kind

    return local(inject)


@pytest.mark.parametrize(
    ("fault", "layer", "token"),
    [
        (FAULTS["leak-of-one-entry-in-decode"], 2, 21),
        (leaking(OneBeforeTheEnd), 2, 126),
        (leaking(OneInPlace), 1, 21),
    ],
    ids=["hca", "hca, one position", "csa"],
)
def test_an_entry_too_many_in_decode_shows_where_it_is_seen(fault, layer, token):
    found = run("cut", Subject(fault=fault))
    assert {what.partition(":")[0] for what in found} == {DECODED.partition(":")[0]}
    assert found[DECODED][0] == layer
    assert found[DECODED][1]["first place"] == f"attention.mixed of layer {layer}, token {token}"


def test_a_cache_that_only_the_next_call_would_miss_is_seen_at_once():
    """A token of the frontier is changed after the last call: no output of this prompt depends on it."""

    def inject(model):
        class Forgetful(type(model)):
            def __call__(self, tokens, state):
                out = super().__call__(tokens, state)
                if state.position == 21 and len(tokens) < 21:
                    state.layers[1].frontier.kv[16 % 8, 0] += 1
                return out

        model.__class__ = Forgetful

    ((what, (layer, evidence)),) = run("cut", Subject(fault=local(inject))).items()
    assert (what, layer) == (CACHES, 1)
    assert (evidence["first run"], evidence["first part"]) == (
        "21 tokens in calls of 3",
        "frontier.kv of layer 1",
    )


@pytest.mark.parametrize("name", ["attend", "select"])
def test_an_op_set_that_is_wrong_where_a_call_does_not_begin_at_0(name):
    """It is not in the exact runs, whose op set is fp64's: only the comparison on the same arguments can see it."""
    healthy = getattr(CPU, name)

    def attend(q, ring, first, *rest):
        return healthy(q, ring, first, *rest) * (1 if first == 0 else 1.02)

    def select(q, head_weights, keys, first, ratio, k):
        return healthy(q if first == 0 else -q, head_weights, keys, first, ratio, k)

    ops = CPU._replace(**{name: {"attend": attend, "select": select}[name]})
    ((what, (_, evidence)),) = run("cut", Subject(ops=ops)).items()
    assert what.startswith({"attend": "the run's own attention", "select": "the run's own selections"}[name])
    assert evidence["at position" if name == "attend" else "token"] > 0


def test_the_tally_allows_one_rounding_and_no_more():
    q, ring, sink = torch.ones(1, 1, 128).bfloat16(), torch.ones(1, 128).bfloat16(), torch.zeros(1)

    def worst(factor):
        tally = Tally()
        ops = CPU._replace(attend=lambda *args: (CPU.attend(*args).float() * factor).bfloat16())
        tally.watched(ops).attend(q, ring, 0, 1, None, 0, None, sink)
        return tally.worst

    assert worst(1) == 0
    assert 0 < worst(1 + 2**-7) <= 1
    assert worst(1 + 2**-6) > 1


def test_the_tally_allows_the_rounding_of_masses_where_they_are_rounded(monkeypatch):
    triton = pytest.importorskip("fathom.kernels.triton_ops", reason="Triton is not on every platform").TRITON
    g = torch.Generator().manual_seed(0)
    q, ring, entries = (torch.randn(*shape, generator=g).bfloat16() for shape in ((3, 2, 64), (130, 64), (60, 64)))

    def worst(attend):
        tally = Tally()
        tally.watched(triton._replace(attend=attend)).attend(q, ring, 250, 128, entries, 4, None, torch.zeros(2))
        return tally.worst

    assert 0 < worst(triton.attend) <= 1
    assert worst(partial(triton.attend)) > 10  # not known as an op of Triton's, and nothing is allowed
    monkeypatch.setattr(bits, "mass_unit", lambda *_: 2.0**-8)
    assert worst(lambda q, *rest: triton.attend(q * 1.03, *rest)) > 1


def test_the_full_grid_has_every_chunk_and_both_residues():
    grid = list(FULL._grid(Subject().config))
    for chunk in FULL.chunks:
        residues = {length % 4 for size, length in grid if size == chunk}
        assert residues >= ({1, 2, 3} if chunk == 512 else {0, 1, 2, 3})
    for block in (128, 256):
        assert {length % 128 for length in FULL.lengths if abs(length - block) <= 3} == {125, 126, 127, 0, 1, 2, 3}


def test_a_rotation_of_rows_that_fill_no_vector_is_the_same_in_every_call(tmp_path):
    write_checkpoint(tmp_path, micro_config(), seed=1, formats="bf16")  # 4 pairs
    probe = replace(QUICK, chunks=(1,), lengths=(97,), small_upto=97)
    assert not run("cut", Subject(tmp_path, RunOptions(numerics="plain")), probe)


def test_exact_ops_are_those_of_an_independent_implementation():
    subject = Subject()
    tokens = subject.tokens(140)
    mine, theirs = (run_tokens(subject.load(ops=ops).model, tokens, 140)[0] for ops in (exact(CPU), EXACT))
    assert torch.equal(mine, theirs)


def test_exact_products_do_not_depend_on_the_batch_and_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((70, 512), (96, 512)))
    ops = exact(CPU)
    expected = ops.linear(x, Dense(weight))
    assert torch.equal(expected, (x.double() @ weight.double().T).float())
    for rows in (1, 2, 33):
        assert torch.equal(ops.linear(x[:rows], Dense(weight)), expected[:rows])
    grouped = ops.grouped_linear(x.view(70, 2, 256), Dense(weight[:, :256]), 2)
    assert torch.equal(grouped[:, 1], ops.linear(x[:, 256:], Dense(weight[48:, :256])))


def test_prefixes_are_the_prompts_they_stand_for():
    subject = Subject()
    model, ids = subject.load(ops=exact(CPU)).model, torch.tensor(subject.tokens(12))
    for length, trace in zip((4, 5, 11), prefixes(model, ids, 4, (4, 5, 11), model.new_state(11, 4)), strict=True):
        (expected,) = prefixes(model, ids, length, (length,), model.new_state(length, length))
        assert Compared.of(trace, expected) == Compared([], [])
        assert len(trace.rows[sites.HIDDEN, None]) == length


# --- calls of few tokens, and other forms of caches


FEW_ROWS = "as run, calls of 1 to 8 put back on one call: rows, of 15205, of other bits"


def test_what_one_op_does_for_few_tokens_alone_is_named_where_it_is_done():
    ((what, (layer, evidence)),) = run("few", Subject(fault=FAULTS["experts-of-few-tokens-unrounded"])).items()
    assert (what, layer) == (FEW_ROWS, 0)
    assert evidence["first place"] == "experts.output of layer 0, token 132", "the first behind the long call"


@pytest.mark.parametrize("tokens", range(1, 9))
def test_a_last_bit_in_a_call_of_so_many_tokens_shows(tokens):
    def last_bit(op):
        return lambda x, *rest: op(x, *rest) * (1 + 2**-7 if len(x) == tokens else 1)  # one unit of bf16

    (found,) = run("few", Subject(fault=local(collapse=last_bit))).values()
    assert found[1]["first place"] == f"attention.input of layer 0, token {132 + tokens * (tokens - 1) // 2}"


@pytest.mark.parametrize("options", [RunOptions(dtype="fp32"), RunOptions(numerics="plain", dtype="fp32")])
def test_calls_of_few_tokens_have_the_bits_of_a_long_one_in_other_arithmetic(options):
    assert not run("few", Subject(options=options))


def test_of_an_op_set_whose_sums_change_their_order_it_is_measured():
    _, (found,) = QUICK.few(Subject(ops=REFERENCE), silent)
    assert found.verdict is Verdict.MEASURED
    assert found.measured > 0


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("gathered-entries-scaled-as-the-one-before", "attention.mixed of layer 1, token 3"),
        ("narrow-keys-scaled-as-the-one-before", "indexer.selected of layer 1, token 67"),
    ],
)
@pytest.mark.parametrize("options", [RunOptions(), RunOptions(entry_format="fp8", key_format="fp4")])
def test_a_form_of_caches_that_is_read_otherwise_is_named(fault, place, options):
    ((_, (layer, evidence)),) = run("stored", Subject(options=options, fault=FAULTS[fault])).items()
    assert (layer, evidence["first place"]) == (1, place)


def test_forms_that_cannot_hold_the_runs_numbers_are_left_out():
    def forms(**options):
        groups, _ = QUICK.stored(Subject(options=RunOptions(**options)), silent)
        return [name for runs in groups.values() for name in runs]

    assert forms() == ["entries in fp8, index keys in fp4", "entries in dtype, index keys in fp8"]
    assert forms(dtype="fp32") == ["entries in dtype, index keys in fp8"]
    assert forms(numerics="plain") == []


# --- what ran before


def test_noise_is_named_where_it_first_comes_in():
    found = run("repeat", Subject(fault=FAULTS["unrepeatable"]))
    assert len(found) == 10
    assert {evidence.get("first place") for _, evidence in found.values()} == {
        None,
        "attention.mixed of layer 0, token 0",
    }


def test_a_frontier_of_the_last_sequence_is_named_and_trips_on_nan():
    found = run("repeat", Subject(fault=FAULTS["stale-frontier"]))
    layer, evidence = found["after prompt B: runs, of 1, that differ at a site"]
    assert (layer, evidence["first place"]) == (1, "attention.entry of layer 1, entry 0")
    _, evidence = found["after prompt B: runs that leave something else in caches"]
    assert evidence["first part"] == "entries.rows of layer 1"
    assert "not finite" in found["in memory that held NaN: a tripwire ended the run"][1]["why"]


def test_a_row_that_is_read_but_not_saved():
    found = run("repeat", Subject(fault=FAULTS["ring-off-by-one"]))
    assert {what.partition(":")[0] for what in found} == {"saved and restored half way"}


def test_a_ring_that_two_sequences_share_shows_only_in_turns():
    def pooled(model):
        class Pooled(type(model)):
            ring = None

            def new_state(self, max_context, chunk):
                state = super().new_state(max_context, chunk)
                cache = state.layers[2]
                self.ring = self.ring or cache.ring
                cache.ring = cache.components["window"] = self.ring
                return state

        model.__class__ = Pooled

    found = run("repeat", Subject(fault=local(pooled)))
    assert {what.partition(":")[0] for what in found} == {"in turns with B"}
    layer, evidence = found["in turns with B: runs, of 1, that differ at a site"]
    assert (layer, evidence["first place"].partition(",")[0]) == (2, "attention.mixed of layer 2")


def test_another_prompt_that_is_the_same_is_vacuous(monkeypatch):
    subject = Subject()
    loudest = int(subject.model.embedding.weight.float().norm(dim=1).argmax())
    monkeypatch.setattr(Subject, "tokens", lambda _, count: [loudest] * count)
    assert list(run("repeat", subject)) == ["prompt B differs from A"]


def test_memory_comes_back_with_nan():
    share = poison(Subject().model, [torch.zeros(65, dtype=torch.int64)])
    assert 0 <= share <= 1


# --- all of it


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (replace(QUICK, chunks=(127,)), "no ring wraps"),
        (replace(QUICK, lengths=(1 << 20,)), "the run takes 1048710 positions, the model has 1048576"),
        (replace(QUICK, tokens=1 << 21), "the run takes 2097152 positions, the model has 1048576"),
        (replace(QUICK, repeats=1), "nothing to be compared with"),
    ],
)
def test_what_could_not_differ_is_vacuous(probe, why):
    report = run_probe(probe, Subject(), silent).report
    assert why in report.summary
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]


@pytest.mark.parametrize(
    ("overrides", "options", "formats"),
    [
        ({"compress_ratios": [128, 4, 0, 4]}, {"numerics": "plain", "dtype": "fp32"}, "nvfp4"),
        ({"compress_ratios": [4, 128, 128, 0]}, {}, "base"),
        ({"compress_ratios": [0, 4, 130, 4]}, {}, "official"),
        ({"sliding_window": 200}, {}, "official"),
    ],
)
def test_other_checkpoints_pass(tmp_path, overrides, options, formats):
    write_checkpoint(tmp_path, tiny_config(**overrides), seed=3, formats=formats)
    subject = Subject(tmp_path)
    report = run_probe(QUICK, replace(subject, options=subject.with_options(**options)), silent).report
    assert not report.failed, failures(report.findings)


def test_a_model_of_windows_alone_passes(tmp_path):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[0, 0], num_hidden_layers=2), seed=3)
    report = run_probe(QUICK, Subject(tmp_path, ops=REFERENCE), silent).report
    assert not report.failed
    assert not any("selections" in finding.what for finding in report.findings)


# --- digests


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64])
def test_a_digest_sees_any_one_number(dtype):
    x = torch.arange(12).view(2, 2, 3).to(dtype)
    for at in range(6):
        other = x.clone()
        other[1].view(-1)[at] += 1
        assert (row_digests(x) != row_digests(other)).tolist() == [False, True]
    swapped = x.clone()
    swapped[0, 0] = x[0, 0].flip(0)
    assert (row_digests(x) != row_digests(swapped)).tolist() == [True, False], "order counts"


def test_rows_of_one_number_have_a_digest_each():
    assert row_digests(torch.tensor([1.0, 2.0, 1.0])).unique().numel() == 2


def test_a_digest_sees_the_sign_of_zero_and_passes_over_padding():
    assert not torch.equal(row_digests(torch.tensor([[0.0]])), row_digests(torch.tensor([[-0.0]])))
    narrow, wide = torch.tensor([[4, -1]], dtype=torch.int32), torch.tensor([[4, -1, -1, -1]], dtype=torch.int32)
    assert torch.equal(row_digests(narrow), row_digests(wide))
    assert not torch.equal(row_digests(narrow), row_digests(torch.tensor([[4, 0]], dtype=torch.int32)))


def test_multipliers_are_odd_and_unlike_each_other():
    some = _multipliers(4096, torch.device("cpu"))
    assert (some % 2).abs().eq(1).all()
    assert len(some.unique()) == 4096
    assert torch.equal(_multipliers(10, torch.device("cpu")), some[:10])
    assert (some.double() / 2**63).mean().abs() < 0.05, "spread over the whole range"


def test_comparing_traces_by_hand():
    embedded, mixed = (sites.EMBEDDED, None), (sites.MIXED, 1)
    one = Trace(
        {embedded: torch.tensor([1, 2, 3]), mixed: torch.tensor([4])}, {(1, "window.recent"): torch.tensor([5])}
    )
    assert one.differences(one) == []
    longer = one._replace(rows=one.rows | {mixed: torch.tensor([4, 4])})
    assert one.differences(longer) == [Difference(sites.MIXED, 1, 1)], "a row more"
    missing = one._replace(rows={embedded: torch.tensor([1, 9, 9])})
    assert [str(place) for place in one.differences(missing)] == [
        "embedded, token 1",
        "attention.mixed of layer 1, token 0",
    ]
    assert one.differences(missing, lambda *_: 1) == [Difference(sites.MIXED, 1, 0)]
    assert one.other_caches(one._replace(caches={(1, "window.recent"): torch.tensor([6])})) == [(1, "window.recent")]
