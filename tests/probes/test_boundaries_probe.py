"""The boundaries probe: on the demo every cut gives the same bits, and what is lost between calls is named."""

from dataclasses import replace

import pytest
import torch

from kernels.formats.stored import Dense
from kernels.ops import CPU, REFERENCE
from probes.boundaries.cuts import Outcome, Tally, compared, prefill_then_decode, prefixes
from probes.boundaries.probe import FULL, QUICK
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.shared.exact import exact
from probes.subject import Subject, run_tokens
from runtime.options import RunOptions
from tests.exact_ops import EXACT
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

ROWS, DECODED = "with an output row that differs", "whose decode of 1 more differs from prefill"


def report(subject, probe=QUICK):
    return run_probe(probe, subject, silent).report


def failed(found):
    return {finding.what: finding for finding in found.findings if finding.failed}


def one(findings, what):
    """The failed finding whose name holds `what`."""
    (match,) = [finding for name, finding in findings.items() if what in name]
    return match


def test_the_demo_gives_the_same_bits_for_every_cut():
    found = report(Subject())
    assert not found.failed, failed(found)
    assert sum(finding.verdict is Verdict.PASS for finding in found.findings) == 10
    table = found.parts[0]
    assert [row[:5] for row in table.rows] == [[21, 1, 21, "equal", None], [131, 3, 3, None, "equal"]]


def test_a_lost_frontier_shows_in_the_first_entry_that_needed_it():
    found = failed(report(Subject(fault=FAULTS["frontier-lost"])))
    assert one(found, ROWS).evidence == {
        "length": 21,
        "chunk": 3,
        "token": 3,
        "first place": "attention.entry of layer 1, entry 0",
    }
    for component in ("window", "entries", "frontier", "indexer keys", "indexer frontier"):
        assert one(found, f"in the caches' {component}").measured == 2
    assert one(found, "in the caches' indexer keys").layer == 1
    assert one(found, DECODED).evidence == {"length": 131, "mod 4": 3, "mod 128": 3}, "128 % 4 = 0: entry 32 is whole"


def test_a_ring_read_one_row_off_shows_once_it_wraps():
    found = failed(report(Subject(fault=FAULTS["ring-off-by-one"])))
    evidence = one(found, ROWS).evidence
    assert (evidence["chunk"], evidence["first place"]) == (3, "attention.mixed of layer 0, token 15")


def test_a_frontier_of_the_last_sequence():
    found = failed(report(Subject(fault=FAULTS["stale-frontier"])))
    assert one(found, ROWS).evidence["first place"] == "attention.entry of layer 1, entry 0"


def test_a_ring_written_one_row_off_trips():
    run = run_probe(QUICK, Subject(fault=FAULTS["ring-written-off-by-one"]), silent)
    assert run.tripped


def test_a_cache_that_only_the_next_call_would_miss_is_seen_at_once():
    """The frontier's first series is overwritten after the last call: no output of this prompt depends on it."""

    def inject(model):
        class Forgetful(type(model)):
            def __call__(self, tokens, state):
                out = super().__call__(tokens, state)
                if state.position == 21 and len(tokens) < 21:
                    state.layers[1].frontier.previous_kv[0, 0] += 1
                return out

        model.__class__ = Forgetful

    found = failed(report(Subject(fault=Fault("forgetful", "", "", inject=inject))))
    (finding,) = found.values()
    assert finding.what == "cuts that leave something else in the caches' frontier"
    assert (finding.layer, finding.evidence) == (1, {"length": 21, "chunk": 3, "part": "frontier.previous_kv"})


@pytest.mark.parametrize("name", ["attend", "select"])
def test_an_op_set_that_is_wrong_where_a_call_does_not_begin_at_0(name):
    """It is not in the exact runs, whose op set is fp64's: only the comparison on the same arguments can see it."""
    healthy = getattr(CPU, name)

    def attend(q, ring, first, *rest):
        return healthy(q, ring, first, *rest) * (1 if first == 0 else 1.02)

    def select(q, head_weights, keys, first, ratio, k):
        return healthy(q if first == 0 else -q, head_weights, keys, first, ratio, k)

    ops = CPU._replace(**{name: {"attend": attend, "select": select}[name]})
    found = failed(report(Subject(ops=ops)))
    (finding,) = found.values()
    assert finding.what.startswith({"attend": "the run's own attention", "select": "the run's own selections"}[name])


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (replace(QUICK, chunks=(127,)), "no ring wraps"),
        (replace(QUICK, lengths=(1 << 20,)), "the run takes 1048577 positions, the model has 1048576"),
    ],
)
def test_cuts_that_could_lose_nothing_are_vacuous(probe, why):
    found = report(Subject(), probe)
    assert why in found.summary
    assert [finding.verdict for finding in found.findings] == [Verdict.VACUOUS]


@pytest.mark.parametrize(
    ("ratios", "options", "formats"),
    [([128, 4, 0, 4], {"numerics": "plain", "dtype": "fp32"}, "f32"), ([4, 128, 128, 0], {}, "base")],
)
def test_other_checkpoints_pass(tmp_path, ratios, options, formats):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=ratios), seed=3, formats=formats)
    subject = Subject(tmp_path)
    found = report(replace(subject, options=subject.with_options(**options)))
    assert not found.failed, failed(found)


def test_a_model_of_windows_alone_passes(tmp_path):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[0, 0], num_hidden_layers=2), seed=3)
    found = report(Subject(tmp_path, ops=REFERENCE))
    assert not found.failed
    assert not any("selections" in finding.what or "entries" in finding.what for finding in found.findings)


@pytest.mark.parametrize("overrides", [{"sliding_window": 128}, {"compress_ratios": [0, 4, 130, 4]}])
def test_prompts_are_as_long_as_windows_and_blocks_ask_for(overrides, tmp_path):
    write_checkpoint(tmp_path, tiny_config(**overrides), seed=0)
    for probe in (QUICK, FULL):
        assert probe.vacuous(Subject(tmp_path)) is None
        assert 133 in probe._lengths(Subject(tmp_path).config)
    assert not report(Subject(tmp_path), QUICK).failed


def test_a_rotation_of_rows_that_fill_no_vector_is_the_same_in_every_call(tmp_path):
    write_checkpoint(tmp_path, micro_config(), seed=1, formats="bf16")  # 4 pairs
    subject = Subject(tmp_path, RunOptions(numerics="plain"))
    assert not report(subject, replace(QUICK, chunks=(1,), lengths=(97,), small_upto=97)).failed


def test_the_full_grid_has_every_chunk_and_both_residues():
    grid = list(FULL._grid(Subject().config))
    assert {cut.chunk for cut in grid} == {1, 3, 4, 127, 128, 129, 512}
    for chunk in FULL.chunks:
        assert {cut.length % 4 for cut in grid if cut.chunk == chunk} >= ({1, 2, 3} if chunk == 512 else {0, 1, 2, 3})
    for block in (128, 256):
        assert {length % 128 for length in FULL.lengths if abs(length - block) <= 3} == {125, 126, 127, 0, 1, 2, 3}


def test_exact_ops_are_those_of_an_independent_implementation():
    subject = Subject()
    tokens = subject.tokens(140)
    mine, theirs = (run_tokens(subject.load(ops=ops).model, tokens, 140)[0] for ops in (exact(CPU), EXACT))
    assert torch.equal(mine, theirs)


def test_exact_products_do_not_depend_on_the_batch_and_are_rounded_once():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((70, 512), (96, 512)))
    ops = exact(CPU)
    whole = ops.linear(x, Dense(weight))
    assert torch.equal(whole, (x.double() @ weight.double().T).float())
    for rows in (1, 2, 33):
        assert torch.equal(ops.linear(x[:rows], Dense(weight)), whole[:rows])
    grouped = ops.grouped_linear(x.view(70, 2, 256), Dense(weight[:, :256]), 2)
    assert torch.equal(grouped[:, 1], ops.linear(x[:, 256:], Dense(weight[48:, :256])))


def test_prefixes_are_the_prompts_they_stand_for():
    subject = Subject()
    model = subject.load(ops=exact(CPU)).model
    ids = torch.tensor(subject.tokens(12))
    for length, found in zip((4, 5, 11), prefixes(model, ids, 4, (4, 5, 11)), strict=True):
        expected, _ = prefill_then_decode(model, ids, length, 0)
        assert compared(length, 4, found, expected).equal
        assert found.hash == expected.hash
        assert len(found.hidden) == length


def test_comparing_by_hand():
    left = Outcome(torch.tensor([1, 2, 3]), torch.tensor([4]), {(0, "window.recent"): torch.tensor([5, 6])})
    assert compared(3, 2, left, left).equal
    assert compared(3, 2, left._replace(hidden=torch.tensor([1, 9, 9])), left).token == 1
    assert compared(3, 2, left._replace(logits=torch.tensor([0])), left).logits
    other = left._replace(caches={(0, "window.recent"): torch.tensor([5])})
    assert compared(3, 2, other, left).parts == ((0, "window.recent"),)
    assert other.hash != left.hash


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
