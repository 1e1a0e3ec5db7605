"""`scripts.plan`, and the refusal of a run that does not fit before a weight is read."""

import json
from argparse import ArgumentTypeError

import pytest

from fathom.model.checkpoint.header import ITEM_BYTES
from fathom.model.checkpoint.published import published_tensors
from fathom.model.config import ModelConfig
from fathom.runtime import load as loading
from fathom.runtime import memory
from fathom.runtime.options import DEMO
from fathom.scripts import generate, logits
from fathom.scripts.cli import run
from fathom.scripts.flags import positions
from fathom.scripts.plan import main
from tests.llama_configs import LLAMA_3_1_8B
from tests.make_checkpoint import tiny_config


@pytest.fixture
def config(tmp_path):
    """A config.json alone, of a tiny model that publishes FP4 experts."""
    path = tmp_path / "config.json"
    widths = {"head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64, "o_lora_rank": 128}
    path.write_text(json.dumps(tiny_config(expert_dtype="fp4", **widths)))
    return path


def asked(tmp_path, *argv, status=0):
    out = tmp_path / "plan.json"
    assert run(lambda: main([*map(str, argv), "--json", str(out)])) == status
    return json.loads(out.read_text())


def refused(script, capsys, *argv):
    assert run(lambda: script([str(arg) for arg in argv])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


def test_a_checkpoint(tmp_path, capsys):
    data = asked(tmp_path, "--context", 65536, "--ranks", 2, "--memory-gib", 4)
    said = capsys.readouterr().out
    assert "weights of rank 0 of 2" in said
    assert "fits in 4.00 GiB on each rank" in said
    assert "one KV head serves all attention heads: all caches" in said
    assert data["fits"]
    assert data["memory"] == 4 << 30
    own = sum(part["own"] for part in data["weights"].values())
    caches = sum(sum(parts.values()) for parts in data["caches"].values())
    assert 0 < data["graph"] < data["call"]["bytes"], "a token alone"
    assert "a captured token: its graph's pool and buffers" in said
    assert data["needed"] == own + caches + data["call"]["bytes"] + data["graph"] + data["host"] + data["reserve"]
    assert data["call"]["bytes"] == sum(data["call"]["parts"].values()) >= data["typical_call"]["bytes"]
    assert data["needed_by_rank"] == [data["needed"]] * 2
    assert data["largest_context"] == data["context"] * 16 == 1 << 20
    assert data["largest_chunk"] == 65536


def test_a_config_alone_plans_what_would_be_published(tmp_path, config, capsys):
    data = asked(tmp_path, "--config", config, "--context", 1000, "--device", "cpu")
    tensors = published_tensors(ModelConfig.from_file(config), "fp4")
    sizes = [ITEM_BYTES[dtype] * (shape[0] * (shape[1] if shape[1:] else 1)) for dtype, shape in tensors.values()]
    assert sum(part["stored"] for part in data["weights"].values()) == sum(sizes)
    assert "routed experts in fp4 (config.json), without draft head" in capsys.readouterr().out
    eight = asked(tmp_path, "--config", config, "--context", 1000, "--expert-dtype", "fp8")
    assert eight["weights"]["routed experts"]["own"] > 1.8 * data["weights"]["routed experts"]["mapped"]
    assert "--expert-dtype, config.json says fp4" in capsys.readouterr().out


def test_options_change_the_plan(tmp_path, config):
    here = ("--config", config, "--context", 60_000)
    plain = asked(tmp_path, *here)
    for flags in (["--entry-format", "fp8"], ["--key-format", "fp4"], ["--key-format", "fp8"]):
        assert asked(tmp_path, *here, *flags)["needed"] < plain["needed"], flags
    for flags in (["--dtype", "fp32", "--numerics", "plain"], ["--prefill-chunk", "4096"]):
        assert asked(tmp_path, *here, *flags)["needed"] > plain["needed"], flags
    split, whole = (
        asked(tmp_path, *here, "--ranks", 2, "--prefill-chunk", 2000, "--rank-tokens", tokens)
        for tokens in ("own", "all")
    )
    assert split["call"]["bytes"] < whole["call"]["bytes"]


def test_what_does_not_fit_is_exit_status_1(tmp_path, config, capsys):
    data = asked(tmp_path, "--config", config, "--context", 900_000, "--memory-gib", 2.15, status=1)
    assert not data["fits"]
    assert 0 < data["largest_context"] < 900_000
    said = capsys.readouterr().out
    assert "does not fit in 2.15 GiB: " in said
    assert f"tokens: {data['largest_context']:,}" in said
    assert asked(tmp_path, "--config", config, "--context", data["largest_context"], "--memory-gib", 2.15)["fits"]
    more = data["largest_context"] + 1
    asked(tmp_path, "--config", config, "--context", more, "--memory-gib", 2.15, status=1)
    assert asked(tmp_path, "--config", config, "--context", 9, "--memory-gib", 2, status=1)["largest_context"] == 0
    assert "no context fits" in capsys.readouterr().out


def test_without_a_gpu_and_without_a_size_nothing_is_judged(tmp_path, config, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = asked(tmp_path, "--config", config, "--context", 1000)
    assert data["fits"] is data["memory"] is data["largest_context"] is None
    assert "--memory-gib asks whether that fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--context", "2000000"], "--context 2000000: beyond the model's max_position_embeddings 1048576"),
        (
            ["--context", "10", "--ranks", "3"],
            "3 ranks: moe_intermediate_size, columns of SwiGLU: 128, which 3 does not",
        ),
        (
            ["--context", "10", "--coda-adapters", str(DEMO / "model-00001-of-00006.safetensors")],
            "--coda-adapters: of Llama-family checkpoints; DeepSeek-V4's",
        ),
        (["--context", "10", "--expert-dtype", "fp4"], "--expert-dtype: means nothing without --config"),
        (["--context", "10", "--model", "nowhere"], "nowhere/config.json: No such file or directory"),
    ],
)
def test_refusals(flags, said, capsys):
    assert said in refused(main, capsys, *flags)


def test_a_config_that_does_not_say_how_experts_are_stored(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config()))
    said = refused(main, capsys, "--config", path, "--context", 10)
    assert said == f"{path}: no expert_dtype: say how routed experts are stored, with --expert-dtype fp4 or fp8\n"
    path.write_text(json.dumps(tiny_config(expert_dtype="int3")))
    assert "expert_dtype 'int3': say how" in refused(main, capsys, "--config", path, "--context", 10)
    assert asked(tmp_path, "--config", path, "--context", 10, "--expert-dtype", "fp8")


@pytest.mark.parametrize("size", ["0", "-1", "nan", "inf", "much"])
def test_a_memory_size_is_a_number(size, capsys):
    assert "is no number of GiB above 0" in refused(main, capsys, "--context", "10", "--memory-gib", size)


# --- what fits


def test_without_a_context_the_largest_by_number_of_ranks(tmp_path, config, capsys):
    data = asked(tmp_path, "--config", config, "--memory-gib", 2.15)
    said = capsys.readouterr().out
    assert [row["ranks"] for row in data["by_ranks"]] == [1, 2, 4, 8, 16, 32, 64]  # of 128 columns of SwiGLU
    two = asked(tmp_path, "--config", config, "--context", 9, "--ranks", 2, "--memory-gib", 2.15)
    assert data["by_ranks"][1]["largest_context"] == two["largest_context"] > 0
    assert all(f"{row['largest_context']:,}" in said for row in data["by_ranks"])
    whole = {row["ranks"]: row["needed"]["1048576"] for row in data["by_ranks"]}
    fitting = [ranks for ranks, size in whole.items() if size <= int(2.15 * (1 << 30))]
    told = f"1,048,576 positions fit in 2.15 GiB each {f'from {fitting[0]} ranks on' if fitting else 'on none of them'}"
    assert told in said
    assert len(asked(tmp_path, "--config", config, "--memory-gib", 2.15, "--ranks", 2)["by_ranks"]) == 1
    assert asked(tmp_path, "--config", config, "--memory-gib", 2, status=1)["gpus"] is None
    assert "no context fits in 2.00 GiB, on none of 1, 2, 4, 8, 16, 32, 64 ranks" in capsys.readouterr().out


def test_a_token_by_arithmetic(tmp_path, capsys):
    """Of V4-Pro on eight ranks, by numbers of its config.json written out here."""
    flags = ("--model", "DeepSeek-V4-Pro", "--device", "cuda", "--context", "1M", "--ranks", 8)
    token = asked(tmp_path, *flags, "--gpu", "b200")["token"]
    layers, csa, hidden, inner, expert = 61, 30, 7168, 3072, 0.5 + 1 / 32
    assert token["read"]["routed experts"] == layers * 6 * 3 * inner * hidden * expert / 8
    assert token["read"]["index keys"] == csa * (1 << 20) // 4 * 128 * 2
    assert token["read"]["selected entries"] == csa * 1024 * 512 * 2
    assert token["read"]["head"] == 129280 * hidden * 2 / 8
    times = {one["what"]: one["times"] for one in token["exchanges"]}
    assert sum(times.values()) == 4 * layers + 3
    between = next(one for one in token["exchanges"] if "between" in one["what"])
    assert between["nbytes"] == 7 * inner * 2 * 7 // 8
    said = capsys.readouterr().out
    assert "after 1,048,576 positions, on b200: by arithmetic" in said
    # what a position's keys take, seven eighths of which would be saved, against two exchanges and three launches
    rows = 1024 * 512 * 2 * 7 / 8 / 900e9
    per_position = 128 * 2 / 4 * 7 / 8 / 8e12
    assert token["caches_cut_from"] == int((2 * 10e-6 + 3 * 1.5e-6 + rows) / per_position) + 1
    assert f"save a token time from {token['caches_cut_from']:,} positions on" in said


def test_experts_both_ways(tmp_path, capsys):
    flags = ("--model", "DeepSeek-V4-Flash", "--context", "64K", "--ranks", 8, "--prefill-chunk", 4096)
    data = asked(tmp_path, *flags, "--gpu", "b200", "--prompt-tokens", 10_000, "--new-tokens", 20)
    experts, said = data["experts"], capsys.readouterr().out
    assert (experts["prompt_tokens"], experts["new_tokens"], experts["gpu"]) == (10_000, 20, "b200")
    assert experts["way"] == min(experts["seconds"], key=experts["seconds"].get)
    assert f"experts on ranks: {experts['way']}, {experts['why']}\n" in said
    assert "a call of 4,096 tokens at the end of 10,000 on b200: by arithmetic" in said
    assert "a decoded token after them on b200: by arithmetic" in said
    assert list(experts["ways"]) == ["rows", "whole"]
    for found in experts["ways"].values():
        for part in (found["prefill"], found["token"]):
            *parts, everything = part["seconds"].values()
            assert 0 < everything == pytest.approx(sum(parts))
            one = part["exchanges"][0]
            assert one["seconds"] == pytest.approx(one["times"] * (10e-6 + one["nbytes"] / 900e9))
            assert f"{one['nbytes']:,}" in said
        assert f"{1e6 * found['prefill']['seconds']['all']:,.1f}" in said
    assert (
        experts["ways"]["rows"]["prefill"]["seconds"]["hidden"]
        == 0
        > experts["ways"]["whole"]["prefill"]["seconds"]["hidden"]
    )
    assert "exchange: experts, dispatch" in said
    # the rest of the plan is that of the way which was taken
    shared = {way: asked(tmp_path, *flags, "--experts", way)["weights"]["shared experts"] for way in ("rows", "whole")}
    assert data["weights"]["shared experts"] == shared[experts["way"]]
    assert shared["whole"]["own"] > 7 * shared["rows"]["own"]
    assert "experts on ranks: rows, --experts says so" in capsys.readouterr().out
    slow = asked(tmp_path, *flags, "--gpu", "h200", "--prompt-tokens", 10_000, "--new-tokens", 20)["experts"]
    assert slow["seconds"]["rows"] > experts["seconds"]["rows"]
    untold = asked(tmp_path, *flags, "--experts", "whole")["experts"]
    assert (untold["prompt_tokens"], untold["new_tokens"], untold["seconds"]) == (4096, 128, {})


def test_experts_where_no_times_are_known(tmp_path, config, capsys):
    here = ("--config", config, "--context", 1000, "--ranks", 2)
    for flags, told in ((["--gpu", "mi300x"], "mi300x"), (["--device", "cpu"], "this device")):
        experts = asked(tmp_path, *here, *flags)["experts"]
        assert (experts["way"], experts["ways"]) == ("rows", {})
        assert f"experts on ranks: rows, no link between ranks is known of {told}" in capsys.readouterr().out
    assert asked(tmp_path, *here[:-2])["experts"] is None
    assert "experts on ranks" not in capsys.readouterr().out
    one_way = asked(tmp_path, "--model", "deepseek-v4-pro", "--context", 1000, "--ranks", 64)["experts"]
    assert (one_way["way"], list(one_way["ways"])) == ("whole", ["whole"])


def test_of_shard_it_says_for_which_prompt(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    flags = ("--config", tmp_path / "config.json", "--numerics", "plain", "--kv", "all=shard", "--context", "64K")
    unknown = asked(tmp_path, *flags)
    assert (unknown["prompt"], unknown["prompt_told"]) == (0, False)
    assert (
        "caches: all=shard, for a prompt of 0 tokens, which of all takes most, and calls for one of 65,536;"
        " --prompt-tokens tells its length" in capsys.readouterr().out
    )
    told = asked(tmp_path, *flags, "--prompt-tokens", "60K")
    assert (told["prompt"], told["prompt_told"]) == (61440, True)
    assert "caches: all=shard, for a prompt of 61,440 tokens\n" in capsys.readouterr().out
    assert 4 * told["caches"]["attention"]["shard"] < unknown["caches"]["attention"]["shard"]
    assert told["call"]["bytes"] < unknown["call"]["bytes"]
    largest = asked(tmp_path, *flags[:-2], "--gpu", "rtx-4090", "--prompt-tokens", 100_000)
    assert [list(row["needed"]) for row in largest["by_ranks"]] == [["131072"]] * len(largest["by_ranks"])
    assert "caches: all=shard, for a prompt of 100,000 tokens\n" in capsys.readouterr().out
    asked(tmp_path, *flags[:-2])
    assert "at each context for the prompt that takes most; --prompt-tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-tokens", "4"], "--prompt-tokens 4: no cache depends on it, but --kv shard of a Llama-family"),
        (["--prompt-tokens", "4", "--kv", "all=shard", "--context", "8K"], "--prompt-tokens 4: no cache depends on it"),
        (["--prompt-tokens", "4", "--ranks", "1", "--context", "8K"], "--prompt-tokens 4: no cache depends on it"),
        (
            ["--new-tokens", "4", "--context", "8K"],
            "--new-tokens 4: where experts lie depends on it, on several --ranks",
        ),
        (["--new-tokens", "0", "--ranks", "2"], "argument --new-tokens: '0' is no whole number of at least 1"),
        (["--experts", "whole", "--ranks", "3", "--context", "8K"], "3 ranks: n_routed_experts, routed experts: "),
        (["--prompt-tokens", "0"], "argument --prompt-tokens: '0' is no number of positions"),
    ],
)
def test_a_prompt_that_nothing_depends_on_is_refused(flags, message, capsys):
    assert message in refused(main, capsys, *flags)


@pytest.mark.parametrize(("context", "limit"), [(["--context", "32K"], 32768), ([], 131072)])
def test_a_prompt_longer_than_the_context_is_refused(context, limit, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    flags = ("--config", tmp_path / "config.json", "--numerics", "plain", "--kv", "all=shard", *context)
    said = refused(main, capsys, *flags, "--prompt-tokens", limit + 1)
    assert said == f"--prompt-tokens {limit + 1}: the context has {limit} positions\n"
    said = refused(main, capsys, "--context", "8K", "--ranks", 2, "--prompt-tokens", 8193)
    assert said == "--prompt-tokens 8193: the context has 8192 positions\n"


def test_a_token_where_there_is_no_exchange_and_where_there_is_no_arithmetic(tmp_path, config, capsys):
    flags = ("--config", config, "--device", "cuda", "--context", 1000)
    two, slower = (asked(tmp_path, *flags, "--ranks", 2, "--gpu", gpu)["token"] for gpu in ("b200", "h200"))
    assert slower["seconds"]["reading"] == pytest.approx(two["seconds"]["reading"] * 8 / 4.3)
    assert [one["nbytes"] for one in slower["exchanges"]] == [one["nbytes"] for one in two["exchanges"]]
    times = sum(one["times"] for one in two["exchanges"])  # of 10 microseconds, and what the link takes, twice as slow
    link = [one["seconds"]["exchanges"] - times * 10e-6 for one in (two, slower)]
    assert link[1] == pytest.approx(2 * link[0])
    alone = asked(tmp_path, *flags)["token"]
    assert (alone["exchanges"], alone["caches_cut_from"]) == ([], None)
    capsys.readouterr()
    assert asked(tmp_path, *flags, "--kv", "all=shard")["token"] is None
    for others in (
        asked(tmp_path, *flags, "--gpu", "mi300x"),
        asked(tmp_path, *flags[:2], *flags[4:], "--device", "cpu"),
    ):
        assert not others.get("token")
    assert "by arithmetic" not in capsys.readouterr().out


def test_a_release_by_its_name_on_a_gpu_by_its_name(tmp_path, config, capsys):
    flags = ("--gpu", "h100", "--context", "1M", "--ranks", 2)
    data = asked(tmp_path, "--model", "DeepSeek-V4-Flash", *flags, status=1)
    assert (data["context"], data["memory"]) == (1 << 20, int(79.11 * (1 << 30)))
    assert data["fits_from_ranks"] == 4
    assert "fits from 4 ranks of 79.11 GiB on" in capsys.readouterr().out
    assert asked(tmp_path, "--config", config, *flags)["fits_from_ranks"] == 1
    none = asked(tmp_path, "--config", config, "--context", "1M", "--memory-gib", 2, status=1)
    assert none["fits_from_ranks"] is None
    assert "fits on none of 1, 2, 4, 8, 16, 32, 64 ranks of 2.00 GiB" in capsys.readouterr().out


def test_without_any_memory_the_gpus_that_it_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    data = asked(tmp_path, "--model", "deepseek-v4-flash")
    by_gpu = data["gpus"]
    assert by_gpu["b200"] == {"8192": 1, "131072": 1, "1048576": 1}
    needed = {row["ranks"]: row["needed"]["1048576"] for row in data["by_ranks"]}
    fewest = by_gpu["h100"]["1048576"]
    assert needed[fewest] <= int(79.11 * (1 << 30)) < needed[fewest // 2]
    assert "GPUs that it takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--model", "deepseek-v4-flsh"), "--model deepseek-v4-flsh: no such folder; did you mean deepseek-v4-flash?"),
        (("--gpu", "h100", "--device", "cpu"), "--gpu h100: --device is cpu"),
    ],
)
def test_a_name_that_there_is_not(flags, says, capsys):
    assert refused(main, capsys, *flags) == f"{says}\n"


@pytest.mark.parametrize(("text", "wanted"), [("4096", 4096), ("128K", 131072), ("1m", 1 << 20)])
def test_positions_are_told_with_a_unit(text, wanted):
    assert positions(text) == wanted


@pytest.mark.parametrize("text", ["0", "K", "1.5M", "1G", "-1", "1 K", ""])
def test_what_is_no_number_of_positions(text):
    with pytest.raises(ArgumentTypeError, match="is no number of positions"):
        positions(text)


# --- refusal before loading


@pytest.fixture
def small_machine(monkeypatch):
    """A machine on which the demo runs with short contexts, and on which reading a weight is an error."""

    def open_weights(*_, **__):
        raise AssertionError("weights were bound")

    monkeypatch.setattr(memory, "machine_memory", lambda _: 348 << 20)
    monkeypatch.setattr(loading, "open_weights", open_weights)


@pytest.mark.usefixtures("small_machine")
def test_a_run_that_does_not_fit_is_refused_before_a_weight_is_read(tmp_path, capsys):
    run_of_many = ("--raw", "--prompt", "x", "--max-new-tokens", 900_000)
    said = refused(generate.main, capsys, *run_of_many)
    largest = int(said.rpartition("the largest context that fits is ")[2])
    assert f"{DEMO}: a context of 900001 positions in calls of 512 tokens needs " in said
    assert "the cpu has 348.0 MiB" in said
    with pytest.raises(AssertionError, match="weights were bound"):
        run(lambda: generate.main(["--raw", "--prompt", "x", "--max-context", str(largest)]))
    assert f"a context of {largest + 1} pos" in refused(
        generate.main, capsys, "--raw", "--prompt", "x", "--max-context", largest + 1
    )
    tokens = tmp_path / "ids.json"
    tokens.write_text(json.dumps([3] * (largest + 1)))
    said = refused(logits.main, capsys, "--tokens", tokens, "--out", tmp_path / "out")
    assert said.endswith(f"the largest context that fits is {largest}\n")


@pytest.mark.usefixtures("small_machine")
def test_a_context_beyond_the_model_is_refused_before_a_weight_is_read(capsys):
    said = refused(generate.main, capsys, "--raw", "--prompt", "x", "--max-context", (1 << 20) + 1)
    assert "a context of 1048577 positions, max_position_embeddings is 1048576" in said
