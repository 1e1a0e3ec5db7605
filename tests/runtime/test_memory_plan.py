"""The memory plan's weights and caches: published figures, and what models and states really hold, byte for byte."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import Head
from fathom.model.checkpoint.published import published_tensors
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.checkpoint.weights import open_weights
from fathom.model.choices import ROWS, WHOLE
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import CapacityError
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.ranks.ranks import Group, Ranks
from fathom.model.transformer import Transformer
from fathom.runtime import memory
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.load import load
from fathom.runtime.op_sets import planned
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.plan.planner import RESERVE, Planner
from fathom.runtime.plan.weights import WeightKind, total, weights
from fathom.runtime.sharding import sharding_plan
from tests import held_bytes
from tests.held_bytes import held_caches, held_weights
from tests.make_checkpoint import DSPARK, FORMATS, make_tensors, tiny_config, write_checkpoint, write_tensors
from tests.peak_memory import peak_bytes

CONFIGS = Path(__file__).parents[2] / "model" / "published"
GPU = RunOptions(device="cuda", prefill_chunk=8192)
GIB = 1 << 30


def config_of(name, **changes):
    return dataclasses.replace(ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json"), **changes)


def published(config):
    return config, census(published_tensors(config, "fp4"), config)


@pytest.fixture(scope="module")
def thin():
    """V4's layers with few experts, on which no cache depends: a census of them takes seconds."""
    return {name: published(config_of(name, n_routed_experts=8)) for name in ("Pro", "Flash")}


def planner(subject, ranks, options=GPU, rank=0):
    config, counted = subject
    return Planner(config, counted, sharding_plan(config, ranks), options, rank, planned(options))


def narrow(entries, keys):
    return RunOptions(device="cuda", entry_format=entries, key_format=keys)


# --- published figures


@pytest.mark.parametrize(
    ("context", "entries", "keys", "csa", "index", "hca"),
    [  # of one layer, in MB; performance.md, section 2
        (1_000_000, "dtype", "dtype", 256, 64, 8),
        (1 << 13, "dtype", "dtype", 2.10, 0.52, 0.066),
        (1 << 13, "fp8", "fp4", 1.20, 0.14, 0.037),
        (1 << 17, "dtype", "dtype", 33.6, 8.4, 1.05),
        (1 << 17, "fp8", "fp4", 19.1, 2.2, 0.60),
        (1 << 20, "dtype", "dtype", 268.4, 67.1, 8.39),
        (1 << 20, "fp8", "fp8", 153.1, 34.6, 4.78),
        (1 << 20, "fp8", "fp4", 153.1, 17.8, 4.78),
    ],
)
def test_caches_of_one_layer(thin, context, entries, keys, csa, index, hca):
    caches = planner(thin["Pro"], 1, narrow(entries, keys)).plan(context).caches
    here = caches[LayerKind.CSA]["entries"] / 30, caches[LayerKind.CSA]["indexer_keys"] / 30
    for figure, found in zip((csa, index, hca), (*here, caches[LayerKind.HCA]["entries"] / 31), strict=True):
        digits = len(str(figure).partition(".")[2])
        assert round(found / 1e6, digits) == figure


@pytest.mark.parametrize(
    ("name", "context", "entries", "keys", "gb", "per_token"),
    [
        ("Pro", 1_000_000, "dtype", "dtype", 9.86, None),
        ("Pro", 1 << 20, "dtype", "dtype", 10.33, 9848),
        ("Pro", 1 << 20, "fp8", "fp8", 5.78, 5511),
        ("Pro", 1 << 20, "fp8", "fp4", 5.28, 5031),
        ("Flash", 1 << 20, "dtype", "dtype", 7.2, 6880),
        ("Flash", 1 << 20, "fp8", "fp4", 3.69, 3514),
    ],
)
def test_entries_and_keys_of_all_layers(thin, name, context, entries, keys, gb, per_token):
    """The totals in GB count a window of 128 rows in each layer too, in the form of the entries."""
    caches = planner(thin[name], 1, narrow(entries, keys)).plan(context).caches
    size = sum(parts.get(what, 0) for parts in caches.values() for what in ("entries", "indexer_keys"))
    assert per_token is None or int(size / context) == per_token
    windows = thin[name][0].num_hidden_layers * 128 * (584 if entries == "fp8" else 1024)
    assert round((size + windows) / 1e9, len(str(gb)) - 2 - (gb > 10)) == gb


def test_published_weights():
    subject = config, counted = published(config_of("Flash"))
    found = weights(config, counted, sharding_plan(config, 1), 0, mapped=True)
    assert total(found).stored == 156_015_698_140
    assert round(found[WeightKind.ROUTED].stored / 1e9, 2) == 147.17
    eighth = planner(subject, 8).weights
    assert eighth[WeightKind.ROUTED].own == found[WeightKind.ROUTED].stored // 8


def test_pro_fits_eight_gpus_of_180_gb_and_not_four():
    subject, memory, million = published(config_of("Pro")), int(180e9), 1 << 20
    eight, four = planner(subject, 8, rank=7), planner(subject, 4)
    assert subject[1].nbytes == 850_748_205_004
    assert eight.weights[WeightKind.ROUTED].own == 102_756_777_984
    assert four.weights[WeightKind.ROUTED].own == 205_513_555_968
    assert eight.plan(million).needed < 0.8 * memory
    assert eight.largest_context(memory) == million
    assert four.largest_context(memory) == four.largest_chunk(memory, 1) == 0


@pytest.mark.parametrize(("chunk", "gib"), [(2048, 2), (4096, 4), (8192, 8), (16384, 16)])
def test_untiled_index_scores(thin, chunk, gib):
    plan = planner(thin["Pro"], 1).plan(1 << 20, chunk)
    assert plan.untiled == gib * GIB
    assert plan.call.parts["HyperConnection.write"] == 57_344 * chunk, "the streams"


# --- what models and states hold


class Fake:
    """Stands for a process group: a model is built without a word to the others."""


def built(directory, ranks, rank, experts):
    config, checkpoint = ModelConfig.from_file(directory / "config.json"), Checkpoint.open(directory)
    counted, sharding = census(checkpoint.shapes(), config), sharding_plan(config, ranks, experts)
    group = Ranks(Group(rank, ranks, Fake() if ranks > 1 else None), sharding.ranks[rank])
    held = open_weights(checkpoint, counted, held=lambda name, rows: sharding.rows(name, rows, rank))
    model = Transformer(config, held, arithmetic(RunOptions("plain"), CPU, group, config))
    return SimpleNamespace(model=model, config=config, counted=counted, sharding=sharding, receipt=held.handed())


def copied_scales(counted, sharding):
    """Bytes of scales of cut matrices that more than one rank has: NVFP4's one, those of cut blocks of 128 rows."""
    copies = 0
    for name, mapping in counted.mappings.items():
        shape = counted.demanded[name].shape
        part = sharding.rows(name, shape[0], 0)
        if part.size in {0, shape[0]}:  # an expert that lies on one rank
            continue
        if part.split and mapping.form is Form.NVFP4:
            copies += (sharding.size - 1) * 4
        if part.split and mapping.form in {Form.FP8, Form.FP8_F32} and part.size < 128:
            scales = -(-shape[0] // 128) * -(-shape[1] // 128) * (4 if mapping.form is Form.FP8_F32 else 1)
            copies += scales * (128 // part.size - 1)
    return copies


def exact(directory, ranks, experts=ROWS):
    """Compare plan and model on every rank, kind by kind; returns the plans."""
    plans = []
    for rank in range(ranks):
        one = built(directory, ranks, rank, experts)
        plan = weights(one.config, one.counted, one.sharding, rank, mapped=True)
        assert {kind: (part.mapped, part.own) for kind, part in plan.items()} == held_weights(one.model)
        assert total(plan).stored == sum(one.receipt.values())
        plans.append(plan)
    whole = total(weights(one.config, one.counted, sharding_plan(one.config, 1), 0, mapped=True)).stored
    replicated = {total(plan).whole for plan in plans}
    assert len(replicated) == 1
    copies = (ranks - 1) * replicated.pop() + copied_scales(one.counted, one.sharding)
    assert sum(total(plan).stored for plan in plans) == whole + copies
    return plans


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_weights_of_the_demo(ranks):
    plans = exact(DEMO, ranks)
    assert total(plans[0]).stored == (3_517_012 if ranks == 1 else total(plans[-1]).stored)
    if ranks > 1:
        exact(DEMO, ranks, WHOLE)
        assert 0 < total(plans[0]).whole < total(plans[0]).stored < 3_517_012


@pytest.mark.parametrize("formats", FORMATS)
def test_weights_in_every_form(tmp_path, formats):
    write_checkpoint(tmp_path, tiny_config(head_dim=128, o_lora_rank=128), seed=1, formats=formats)
    for ranks in (1, 2, 4, 8):
        exact(tmp_path, ranks)


@pytest.mark.parametrize("formats", FORMATS)
def test_weights_of_whole_experts_in_every_form(tmp_path, formats):
    """Each rank reads what is planned, of experts that lie elsewhere nothing, and the shared expert as every rank."""
    write_checkpoint(tmp_path, tiny_config(head_dim=128, o_lora_rank=128), seed=1, formats=formats)
    config, checkpoint = ModelConfig.from_file(tmp_path / "config.json"), Checkpoint.open(tmp_path)
    counted, sharding = census(checkpoint.shapes(), config), sharding_plan(config, 4, WHOLE)
    routed = 0
    for rank in range(4):
        held = open_weights(checkpoint, counted, held=lambda name, rows, rank=rank: sharding.rows(name, rows, rank))
        for name, parameter in counted.demanded.items():
            if sharding.rows(name, parameter.shape[0], rank).size:
                reads = {"i64": held.table, "matrix": held.matrix}.get(parameter.kind, held.vector)
                reads(name)
        plan = weights(config, counted, sharding, rank, mapped=True)
        assert total(plan).stored == sum(held.handed().values())
        assert plan[WeightKind.SHARED].whole == plan[WeightKind.SHARED].stored > 0 == plan[WeightKind.ROUTED].whole
        routed += plan[WeightKind.ROUTED].stored
    alone = weights(config, counted, sharding_plan(config, 1), 0, mapped=True)
    assert routed == alone[WeightKind.ROUTED].stored


def test_mixed_forms_and_stacked_experts(tmp_path):
    """Layer 1 has BF16 experts in two stacks, norms in F32 and an I32 table; the model makes int64 of that."""
    config = tiny_config()
    tensors = make_tensors(config, seed=1)
    plain = make_tensors(config, seed=1, formats="bf16")
    experts = range(config["n_routed_experts"])
    name = "layers.1.ffn.experts.{}.{}.weight"
    for expert in experts:
        for part in ("w1", "w2", "w3"):
            del tensors[name.format(expert, part)], tensors[name.format(expert, part).replace(".weight", ".scale")]
    both = [torch.cat((plain[name.format(e, "w1")], plain[name.format(e, "w3")])) for e in experts]
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.stack(both)
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.stack([plain[name.format(e, "w2")] for e in experts])
    tensors["layers.1.attn_norm.weight"] = tensors["layers.1.attn_norm.weight"].float()
    tensors["layers.2.hc_attn_fn"] = tensors["layers.2.hc_attn_fn"].bfloat16()
    tensors["layers.0.ffn.gate.tid2eid"] = tensors["layers.0.ffn.gate.tid2eid"].int()
    write_checkpoint(tmp_path, config, seed=1, shards=1)
    write_tensors(tmp_path, tensors, shards=1)
    for ranks in (1, 2):
        exact(tmp_path, ranks)
    assert total(exact(tmp_path, 1)[0]).own > 2 * config["vocab_size"] * 8  # the table alone


def test_what_is_mapped_is_what_the_system_maps():
    """`held_weights` takes storages that torch cannot resize for mapped files: here the kernel says which are."""
    model = load(DEMO, RunOptions()).model
    files = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
    ranges = [tuple(int(end, 16) for end in line[0].split("-")) for line in files]

    def in_file(tensor):
        return any(low <= tensor.data_ptr() < high for low, high in ranges)

    assert in_file(model.embedding.weight)
    assert not model.embedding.weight.untyped_storage().resizable()
    assert not in_file(model.norm)
    assert model.norm.untyped_storage().resizable()


@pytest.mark.parametrize(
    "options",
    [
        RunOptions(),
        RunOptions("plain", "fp32", prefill_chunk=7),
        RunOptions(entry_format="fp8", key_format="fp4", prefill_chunk=100),
        RunOptions(key_format="fp8"),
        RunOptions(draft="lookup", draft_tokens=7),
        RunOptions(draft="lookup", draft_tokens=9, prefill_chunk=3),
    ],
)
@pytest.mark.parametrize("context", [1, 130, 5000])
def test_caches_are_allocated_to_the_byte(options, context):
    loaded = load(DEMO, options)
    state = loaded.model.new_state(context, options.prefill_chunk, rewind=options.draft_tokens)
    plan = planner((loaded.model.config, loaded.census), 1, options).plan(context)
    assert plan.cache_bytes == held_caches(state) == sum(state.nbytes().values())
    by_component = {}
    for parts in plan.caches.values():
        for component, size in parts.items():
            by_component[component] = by_component.get(component, 0) + size
    assert by_component == state.nbytes()


# --- draft heads


@pytest.fixture(scope="module", params=list(Head))
def headed(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("head")
    write_checkpoint(path, tiny_config(**(DSPARK if request.param is Head.DSPARK else {})), seed=1, head=request.param)
    options = RunOptions(draft="auto", draft_tokens=5, prefill_chunk=6)
    return load(path, options), options


def test_weights_and_rings_of_a_head(headed):
    loaded, options = headed
    plan = planner((loaded.model.config, loaded.census), 1, options).plan(500)
    model = {tensor.data_ptr() for _, tensor in held_bytes._once(loaded.model)}
    found = [part for _, part in held_bytes._once(loaded.head) if part.data_ptr() not in model]
    mapped = sum(part.nbytes for part in found if not part.untyped_storage().resizable())
    own = sum(part.untyped_storage().nbytes() for part in found if part.untyped_storage().resizable())
    frequencies = loaded.model.config.qk_rope_head_dim // 2 * 4
    planned = plan.weights[WeightKind.DRAFTING]
    assert (planned.mapped, planned.own) == (mapped, own)
    assert plan.weights[WeightKind.ROTARY].own == 2 * frequencies
    assert plan.caches["draft head"] == {"window": loaded.head.new_state(options.draft_tokens).nbytes()}


@pytest.mark.parametrize("tokens", [1, 8, 150])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_takes_more_on_several_ranks_too(headed, ranks, tokens):
    """Of few tokens ranks keep what they compare, of the head's stages too."""
    loaded, options = headed
    bare = census(Checkpoint.open(loaded.directory).shapes(), loaded.model.config)
    planned, without = (
        planner((loaded.model.config, counted), ranks, options).largest(160, tokens, even=False, few_pass=False)
        for counted in (loaded.census, bare)
    )
    assert planned.nbytes > without.nbytes


@pytest.fixture(scope="module", params=list(Head))
def wide(request, tmp_path_factory):
    """A head whose rows are many: a window as long as a call."""
    path = tmp_path_factory.mktemp("wide")
    more = DSPARK if request.param is Head.DSPARK else {}
    write_checkpoint(path, tiny_config(sliding_window=1024, **more), seed=1, head=request.param)
    options = RunOptions(draft="auto", draft_tokens=5, prefill_chunk=1024)
    return load(path, options), options


def test_a_call_with_a_head_and_a_draft_take_what_is_planned(wide):
    """A call that is listened to, and a draft alone, each against its own moments."""
    loaded, options = wide
    head, listener, ids = loaded.head, loaded.head.listener(5), torch.arange(1024 + 300) % 512
    state, drafts = loaded.model.new_state(1400, 1024), head.new_state(5)
    with listening(loaded.model, {sites.STREAMS: listener}):
        loaded.model(ids[:300], state)
        kept = sum(rows.nbytes for _, rows in listener.rows)
        taken = peak_bytes(lambda: loaded.model(ids[300:], state))
    of_head = planner((loaded.model.config, loaded.census), 1, options)
    bare = census(Checkpoint.open(loaded.directory).shapes(), loaded.model.config)
    alone = planner((loaded.model.config, bare), 1, options)
    planned, without = (one.largest(1400, 1024, even=True, few_pass=True).nbytes for one in (of_head, alone))
    assert without < taken + kept <= planned
    k, let_go = min(options.draft_tokens, head.most), sum(rows.nbytes for _, rows in listener.rows)
    drafted = peak_bytes(lambda: head.draft(listener, [*ids.tolist(), 3], len(ids), k, drafts))
    rehearsed = of_head.rehearsal
    empty = rehearsed._drafts()
    with rehearsed._unchecked():
        hears = rehearsed._listener(1400)
        with rehearsed.alive.counting():
            rehearsed._draft(hears, 1400, empty)
    assert drafted <= rehearsed.alive.largest.nbytes <= 1.3 * drafted + let_go


# --- what fits


@pytest.fixture(scope="module")
def demo():
    config = ModelConfig.from_file(DEMO / "config.json")
    return config, census(Checkpoint.open(DEMO).shapes(), config)


def test_the_largest_that_fits(demo):
    plans = planner(demo, 2, RunOptions(device="cuda"), rank=1)
    for extra in (10 << 20, 30 << 20, 100 << 20):
        memory = RESERVE["cuda"] + extra
        context, chunk = plans.largest_context(memory), plans.largest_chunk(memory, 20_000)
        assert plans.plan(context).needed <= memory < plans.plan(context + 1).needed
        assert plans.plan(20_000, chunk).needed <= memory < plans.plan(20_000, chunk + 1).needed
    assert plans.largest_context(RESERVE["cuda"]) == 0
    assert plans.largest_context(1 << 40) == demo[0].max_position_embeddings
    assert plans.largest_chunk(1 << 40, 20_000) == 20_000


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_smaller_run_needs_more(demo, ranks, device):
    """Also where a call is just long enough to be split over the ranks, which then needs less at once."""
    plans = planner(demo, ranks, RunOptions(device=device))
    edges = [1, 2, 4, 5, 127, 128, 129, 255, 256, 257, 511, 513, 4000]
    by_context = [plans.plan(context, 512).needed for context in edges]
    by_chunk = [plans.plan(5000, chunk).needed for chunk in edges]
    assert by_context == sorted(by_context)
    assert by_chunk == sorted(by_chunk)


def test_weights_are_counted_on_a_gpu_and_mapped_on_a_cpu(demo):
    on_cpu, on_gpu = (planner(demo, 1, RunOptions(device=device)).plan(1000) for device in ("cpu", "cuda"))
    assert on_cpu.own_weights + on_cpu.mapped_weights == on_gpu.own_weights == 3_522_900
    assert on_gpu.mapped_weights == 0
    assert on_cpu.own_weights == 11_520  # norms in fp32, and rotary frequencies


def test_a_context_that_does_not_fit_is_refused_with_the_largest_that_does(demo, monkeypatch):
    plans = planner(demo, 1, RunOptions())
    room = plans.plan(10_000).needed
    monkeypatch.setattr(memory, "machine_memory", lambda _: room)
    assert memory.check_fits(plans, 10_000, "demo").context == 10_000
    largest = plans.largest_context(room)
    with pytest.raises(CapacityError, match=rf"demo: a context of 20000 .* largest context that fits is {largest}$"):
        memory.check_fits(plans, 20_000, "demo")
    with pytest.raises(CapacityError, match=r"for each of 2 processes: no context fits$"):
        memory.check_fits(plans, 10_000, "demo", processes=2)


def test_a_container_has_what_its_limit_says(tmp_path, monkeypatch):
    physical = memory.machine_memory(torch.device("cpu"))
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMITS", (limit, tmp_path / "missing"))
    for text, expected in (("max\n", None), ("123456\n", 123_456), (str(1 << 62), None)):
        limit.write_text(text)
        found = memory.machine_memory(torch.device("cpu"))
        assert found == (expected or found) <= max(physical, found)
        assert expected is None or found == expected
