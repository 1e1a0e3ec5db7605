"""`--kv LAYERS=VARIANT`: which layer gets which variant, and every rule that cannot be meant."""

import json
from dataclasses import replace

import pytest

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import Coda, Full, GroupedCoda, GroupedShard, Shard
from fathom.runtime.kv import variants
from fathom.scripts.cli import run
from fathom.scripts.generate import main
from tests.llama_configs import LLAMA_3_1_8B
from tests.make_checkpoint import tiny_config

KINDS = [0, 4, 128, 4, 128, 0]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(tiny_config(num_hidden_layers=6, compress_ratios=KINDS, head_dim=128)))
    return ModelConfig.from_file(path)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], [Full()] * 6),
        (["all=shard"], [Full(), *[Shard(6, 8)] * 4, Full()]),
        (["hca=coda"], [Full(), Full(), Coda(256, 64, 64), Full(), Coda(256, 64, 64), Full()]),
        (["csa=shard:bits=4"], [Full(), Shard(4, 8), Full(), Shard(4, 8), Full(), Full()]),
        (["1,3-4=shard:keys=6,bits=8"], [Full(), Shard(8, 6), Full(), Shard(8, 6), Shard(8, 6), Full()]),
        (
            ["all=shard", "hca=coda:window=9,exact=0,summary=1", "3=full"],
            [Full(), Shard(), Coda(9, 0, 1), Full(), Coda(9, 0, 1), Full()],
        ),
    ],
)
def test_rules_name_layers_and_the_later_counts(config, rules, expected):
    assert variants(rules, config) == tuple(expected)


def llama(**changes):
    sizes = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 32}
    return replace(LlamaConfig.from_json(LLAMA_3_1_8B, "config.json"), **sizes | changes)


def test_layers_with_grouped_heads_have_settings_of_their_own():
    rules = [
        "all=shard:rank=32",
        "1=coda:window=8",
        "2,3=full",
        "3=coda:published=1,block=9,exact=5,summary=0,strict=1,exact_at_start=3,gate_exact=0.25,novelty=-0.5",
    ]
    assert variants(rules, llama()) == (
        GroupedShard(rank=32, bits=8, sinks=4, window=64, dp=0, group=64, qjl=0),
        GroupedCoda(window=8, exact=64, summary=64, block=256, values=0, published=0, strict=0),
        Full(),
        GroupedCoda(
            exact=5, summary=0, block=9, published=1, strict=1, exact_at_start=3, gate_exact=0.25, novelty=-0.5
        ),
    )
    assert variants([], llama()) == (Full(),) * 4


@pytest.mark.parametrize(
    ("rule", "changes", "words"),
    [
        ("csa=shard", {}, "'csa' names no layers; want all, a number or a range"),
        ("4=coda", {}, "4: the model has layers 0-3"),
        ("all=shard:keys=8", {}, "'keys=8': settings of shard are rank, bits, sinks, window, dp"),
        ("all=shard:bits=6", {}, "bits is 6, want 2 or 3 or 4 or 8"),
        ("all=shard:qjl=2", {}, "qjl is 2, want 0 or 1"),
        ("all=shard", {}, "rank=192 exceeds the 2 x 32 columns of a layer's keys"),
        ("all=shard:rank=32", {"head_dim": 24}, "head_dim 24, want a power of two"),
        ("all=shard:rank=33", {}, "rank=33"),
        ("all=shard:dp=1,rank=32", {}, "group=64, want a multiple of 4 that divides rank=32"),
        ("all=shard:dp=1,rank=48,group=48", {}, "group=48 does not divide the 2 x 32 columns"),
        ("all=coda", {"head_dim": 6}, "head_dim 6"),
        (f"all=coda:window={'9' * 5000}", {}, "settings of coda are window, exact"),
        (f"{'9' * 5000}=coda", {}, "names no layers; want all, a number or a range"),
        (f"0-{'9' * 5000}=coda", {}, "names no layers; want all, a number or a range"),
        ("all=coda:start=3", {}, "'start=3': settings of coda are window, exact, summary, block, values, published"),
        ("all=coda:gate_exact=1.5", {}, "gate_exact is 1.5, want 0 to 1"),
        ("all=coda:gate_exact=nan", {}, "gate_exact is nan, want 0 to 1"),
        ("all=coda:hit=0.5", {}, "coda: novelty 0.7, hit 0.5: want -1 <= novelty <= hit <= 1"),
        ("all=coda:exact=4,exact_at_start=5", {}, "coda: exact_at_start 5, want 1 to 4"),
        ("all=coda:memory_init=ones", {}, "memory_init is ones, want normal or zeros"),
        ("all=coda:refresh_on_hit=2", {}, "refresh_on_hit is 2, want 0 or 1"),
        ("all=coda:growth_horizon=0.5", {}, "growth_horizon is 0.5, want 0 to 1000000000"),
        ("0=coda", {"sliding_window": 9}, "the model has a sliding_window of 9: full only"),
        ("0=shard:rank=32", {"sliding_window": 9}, "the model has a sliding_window of 9: full only"),
    ],
)
def test_a_rule_that_layers_with_grouped_heads_cannot_have_is_named(rule, changes, words):
    with pytest.raises(ConfigError) as refused:
        variants([rule], llama(**changes))
    assert str(refused.value).startswith(f"--kv {rule}: ")
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["full", "shard:bits=4,keys=8", "coda:window=7,exact=2,summary=3"])
def test_a_variant_is_told_as_it_is_asked_for(config, text):
    assert str(variants([f"1={text}"], config)[1]) == text


@pytest.mark.parametrize("more", ["", ",strict=1,gated=0,eta_logit=-2.5,gate_exact=1e-05,memory_init=zeros"])
def test_a_coda_layer_tells_its_sizes_and_what_is_not_the_default(more):
    text = f"coda:window=7,exact=2,summary=3,block=256{more}"
    assert str(variants([f"1={text}"], llama())[1]) == text
    assert str(variants([f"1={text},hit=0.9,published=0"], llama())[1]) == text


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("shard", "--kv shard: want LAYERS=VARIANT"),
        ("all", "--kv all: want LAYERS=VARIANT"),
        ("=shard", "'' names no layers"),
        ("swa=shard", "'swa' names no layers"),
        ("1,=shard", "'' names no layers"),
        ("-1=shard", "'-1' names no layers"),
        ("1-=shard", "'1-' names no layers"),
        ("6=shard", "6: the model has layers 0-5"),
        ("4-6=shard", "4-6: the model has layers 0-5"),
        ("3-1=shard", "3-1: the model has layers 0-5"),
        ("0=coda", "layer 0 is SWA: it remembers its window alone"),
        ("3-5=coda", "layer 5 is SWA"),
        ("all=", "no variant ''; there are full, shard, coda"),
        ("all=Shard", "no variant 'Shard'"),
        ("csa=shard:rank=64", "'rank=64': settings of shard are bits, keys"),
        ("all=full:bits=4", "'bits=4': settings of full are none"),
        ("all=shard:", "'': settings of shard are bits, keys"),
        ("all=shard:bits", "'bits': settings"),
        ("all=shard:bits=x", "bits is x, want 2 or 3"),
        ("all=shard:bits=4,bits=4", "'bits=4': settings"),
        ("all=shard:bits=5", "bits is 5, want 2 or 3 or 4 or 6 or 8"),
        ("all=shard:window=5", "'window=5': settings of shard"),
        ("all=coda:summary=0", "summary is 0, want 1 to 65536"),
        ("all=coda:window=0", "window is 0, want 1 to 1048576"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_named(config, rule, words):
    with pytest.raises(ConfigError) as refused:
        variants([rule], config)
    assert str(refused.value).startswith(f"--kv {rule}: ")
    assert words in str(refused.value)


def test_a_kind_that_the_model_lacks_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config(num_hidden_layers=2, compress_ratios=[0, 4])))
    with pytest.raises(ConfigError, match=r"--kv hca=coda: the model has no such layer \(hca\)"):
        variants(["hca=coda"], ModelConfig.from_file(path))


def test_a_width_that_cannot_be_rotated_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config()))
    narrow = ModelConfig.from_file(path)
    with pytest.raises(ConfigError, match="power of two; head_dim is 80"):
        variants(["hca=shard"], narrow)
    assert variants(["all=coda"], narrow)[1] == Coda()


def test_the_command_refuses_in_one_line(capsys):
    assert run(lambda: main(["--prompt", "x", "--raw", "--kv", "9=coda"])) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("--kv 9=coda: 9: the model has layers 0-3")
