"""`scripts.make_checkpoint` from a config.json to a model that runs; what it writes, and what it refuses."""

import json
import math
import shutil
from collections import Counter, namedtuple

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.folder import INDEX
from fathom.model.checkpoint.published import published_tensors
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.config import LayerKind, ModelConfig
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from fathom.scripts import inspect, make_checkpoint
from fathom.scripts.cli import run
from fathom.scripts.make import values
from fathom.scripts.make.shards import DTYPES
from tests.make_checkpoint import tiny_config
from tests.transformers_model import our_logits

# Layers: SWA and CSA with hash gates, then HCA, CSA and SWA with scored ones.
CONFIG = tiny_config(
    compress_ratios=[0, 4, 128, 4, 0, 0],
    num_hidden_layers=5,
    num_hash_layers=2,
    num_nextn_predict_layers=1,
    expert_dtype="fp4",
    dspark_block_size=5,
    dspark_target_layer_ids=[4],
)


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "published.json"
    path.write_text(json.dumps(CONFIG))
    return path


def made(config_file, out, *flags):
    assert make_checkpoint.main(["--config", str(config_file), "--out", str(out), *flags]) == 0
    return out


def data(directory):
    """Stored name -> its bytes, read with the safetensors library."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it is no mapping
                found[name] = file.get_tensor(name).reshape(-1).view(torch.uint8)
    return found


def test_the_census_binds_all_and_logits_have_unit_scale(config_file, tmp_path, capsys):
    out = made(config_file, tmp_path / "out", "--layers", "5")
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"{out}: layers 0 (SWA), 1 (CSA), 2 (HCA), 3 (CSA), 4 (SWA): ")
    config, checkpoint = ModelConfig.from_file(out / "config.json"), Checkpoint.open(out)
    counted = census(checkpoint.shapes(), config)
    assert checkpoint.shapes() == published_tensors(config, "fp4")
    assert counted.mappings["layers.4.ffn.experts.0.w1.weight"].form is Form.FP4
    assert inspect.main(["--model", str(out)]) == 0

    for numerics in ("plain", "deployed"):
        model = load(out, RunOptions(numerics)).model
        logits = our_logits(model, torch.randint(512, (300,), generator=torch.Generator().manual_seed(0)))
        assert logits.isfinite().all()
        assert 0.8 < logits.std() < 1.25, numerics  # a head of unit gain after a norm of unit weights
        assert len(logits.argmax(1).unique()) > 200, numerics  # positions differ


def test_the_layout_is_the_published_one(config_file, tmp_path):
    out = made(config_file, tmp_path / "out", "--layers", "2")
    index = json.loads((out / INDEX).read_text())
    shards = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", *shards, INDEX]
    tensors = Checkpoint.open(out).tensors
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, shard in index["weight_map"].items():
        place = {"embed": 0, "layers": int(name.split(".")[1]) + 1 if name.startswith("layers") else 0}
        assert shard == shards[place.get(name.split(".")[0], 3)], name
    for path in Checkpoint.open(out).shards:
        dtypes = [tensor.dtype for tensor in path.tensors.values()]  # in the order of their bytes
        assert dtypes == sorted(dtypes, key=DTYPES.index)
        assert min(tensor.start for tensor in path.tensors.values()) % 8 == 0


def test_a_seed_gives_its_bytes_and_another_seed_others(config_file, tmp_path):
    one = data(made(config_file, tmp_path / "one", "--layers", "3"))
    again = data(made(config_file, tmp_path / "again", "--layers", "3", "--seed", "0"))
    other = data(made(config_file, tmp_path / "other", "--layers", "3", "--seed", "1"))
    assert all(torch.equal(one[name], again[name]) for name in one)
    alike = [name for name in one if len(one[name]) > 32 and torch.equal(one[name], other[name])]
    assert alike == []
    # no two tensors of one seed are the same draw
    large = Counter(bytes(value.numpy().data[:64]) for value in one.values() if len(value) >= 4096)
    assert max(large.values()) == 1


def test_a_tensor_is_made_alone_and_in_any_blocks(config_file, tmp_path, monkeypatch):
    out = made(config_file, tmp_path / "out", "--layers", "2")
    stored, tensors = data(out), Checkpoint.open(out).shapes()
    monkeypatch.setattr(values, "BLOCK", 96)
    for name in ("embed.weight", "layers.1.ffn.experts.3.w2.weight", "layers.1.ffn.experts.3.w2.scale", "hc_head_fn"):
        pieces = list(values.blocks(name, tensors, 0))
        assert len(pieces) > 1
        assert b"".join(piece.tobytes() for piece in pieces) == bytes(stored[name].numpy()), name


@pytest.mark.parametrize(
    ("flag", "kinds", "ratios", "hashed"),
    [
        ("2", [LayerKind.SWA, LayerKind.CSA], (0, 4), 2),
        ("1,2", [LayerKind.CSA, LayerKind.HCA], (4, 128), 1),
        ("0,3,4", [LayerKind.SWA, LayerKind.CSA, LayerKind.SWA], (0, 4, 0), 1),
        ("2,", [LayerKind.HCA], (128,), 0),
    ],
)
def test_chosen_layers_keep_their_kind_and_routing(config_file, tmp_path, flag, kinds, ratios, hashed):
    out = made(config_file, tmp_path / "out", "--layers", flag)
    config = ModelConfig.from_file(out / "config.json")
    assert list(config.layer_kinds) == kinds
    assert config.compress_ratios == ratios
    assert (config.num_hidden_layers, config.num_hash_layers, config.num_mtp_layers) == (len(ratios), hashed, 0)
    census(Checkpoint.open(out).shapes(), config)


def test_a_base_config_gives_fp8_experts_with_f32_scales(config_file, tmp_path):
    config_file.write_text(json.dumps(CONFIG | {"expert_dtype": "fp8"}))
    out = made(config_file, tmp_path / "out", "--layers", "2")
    model = load(out, RunOptions()).model  # which also checks that every scale is a power of two
    counted = census(Checkpoint.open(out).shapes(), model.config)
    assert {mapping.form for name, mapping in counted.mappings.items() if ".experts." in name} == {Form.FP8_F32}
    logits = our_logits(model, torch.arange(64))
    assert 0.8 < logits.std() < 1.25


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


# Widths of V4-Flash and V4-Pro. Of E4M3's magnitudes all from 2^-5 to 416 occur: codes 16 to 125.
@pytest.mark.parametrize("columns", [1024, 2048, 4096, 7168, 8192])
@pytest.mark.parametrize(("dtype", "packed", "codes"), [("I8", 2, range(8)), ("F8_E4M3", 1, range(16, 126))])
def test_a_linear_has_unit_gain_and_every_code(columns, dtype, packed, codes):
    tensors = {"w.weight": (dtype, (512, columns // packed)), "w.scale": ("F8_E8M0", (4, columns // 128))}
    stored = np.concatenate(list(values.blocks("w.weight", tensors, 7)))
    if dtype == "I8":
        stored = np.stack([stored & 15, stored >> 4])
        W = E2M1[stored]
    else:
        W = torch.from_numpy(stored).view(torch.float8_e4m3fn).double().numpy()
        assert 224 < np.abs(W).max() <= 448  # no NaN, and as the scale rule leaves the largest of a block
    sign = 8 if dtype == "I8" else 128
    assert {*codes, *(code + sign for code in codes)} <= {*np.unique(stored).tolist()}
    assert abs(W.mean()) < 5 * W.std() / math.sqrt(W.size)
    # the scales' own distribution, not a sample: a matrix of few blocks may have more gain, or less
    scale = np.exp2(values._levels("w.scale", tensors).astype(float) - 127)
    low, high = np.unique(scale)
    assert high == 2 * low
    # a square has the relative deviation sqrt(kurtosis - 1) < 1.5, and the proportion of scales has 16 bits
    assert columns * np.square(W).mean() * np.square(scale).mean() == pytest.approx(1, abs=5 * 1.5 / math.sqrt(W.size))


def test_scales_are_drawn_in_the_proportion_of_their_levels():
    tensors = {"w.weight": ("I8", (2048, 2048)), "w.scale": ("F8_E8M0", (2048, 128))}
    levels = values._levels("w.scale", tensors)
    share, drawn = (levels == levels.max()).mean(), next(values.blocks("w.scale", tensors, 3))
    assert 0.2 < share < 0.4
    assert (drawn == levels.max()).mean() == pytest.approx(share, abs=5 * math.sqrt(0.25 / drawn.size))


def test_rows_of_the_hash_table_are_distinct_and_load_every_expert_alike():
    rows, chosen, experts = 40_000, 6, 16
    table = values.distinct_experts(np.random.PCG64(0), rows, chosen, experts)
    assert table.dtype == np.int64
    assert (np.diff(np.sort(table, axis=1), axis=1) > 0).all()
    for column in table.T:  # also the last of a row, which has to step over all others
        counts = np.bincount(column, minlength=experts)
        assert len(counts) == experts
        assert np.abs(counts - rows / experts).max() < 5 * math.sqrt(rows / experts)
    # every expert follows every other
    pairs = {(int(a), int(b)) for a, b in table[:, 4:]}
    assert len(pairs) == experts * (experts - 1)


@pytest.mark.parametrize(
    ("name", "shape", "mean", "deviation"),
    [
        ("embed.weight", (512, 256), 0, 1),
        ("head.weight", (512, 256), 0, 256**-0.5),
        ("layers.0.attn.compressor.wgate.weight", (512, 256), 0, 256**-0.5),
        ("layers.0.hc_attn_fn", (24, 4096), 0, 4096**-0.5),
        ("layers.0.hc_attn_base", (90_000,), 0, 0.5),
        ("hc_head_scale", (90_000,), 0.5, 0.1),
        ("layers.0.attn.attn_sink", (90_000,), 0, 1),
        ("layers.0.attn.compressor.ape", (128, 512), 0, 0.5),
        ("layers.0.ffn.gate.bias", (90_000,), 0, 0.2),
        ("layers.0.attn.indexer.compressor.norm.weight", (90_000,), 1, 0.1),
        ("norm.weight", (90_000,), 1, 0.1),
    ],
)
def test_what_is_no_linear_has_the_moments_of_its_kind(name, shape, mean, deviation):
    kind = "BF16" if name.endswith(".weight") else "F32"
    drawn = np.concatenate(list(values.blocks(name, {name: (kind, shape)}, 0)))
    dtype = torch.bfloat16 if kind == "BF16" else torch.float32
    found = torch.from_numpy(drawn).view(dtype).double()
    sampling = 5 / math.sqrt(found.numel())
    assert found.mean().item() == pytest.approx(mean, abs=deviation * sampling)
    assert found.std().item() == pytest.approx(deviation, rel=sampling)
    if kind == "F32":  # and not what BF16 could hold: a loader that narrows them must show
        assert (found.float().bfloat16().double() != found).double().mean() > 0.9


def refused(capsys, *flags):
    """The one line on stderr with which the script refuses."""
    assert run(lambda: make_checkpoint.main([str(flag) for flag in flags])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    return captured.err.rstrip()


@pytest.mark.parametrize(
    ("layers", "want"),
    [
        ("0", "--layers 0: the architecture has 5, want 1 to 5"),
        ("6", "--layers 6: the architecture has 5, want 1 to 5"),
        ("1,5", "--layers 1,5: the architecture has no layer 5, only 0 to 4"),
        ("2,1", "--layers 2,1: 1 after 2: layers routed by token id come first"),
        ("3,2", "--layers 3,2: 2 after 3: want each once, in rising order"),
        ("1,1", "--layers 1,1: 1 after 1: want each once, in rising order"),
        ("-1", "--layers '-1': want a number of layers, or layers with commas between: 2,3"),
        ("1,,2", "--layers '1,,2': want a number of layers, or layers with commas between: 2,3"),
        ("", "--layers '': want a number of layers, or layers with commas between: 2,3"),
    ],
)
def test_layers_that_cannot_be_are_refused(config_file, tmp_path, capsys, layers, want):
    assert refused(capsys, "--config", config_file, f"--layers={layers}", "--out", tmp_path / "out") == want
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"expert_dtype": None}, "expert_dtype is None; want 'fp4' or 'fp8' to know what to write"),
        ({"expert_dtype": "bf16"}, "expert_dtype is 'bf16'; want 'fp4' or 'fp8' to know what to write"),
        ({"hidden_size": None}, "hidden_size is None; want an integer from 1 to 2147483647"),
        (
            {"moe_intermediate_size": 100},
            "layers.0.ffn.experts.0.w2.weight has 100 columns: FP4 wants a multiple of 32",
        ),
    ],
)
def test_configs_that_do_not_say_enough_are_refused(config_file, tmp_path, capsys, change, want):
    config_file.write_text(json.dumps(CONFIG | change))
    message = refused(capsys, "--config", config_file, "--layers", "1", "--out", tmp_path / "out")
    assert message == f"{config_file}: {want}"
    assert not list(tmp_path.glob("out*"))


def test_a_folder_that_is_in_use_is_refused_and_left_alone(config_file, tmp_path, capsys):
    flags = ("--config", config_file, "--layers", "1", "--out")
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes").write_text("mine")
    assert refused(capsys, *flags, taken) == f"{taken}: exists and is not empty"
    assert [path.name for path in taken.iterdir()] == ["notes"]
    assert refused(capsys, *flags, taken / "notes") == f"{taken / 'notes'}: not a folder"
    assert "is what --config reads" in refused(capsys, *flags, config_file)
    assert refused(capsys, *flags, tmp_path / "no" / "out") == f"{tmp_path / 'no'}: no such folder"
    left = tmp_path / "out.partial"
    left.mkdir()
    assert refused(capsys, *flags, tmp_path / "out").startswith(f"{left}: exists; ")
    assert left.is_dir()
    empty = tmp_path / "empty"
    empty.mkdir()
    made(config_file, empty, "--layers", "1")
    assert (empty / "config.json").is_file()


def test_a_disk_without_room_is_refused_before_anything_is_written(config_file, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    size = sum(path.stat().st_size for path in made(config_file, tmp_path / "sized", "--layers", "2").glob("model*"))
    capsys.readouterr()
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 -- as in shutil
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(size, 1, size - 1))
    message = refused(capsys, "--config", config_file, "--layers", "2", "--out", out)
    assert message == f"{out}: takes 0.0 GB, the disk has 0.0 GB free"
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(size, 0, size))
    made(config_file, out, "--layers", "2")


def test_a_run_that_fails_leaves_nothing(config_file, tmp_path, capsys, monkeypatch):
    def full(name, tensors, seed):  # noqa: ARG001
        yield b"12"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fathom.scripts.make.values.blocks", full)
    message = refused(capsys, "--config", config_file, "--layers", "1", "--out", tmp_path / "out")
    assert message == f"{tmp_path / 'out'}: No space left on device"
    assert not list(tmp_path.glob("out*"))
