"""The memory plan of a Llama-family run: weights and caches to the byte, a call by a bound that is close."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from fathom.kernels.formats import product_quantise
from fathom.kernels.ops import CPU
from fathom.model.cache.gqa import Heads, KvShape, all_heads
from fathom.model.errors import CapacityError
from fathom.model.llama.adapters import shapes
from fathom.model.llama.census import census, parameters
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import GroupedCoda, GroupedShard
from fathom.model.variants.grouped import CodaLayer, ShardLayer
from fathom.runtime import memory
from fathom.runtime.arithmetic import DTYPES
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.grouped import attending
from fathom.runtime.plan.meta_ops import scratch_of
from fathom.runtime.plan.planner import Planner
from fathom.runtime.sharding import sharding_plan
from tests.llama_configs import LLAMA_3_1_8B
from tests.llama_model import load_ours, oracle
from tests.peak_memory import peak_bytes

MARGIN = 1.1  # of a plan over what is taken, on ops whose tiles are megabytes
SMALL = 1 << 17  # bytes: what does not grow with a call


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Wide enough that a call's tensors outweigh what the plan leaves out."""
    directory = tmp_path_factory.mktemp("llama")
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 2}
    made = oracle(**shape, num_hidden_layers=2, vocab_size=1000, max_position_embeddings=4096)
    made.to(torch.bfloat16).save_pretrained(directory)
    return directory


def planner(loaded, options, prompt=None):
    config = loaded.model.config
    return Planner(config, loaded.census, sharding_plan(config, 1), options, 0, "cpu", prompt)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("t", "H", "K", "d", "first"), [(512, 8, 2, 64, 512), (1, 8, 2, 64, 9000), (64, 4, 4, 128, 0)])
def test_attention_takes_what_is_planned(dtype, t, H, K, d, first):
    q, n = torch.randn(t, H, d, dtype=DTYPES[dtype]), first + t
    k, v = (torch.randn(K, n, d, dtype=DTYPES[dtype]) for _ in range(2))
    planned = scratch_of(CPU.attend_grouped)(t, H, K, d, n, DTYPES[dtype].itemsize)
    taken = peak_bytes(lambda: CPU.attend_grouped(q, k, v, first, None))
    assert taken <= planned <= MARGIN * taken + SMALL


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("chunk", [1, 300])
def test_a_call_takes_no_more_than_planned(saved, dtype, chunk):
    loaded = load_ours(saved, dtype=dtype)
    plan = planner(loaded, RunOptions("plain", dtype)).plan(600, chunk)
    state, tokens = loaded.model.new_state(600, chunk), torch.arange(chunk)
    assert sum(state.nbytes().values()) == plan.cache_bytes

    def call():
        loaded.model.logits(loaded.model(tokens, state)[-1:])

    call()
    taken = peak_bytes(call)
    assert taken <= plan.call.nbytes <= 1.25 * taken + 4 * SMALL


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("prompt", [1, 40, 300])
@pytest.mark.parametrize(
    "kv", ["all=coda:window=64,exact=16,summary=16", "all=shard:rank=32", "all=shard:rank=64,bits=2"]
)
def test_variants_take_no_more_than_planned(saved, dtype, prompt, kv):
    """Reading the prompt, which Shard then compresses, and a token after it."""
    options = RunOptions("plain", dtype, kv=(kv,))
    loaded = load_any(saved, options)
    plan, told = (planner(loaded, options, length).plan(600, 300) for length in (None, prompt))
    state, tokens = loaded.model.new_state(600, 300, prompt), torch.arange(300)
    assert sum(state.nbytes().values()) == told.cache_bytes <= plan.cache_bytes
    assert told.call.nbytes <= plan.call.nbytes
    for part in (tokens[:prompt], tokens[:1]):
        taken = peak_bytes(lambda part=part: loaded.model.logits(loaded.model(part, state)[-1:]))
        assert taken <= told.call.nbytes


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "d"), [(512, 16, 2, 64), (1, 16, 2, 64), (300, 8, 8, 128)])
def test_attending_to_banks_takes_what_is_planned(dtype, tokens, heads, kv_heads, d):
    """Once every slot holds something; no more than twice what is taken."""
    variant, cpu = GroupedCoda(window=256, exact=64, summary=64, block=512), torch.device("cpu")
    shape = KvShape(all_heads(kv_heads), d, torch.ones(d // 2), interleaved=False)
    layer, draw = CodaLayer(shape, variant, DTYPES[dtype], cpu), torch.Generator().manual_seed(1)

    def drawn(t):
        parts = (torch.randn(t, n, d, generator=draw).to(DTYPES[dtype]) for n in (heads, kv_heads, kv_heads))
        return Heads(*parts, torch.rand(t, generator=draw))

    layer.attend(drawn(1024), 0, CPU)
    more = drawn(tokens)
    taken = peak_bytes(lambda: layer.attend(more, 1024, CPU))
    planned = attending(CPU, variant, more, kv_heads, 2048, 2048)
    assert taken <= planned <= 2 * taken + 4 * SMALL


@pytest.mark.parametrize(("kv_heads", "d", "rank"), [(8, 128, 192), (2, 64, 64)])
def test_compressing_a_prompt_takes_no_more_than_planned(kv_heads, d, rank):
    """With 1,024 columns the covariance and its eigenvectors outweigh everything else."""
    variant, cpu = GroupedShard(rank=rank), torch.device("cpu")
    layer = ShardLayer(
        KvShape(all_heads(kv_heads), d, torch.ones(d // 2), interleaved=False), variant, 200, 201, torch.float32, cpu
    )
    draw = torch.Generator().manual_seed(1)
    heads = Heads(*(torch.randn(200, n, d, generator=draw) for n in (2 * kv_heads, kv_heads, kv_heads)), None)
    taken = peak_bytes(lambda: layer.attend(heads, 0, CPU))
    planned = attending(CPU, variant, heads, kv_heads, 201, 201)
    assert taken <= planned <= 2 * taken + 4 * SMALL


def test_the_plan_of_variants_is_of_the_prompt_that_takes_most(saved):
    loaded = load_ours(saved)

    def planned(context, *kv):
        return planner(loaded, RunOptions("plain", kv=kv)).plan(context).cache_bytes

    full = planned(4000)
    assert full == 2 * 2 * 4000 * 2 * 32 * 2, "bf16: keys and values of 2 layers with 2 heads of 32"
    assert planned(1000, "all=coda") == planned(4000, "all=coda") < full / 9
    coded = planned(4000, "all=shard:rank=16")
    options = RunOptions("plain", kv=("all=shard:rank=16",))
    model = load_any(saved, options).model
    assert coded == max(sum(model.new_state(4000, 64, prompt).nbytes().values()) for prompt in (0, 1000, 3900, 4000))
    options = replace(options, draft="lookup", draft_tokens=5)
    kept = planner(loaded, options).plan(4000).cache_bytes - coded
    assert kept == 2 * 2 * 5 * 2 * 32 * 2, "bf16: keys and values of 5 tokens that have left the window"
    state = model.new_state(4000, 64, 4000, rewind=5)
    assert sum(state.nbytes().values()) == sum(model.new_state(4000, 64, 4000).nbytes().values()) + kept
    assert 0.5 * full < coded < 0.6 * full, "of no prompt: every token in 8 bits, and norms"
    prompt = sum(model.new_state(4000, 64, 4000).nbytes().values())
    assert prompt < 0.25 * full, "exact rows of the prompt are no part of any cache before it comes"


def test_the_plan_of_a_prompt_that_is_told_is_of_that_prompt(saved):
    options = RunOptions("plain", kv=("all=shard:rank=16",))
    loaded = load_any(saved, options)
    for prompt in (1, 1000, 3900, 4000):
        plan = planner(loaded, options, prompt).plan(4000, 64)
        assert plan.prompt == prompt
        assert plan.cache_bytes == sum(loaded.model.new_state(4000, 64, prompt).nbytes().values())
    unknown, told = (planner(loaded, options, prompt) for prompt in (None, 3900))
    assert unknown.plan(4000, 64).prompt == 0, "every token in 8 bits takes most"
    assert told.plan(4000, 64).call.nbytes < unknown.plan(4000, 64).call.nbytes
    assert told.plan(1000, 64).prompt == 1000, "of a shorter context all of it"
    needed = told.plan(4000, 64).needed
    assert told.largest_context(needed, 64) == 4000
    assert unknown.largest_context(needed, 64) < 3900
    assert told.largest_context(told.plan(3899, 64).needed, 64) == 0, "no room for the prompt"
    assert planner(loaded, RunOptions("plain"), 3900).plan(4000).prompt is None


def test_a_long_prompt_is_held_exactly_by_one_layer_at_a_time(tmp_path, monkeypatch):
    """What caches and the prompt's call take, against the plan, and against a full cache; fits are as planned above."""
    monkeypatch.setattr(product_quantise, "POINTS", 2048)
    length, piece = 2000, 64
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    made = oracle(**shape, head_dim=64, num_hidden_layers=16, max_position_embeddings=4096)
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    options = RunOptions("plain", "bf16", kv=("all=shard:rank=32",))
    loaded = load_any(tmp_path, options)
    plan = planner(loaded, options).plan(length, piece)
    state, tokens = loaded.model.new_state(length, piece, length), torch.arange(length) % 96
    taken = peak_bytes(lambda: loaded.model(tokens, state))
    assert taken <= plan.call.nbytes <= 2 * taken + 4 * SMALL
    full = planner(loaded, RunOptions("plain", "bf16")).plan(length, piece).cache_bytes
    assert taken + sum(state.nbytes().values()) < 0.7 * full


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu"), ("cuda", "triton")])
def test_shard_extends_the_context_that_fits_a_large_model(device, backend):
    """Llama-3.1-70B's dimensions at 131,072 positions."""
    wide = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
    config = LlamaConfig.from_json(LLAMA_3_1_8B | wide, "70B")
    counted = census({name: ("BF16", part.shape) for name, part in parameters(config).items()}, config)

    def made(*kv):
        options = RunOptions("plain", device=device, kv=kv)
        return Planner(config, counted, sharding_plan(config, 1), options, 0, backend)

    full, shard = made(), made("all=shard")
    assert shard.plan(131_072).needed < full.plan(131_072).needed - 13 * 10**9
    room = full.plan(60_000).needed
    assert full.largest_context(room) == 60_000
    assert shard.largest_context(room) > 85_000


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_adapters_are_memory_of_the_process(saved, tmp_path, dtype):
    bare, config = RunOptions("plain", dtype), load_ours(saved).model.config
    drawn = {name: torch.randn(shape) for name, shape in shapes(config).items()}
    path = tmp_path / "coda_adapters.safetensors"
    save_file({f"layer_{layer}.coda.{name}": part.clone() for layer in (0, 1) for name, part in drawn.items()}, path)
    options = RunOptions("plain", dtype, kv=("all=coda:window=64,exact=16,summary=16",), coda_adapters=str(path))
    loaded = load_any(saved, options)
    with_adapters, without = (planner(loaded, chosen).plan(600, 300) for chosen in (options, bare))
    stored = 2 * sum(part.nbytes for part in drawn.values())
    assert with_adapters.own_weights - without.own_weights == stored <= path.stat().st_size
    state, tokens = loaded.model.new_state(700, 300), torch.arange(300)
    loaded.model(tokens, state)
    for part in (tokens, tokens[:1]):
        taken = peak_bytes(lambda part=part: loaded.model.logits(loaded.model(part, state)[-1:]))
        assert taken <= with_adapters.call.nbytes


def test_weights_are_planned_to_the_byte(saved):
    loaded = load_ours(saved)
    norms = 5 * 256
    matrices = loaded.census.weights - norms
    plan = planner(loaded, RunOptions("plain")).plan(10)
    assert plan.mapped_weights == 2 * matrices, "bf16, mapped"
    assert plan.own_weights == 4 * norms + 4 * 16, "norms in fp32, and frequencies"
    on_gpu = planner(loaded, RunOptions("plain", device="cuda")).plan(10)
    assert (on_gpu.mapped_weights, on_gpu.own_weights) == (0, 2 * matrices + 4 * norms + 4 * 16)


def test_a_context_that_does_not_fit_is_refused_before_weights_are_read(saved, monkeypatch):
    loaded = load_ours(saved)
    needed = planner(loaded, RunOptions("plain")).plan(1000).needed
    monkeypatch.setattr(memory, "machine_memory", lambda _: needed)
    monkeypatch.setattr("fathom.runtime.load.open_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CapacityError, match=r"the largest context that fits is 1000$"):
        load_any(saved, RunOptions("plain"), context=1001)
