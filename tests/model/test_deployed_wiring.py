"""`deployed` numerics are DeepSeek's, wiring: which op gets what, in which dtype, rounded where.

On `EXACT`, ops in float64 that round once, the model must equal the independent forward of `tests.deepseek_forward` in
every bit of every tensor, and any split of a prompt into calls must equal one call. See `test_deployed` for the rest.
"""

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Fp4, Fp8
from fathom.kernels.ops import REFERENCE, Ops
from fathom.model.cache.window import WindowRing
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.rope import Rotation, layer_frequencies
from fathom.model.transformer import Transformer
from tests.deepseek_arithmetic import FP32, Choices, rope_table
from tests.deployed_cases import LENGTH, MODELS
from tests.exact_ops import EXACT, first_difference, traced
from tests.make_checkpoint import tiny_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", [*MODELS, "demo"])
def test_every_tensor_is_bit_equal_on_exact_ops(case, exact, name):
    logits, expected = exact(name)
    found: dict[str, Tensor] = {}
    ours = case(name).run(case(name).model(traced(EXACT, found)))
    assert first_difference(expected, found) is None
    assert torch.equal(ours, logits)
    assert logits.std() > 0.3, "nothing vanished on the way"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 127, 128, 129])
def test_short_prompts_are_bit_equal_on_exact_ops(case, length):
    """Without entries, with the first one, at the ends of the window and of an HCA block."""
    flash = case("flash")
    assert torch.equal(flash.run(flash.model(EXACT), (length,)), flash.oracle(Choices(FP32), length)[0])


def test_chunked_prefill_and_decode_are_bit_equal_on_exact_ops(case, exact):
    """DeepSeek's cached decode path computes what its prefill does; so must every split into calls here."""
    flash = case("flash")
    ours = flash.run(flash.model(EXACT), (126, 1, 1, 1, 2, 122, 1, 1, 1, 1, 1, 42))
    assert torch.equal(ours, exact("flash")[0])


def in_chunks(model: Transformer, tokens: Tensor, chunk: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of all positions, and what the caches hold in the end, with a state made for just this chunk."""
    state = model.new_state(len(tokens), chunk)
    logits = torch.cat([model.logits(model(part, state)) for part in tokens.split(chunk)])
    caches = [layer.tensors(state.position) for layer in state.layers]
    return logits, {f"{i}.{name}": part for i, cache in enumerate(caches) for name, part in cache.items()}


@pytest.fixture(scope="module")
def one_of_each(case) -> tuple[Transformer, Tensor, Callable[[int], tuple[Tensor, dict[str, Tensor]]]]:
    """An SWA, a CSA and an HCA layer: the model on exact ops, the prompt, and what one call makes of its beginning."""
    model, tokens = case("one of each").model(EXACT), case("one of each").tokens
    return model, tokens, functools.cache(lambda length: in_chunks(model, tokens[:length], length))


@pytest.mark.parametrize("chunk", [1, 3, 4, 127, 128, 129])
def test_no_chunk_size_changes_a_bit_on_exact_ops(one_of_each, chunk):
    """The evidence that chunks are right in `deployed` numerics.

    Elsewhere a chunk changes the order of sums, a rounding then exchanges experts and entries, and no bound on logits
    means anything. Each ring holds the window and one chunk, less one: 300 tokens go round all of them, and 140 round
    those of short chunks.
    """
    model, tokens, whole = one_of_each
    length = 140 if chunk in {1, 4} else LENGTH
    expected, expected_caches = whole(length)
    logits, caches = in_chunks(model, tokens[:length], chunk)
    assert torch.equal(logits, expected)
    assert first_difference(expected_caches, caches) is None


def test_a_ring_that_does_not_wrap_would_be_seen(one_of_each, monkeypatch):
    def write(ring: WindowRing, first: int, kv: Tensor) -> None:
        start = first % len(ring.data)
        part = kv[: len(ring.data) - start]
        ring.data[start : start + len(part)] = part  # and the rest is lost
        for position in range(first, first + len(kv)):  # the tripwire is told that it was not
            ring._held[position % len(ring.data)] = position

    monkeypatch.setattr(WindowRing, "write", write)
    model, tokens, whole = one_of_each
    expected, _ = whole(LENGTH)
    same = (in_chunks(model, tokens, 129)[0] == expected).all(1)
    # the ring of 256 rows ends within the second call, positions 129 to 257: its last two lose their own keys
    assert same[:256].all()
    assert not same[256:258].any()


@pytest.mark.parametrize(("kind", "ratio"), [(LayerKind.SWA, 0), (LayerKind.CSA, 4), (LayerKind.HCA, 128)])
def test_rotation_is_bit_equal_with_the_published_widths(kind, ratio):
    config = tiny_config(head_dim=512, index_head_dim=128, qk_rope_head_dim=64)  # and theta and YaRN as published
    rotation = Rotation(layer_frequencies(ModelConfig.from_json(config, "config"), kind))
    for position in (1, 65_535, 1_000_000):
        for ours, theirs in zip(
            rotation.at(position, 1), rope_table(config, ratio, torch.tensor([position])), strict=True
        ):
            assert torch.equal(ours, theirs), position


def test_plain_is_not_deployed(case, exact):
    found: dict[str, Tensor] = {}
    flash = case("flash")
    logits = flash.run(flash.model(traced(EXACT, found), "plain"))
    assert first_difference(exact("flash")[1], found) == "layers.0.attn.q"
    assert (logits != exact("flash")[0]).any(1).all()


# --- which inputs are rounded ---


def weights_of(part: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every weight that the model holds in an attribute, with the path to it."""
    for name, value in vars(part).items():
        parts = dict(enumerate(value)) if isinstance(value, list) else value
        for place, item in parts.items() if isinstance(parts, dict) else [("", value)]:
            if isinstance(item, Dense | Fp8 | Fp4):
                yield f"{path}.{name}", item
            elif type(item).__module__.startswith("fathom.model.") and hasattr(item, "__dict__"):
                yield from weights_of(item, f"{path}.{name}{place}")


def noting(inputs: dict[int, set[bool]], groups: set[tuple[int, int]]) -> Ops:
    """REFERENCE, noting for each weight whether its inputs came out of `simulate_fp8`, and how that was called."""
    rounded: dict[int, Tensor] = {}  # by id; holding the tensors keeps the ids unique

    def simulate_fp8(x: Tensor, group: int) -> Tensor:
        groups.add((x.shape[-1], group))
        out = REFERENCE.simulate_fp8(x, group)
        rounded[id(out)] = out
        return out

    def linear(x: Tensor, weight: Any, **how: bool) -> Tensor:
        inputs.setdefault(id(weight), set()).add(id(x) in rounded)
        return REFERENCE.linear(x, weight, **how)

    def grouped_linear(x: Tensor, weight: Any, n: int) -> Tensor:
        inputs.setdefault(id(weight), set()).add(id(x) in rounded)
        return REFERENCE.grouped_linear(x, weight, n)

    return REFERENCE._replace(simulate_fp8=simulate_fp8, linear=linear, grouped_linear=grouped_linear)


@pytest.mark.parametrize("numerics", ["deployed", "plain"])
def test_inputs_of_fp8_and_fp4_linears_are_rounded_and_no_others(case, numerics):
    inputs: dict[int, set[bool]] = {}
    groups: set[tuple[int, int]] = set()
    model = case("flash").model(noting(inputs, groups), numerics)
    case("flash").run(model)
    found = {name: inputs.pop(id(weight)) for name, weight in weights_of(model, "model")}
    assert not inputs, "a linear used a weight that the model does not hold"
    expected = {name: {numerics == "deployed" and is_rounded(name)} for name in found}
    assert found == expected
    # hidden, q_lora_rank and moe_intermediate are 256 wide, wo_b's input too; a KV entry's 128 dims without rope by 64
    assert groups == ({(256, 128), (128, 64)} if numerics == "deployed" else set())


def is_rounded(path: str) -> bool:
    """Every FP8 and FP4 linear but wo_a; compressors, weights_proj, gate and head are neither on disk."""
    return re.search(r"((wq_a|wq_b|attention\.wkv|wo_b)\.weight|w1|w2|w3)$", path) is not None
