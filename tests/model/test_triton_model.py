"""A whole model on TRITON, in Triton's interpreter, against CPU: the kernels meet each other's real inputs."""

import gc
from functools import wraps

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.kernels.triton_ops import TRITON
from fathom.model.checkpoint.mtp import Head
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.probes.judge.checks import Status
from fathom.probes.layers import Judge
from fathom.probes.shared.alive import peak_alive
from fathom.probes.subject import Subject
from fathom.runtime.load import load, load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.alive import SLACK
from fathom.runtime.plan.planner import Planner
from fathom.runtime.statefile import snapshot
from tests.coda_adapters import adapted, write_safetensors
from tests.grids import on_demand
from tests.make_checkpoint import DSPARK, tiny_config, write_checkpoint
from tests.transformers_model import load_ours, oracle, our_logits

# Sums of some hundred fp32 products in another order, through three layers: as of chunking, audits/plain-parity.md.
BOUND = 2e-5


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    oracle((0, 4, 128), index_topk=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kv", [(), ("all=shard:bits=4,keys=3",), ("all=coda:window=1,exact=1,summary=1",)])
def test_logits_of_prefill_and_decode_are_those_of_the_blocked_ops(directory, kv):
    """Windows of 4 close in a call and between calls; of the two entries one is selected, or the first is a slot."""
    tokens = torch.randint(0, 320, (9,), generator=torch.Generator().manual_seed(0))
    options = RunOptions("plain", "fp32", kv=kv)
    want, ours = (our_logits(load(directory, options, ops).model, tokens, [6, 2, 1]) for ops in (CPU, TRITON))
    assert want.std() > 0.5
    torch.testing.assert_close(ours, want, rtol=0, atol=BOUND)
    if "shard" in str(kv):
        assert (want - our_logits(load_ours(directory), tokens)).abs().max() > 100 * BOUND, "codes matter"


def test_rows_of_a_call_are_calls_of_a_row(tmp_path):
    """As drafts need: logits and caches to the bit, in the dtype and numerics that are served; windows of 4 close."""
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[0, 4, 128], num_hidden_layers=3), seed=2)
    model = load(tmp_path, RunOptions("deployed", "bf16", "cpu", 64, "fp8", "fp4"), TRITON).model
    tokens = torch.randint(0, 500, (17,), generator=torch.Generator().manual_seed(0))[:14]
    found = []
    for sizes in ([6, 5, 3], [6, *[1] * 8]):
        state = model.new_state(14, 8, rewind=4)
        logits = torch.cat([model.logits(model(part, state)) for part in tokens.split(sizes)])
        found.append((logits[6:], snapshot(state).tensors))
    (ours, caches), (wanted, others) = found
    assert torch.equal(ours, wanted)
    assert caches.keys() == others.keys()
    assert not [name for name, part in caches.items() if not equal_bits(part, others[name])]


@pytest.mark.parametrize("products", ["auto", "exact", *on_demand("fp8")])
def test_fp8_linears_of_a_prompt_are_products_of_codes_unless_it_is_told_otherwise(tmp_path, products):
    """What ran is noted, and all it made agrees with the oracle."""
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[4], num_hidden_layers=1, num_hash_layers=0), seed=2)
    subject = Subject(tmp_path, RunOptions(fp8_products=products), TRITON)
    judge = Judge(subject, subject.options, 20, lambda *_: None)
    results = judge("as run", [20]).results
    assert not [result for result in results if result.status is Status.DIFFERS]
    agree = {result.site for result in results if result.status is Status.AGREES}
    assert {"attention.latent", "attention.output", "experts.output"} <= agree  # what FP8 linears make
    ran = subject.load().model.arithmetic.ran
    assert ("linears_fp8" in ran) == (products != "exact")
    model = load(tmp_path, RunOptions(fp8_products=products), TRITON).model
    model(torch.arange(2, 12), model.new_state(12, 10))
    assert not model.arithmetic.ran.keys() & {"linears_fp8", "experts_fp8"}, "of ten tokens none are"


def equal_bits(one, other):
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("head", list(Head))
def test_drafts_of_heads_are_those_of_the_cpu(tmp_path, head):
    write_checkpoint(tmp_path, tiny_config(**(DSPARK if head is Head.DSPARK else {})), seed=3, head=head)
    sequence = torch.randint(0, 500, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for ops in (CPU, TRITON):
        loaded = load(tmp_path, RunOptions("plain", "fp32", draft="auto", draft_tokens=3), ops)
        listener, state = loaded.head.listener(3), loaded.model.new_state(32, 23, rewind=3)
        with listening(loaded.model, {sites.STREAMS: listener}):
            loaded.model(torch.tensor(sequence[:-1]), state)
        found.append(loaded.head.draft(listener, sequence, 23, 3, loaded.head.new_state(3)))
    want, ours = found
    assert ours.tokens == want.tokens
    torch.testing.assert_close(ours.logits, want.logits, rtol=0, atol=5 * BOUND)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    _, adapters = adapted(folder, bounded=False, head_dim=32)
    write_safetensors(folder / "adapters.safetensors", adapters)
    return folder


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kv", ["all=coda:window=16,exact=4,summary=4,block=8", "all=shard:rank=32,window=16"])
def test_variants_of_grouped_heads_decode_as_on_a_cpu(llama, kv, adapters):
    """After a prompt that both read with the ops of a CPU: a basis is fitted to keys, and follows their last bits."""
    path = str(llama / "adapters.safetensors") if adapters else None
    options = RunOptions("plain", "fp32", kv=(kv,), coda_adapters=path)
    tokens, found = torch.randint(96, (66,), generator=torch.Generator().manual_seed(1)), []
    reader = load_any(llama, options).model
    for ops in (CPU, TRITON):
        state = reader.new_state(66, 60, 60)
        reader(tokens[:60], state)
        decoder = load_any(llama, options, ops).model
        found.append(torch.cat([decoder.logits(decoder(token, state)) for token in tokens[60:].split(1)]))
        assert decoder.arithmetic.ran["attend_codes" if "shard" in kv else "attend_banks"] == ops.name
    assert found[0].std() > 0.2
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=BOUND)


def test_coda_reads_a_prompt_in_blocks_as_on_a_cpu(llama):
    options = RunOptions("plain", "fp32", kv=("all=coda:window=16,exact=4,summary=4,block=8",))
    tokens = torch.randint(96, (30,), generator=torch.Generator().manual_seed(1))
    want, ours = (our_logits(load_any(llama, options, ops).model, tokens, [24, 5, 1]) for ops in (CPU, TRITON))
    torch.testing.assert_close(ours, want, rtol=0, atol=BOUND)


def collected(op):
    """The op, after which nothing lives on that the interpreter has put into cycles."""

    @wraps(op)
    def run(*args, **named):
        out = op(*args, **named)
        gc.collect()
        return out

    return run


@pytest.mark.slow
def test_a_call_takes_what_is_planned(tmp_path):
    """Of fp32: on a CPU the tripwires of a bf16 run take copies that they do not take on a GPU."""
    changes = {"hidden_size": 512, "num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    changes["n_routed_experts"] = changes["num_experts_per_tok"] = 2  # every token goes to both
    write_checkpoint(tmp_path, tiny_config(**changes), seed=1)
    options, ops = RunOptions("plain", "fp32"), {name: op for name, op in TRITON._asdict().items() if name != "name"}
    loaded = load(tmp_path, options, TRITON._replace(**{name: collected(op) for name, op in ops.items()}))
    model, state, tokens = loaded.model, loaded.model.new_state(400, 24), torch.arange(24)
    gc.freeze()
    taken = peak_alive(lambda: model.logits(model(tokens, state)))
    gc.unfreeze()
    planner = Planner(model.config, loaded.census, loaded.sharding, options, 0, "triton")
    planned = planner.largest(400, 24, even=False, few_pass=True)
    assert taken <= planned.nbytes <= 1.05 * taken + SLACK, f"{taken:,} taken, {planned.nbytes:,} by {planned}"
