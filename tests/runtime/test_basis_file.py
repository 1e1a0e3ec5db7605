"""Files of bases: read as written, and refused in one line when they are not for this run."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fathom.kernels.formats import basis_fit
from fathom.kernels.formats.basis_fit import Sample
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.runtime.basis import read_basis, write_basis
from fathom.runtime.digest import digest
from fathom.runtime.kv import variants
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts import calibrate_kv, generate, plan
from fathom.scripts.cli import run
from tests.make_checkpoint import tiny_config, write_checkpoint

CONFIG = ModelConfig.from_file(DEMO / "config.json")


@pytest.fixture(scope="module")
def weights():
    return load(DEMO, RunOptions()).weights_fingerprint


@pytest.fixture(scope="module")
def found():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1000, 128, generator=g)
    x[:, :64] *= 1.1 ** -torch.arange(64)
    sample = Sample(x, torch.randn(16, 4, 128, generator=g), torch.ones(16, 1000, dtype=torch.bool))
    based, rotated = basis_fit.fit(sample, 64, 6, 100_000), basis_fit.fit(sample, 64, 6, 10)
    assert (based.pays, rotated.pays) == (True, False)
    return {1: based, 2: rotated, 3: based}


@pytest.fixture
def file(tmp_path, found, weights):
    path = tmp_path / "b.safetensors"
    write_basis(path, found, CONFIG, weights, 6, {"tokens": 1000, "context": 100_000})
    return path


def test_a_file_is_read_as_it_was_written(file, found):
    read = read_basis(file, CONFIG, 6)
    assert sorted(read) == [1, 3]
    for name in ("basis", "basis_scale", "scale", "mean", "bits"):
        assert torch.equal(getattr(read[1].fit, name), getattr(found[1].fit, name))
    assert read[1].fit.codes.shape == found[1].fit.codes.shape
    assert read[1].rope_bits == found[1].rope_bits
    assert read[1] == read[3], "the same basis"
    kinds = variants([f"all=shard:keys=6,basis={file}"], CONFIG)
    assert [str(kind) for kind in kinds] == [
        "full",
        f"shard:bits=6,keys=6,basis={read[1].digest}",
        "shard:bits=6,keys=6",
        f"shard:bits=6,keys=6,basis={read[1].digest}",
    ]
    with safe_open(file, framework="pt") as opened:
        said = json.loads(opened.metadata()["layers"])
    assert [said[layer]["codec"] for layer in "123"] == ["basis", "rotated", "basis"]
    assert said["1"]["based"]["measured"] < said["1"]["rotated"]["measured"]


def refused(capsys, rule, words, *more):
    assert run(lambda: generate.main(["--raw", "--prompt", "x", "--max-new-tokens", "1", "--kv", rule, *more])) == 2
    lines = capsys.readouterr().err.splitlines()
    assert words in lines[-1], lines
    assert len(lines) == 1
    return lines[0]


def test_a_file_that_is_not_there(tmp_path, capsys):
    refused(capsys, f"all=shard:basis={tmp_path / 'no'}", f"{tmp_path / 'no'}: No such file")


@pytest.mark.parametrize(
    ("kept", "told"), [(0, "header of 0 bytes"), (5, "in a file of 5: truncated"), (3000, "beyond the file's 3000")]
)
def test_a_file_cut_short(file, capsys, kept, told):
    file.write_bytes(file.read_bytes()[:kept])
    line = refused(capsys, f"csa=shard:basis={file}", f"{file}: ")
    assert told in line


@pytest.mark.parametrize("where", [0.5, 0.99])
def test_a_flipped_bit(file, capsys, where):
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)
    refused(capsys, f"all=shard:basis={file}", f"{file}: the content does not match its checksum")


def test_a_file_of_other_settings_or_of_another_model(file, found, weights, tmp_path, capsys):
    refused(capsys, f"all=shard:bits=4,basis={file}", f"{file}: made for bits '6', this run has '4'")
    refused(capsys, f"all=shard:basis={DEMO / 'model-00001-of-00006.safetensors'}", "format is ")
    write_basis(tmp_path / "w", found, CONFIG, "f" * 64, 6, {})
    refused(capsys, f"all=shard:basis={tmp_path / 'w'}", f"made for weights '{'f' * 64}', this run has '{weights}'")
    shutil.copytree(DEMO, tmp_path / "model")
    changed = json.loads((DEMO / "config.json").read_text()) | {"index_topk": 15}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    refused(capsys, f"all=shard:basis={file}", f"{file}: made for config", "--model", str(tmp_path / "model"))


VALUES = ["shape", "dtype", "nan", "infinite", "scale", "loud", "column", "turned", "bits", "none"]
MADE_UP = [*VALUES, "rope", "float", "text", "layer", "twice", "digits", "more", "codec"]


@pytest.mark.parametrize("change", MADE_UP)
def test_a_made_up_file_with_the_right_checksum(file, change, capsys):  # noqa: C901, PLR0912 -- a list
    with safe_open(file, framework="pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    del metadata["sha256"]
    layers = json.loads(metadata["layers"])
    match change:
        case "shape":
            tensors["layers.1.basis"], words = torch.zeros(64, 65, dtype=torch.int8), r"layers\.1\.basis is \[64, 65\]"
        case "dtype":
            tensors["layers.1.mean"], words = torch.zeros(64), r"layers\.1\.mean is \[64\] torch.float32"
        case "nan":
            tensors["layers.3.mean"], words = torch.full((64,), torch.nan).half(), r"layers\.3\.mean holds"
        case "infinite":
            tensors["layers.3.scale"], words = torch.full((64,), torch.inf).half(), r"layers\.3\.scale holds"
        case "loud":
            tensors["layers.3.scale"][5] = 6e4
            words = r"layers\.3\.scale is up to 6\d+, want 4096"
        case "column":
            tensors["layers.3.basis_scale"][5] = 6e4
            words = r"layers\.3\.basis has columns that are \S+e\+\d+ off orthonormal ones"
        case "turned":
            tensors["layers.1.basis"][:, 0] = tensors["layers.1.basis"][:, 1]
            words = r"layers\.1\.basis has columns that are (1|0\.\d+) off orthonormal ones"
        case "scale":
            tensors["layers.3.scale"], words = -torch.ones(64).half(), r"layers\.3\.scale holds"
        case "bits":
            tensors["layers.1.bits"], words = torch.tensor([8, 8, 5, 2]).to(torch.int8), r"layers\.1\.bits is \[8, 8, 5"
        case "none":
            tensors["layers.1.bits"], words = torch.zeros(4, dtype=torch.int8), r"layers\.1\.bits is \[0, 0"
        case "rope":
            layers["1"]["rope_bits"], words = 7, "layer 1: rope_bits 7"
        case "float":
            layers["1"]["rope_bits"], words = float(layers["1"]["rope_bits"]), r"layer 1: rope_bits \d\.0, want one of"
        case "text":
            layers["3"]["rope_bits"], words = "6", "layer 3: rope_bits '6', want one of"
        case "twice":
            layers["01"], words = layers["1"], "layer '01' is 'basis', want"
        case "digits":
            layers["9" * 5000], words = layers["1"], "layer '99.* is 'basis', want"
        case "layer":
            layers["0"], words = layers.pop("2"), r"is about layers \[0, 1, 3\], want \[1, 2, 3\]"
        case "more":
            tensors["layers.2.mean"], words = torch.zeros(1), r"holds other tensors .* layers\.2\.mean"
        case "codec":
            layers["2"]["codec"], words = "x", "layer '2' is 'x', want rotated or basis"
    metadata["layers"] = json.dumps(layers)
    save_file(tensors, file, metadata | {"sha256": digest(tensors, metadata)})
    with pytest.raises(ConfigError, match=words):
        read_basis(file, CONFIG, 6)
    refused(capsys, f"all=shard:basis={file}", str(file))


def test_rules_that_cannot_be_meant(file):
    for rule, words in (
        (f"all=coda:basis={file}", "settings of coda are window"),
        (
            f"all=shard:basis={file},basis={file}",
            "settings of shard are bits, keys, each once, and basis",
        ),
        (f"all=shard:basis={file},bits=5", "bits is 5"),
        ("csa=shard:basis=", r"--kv csa=shard:basis=: basis= names no file"),
        (f"csa=shard:bits={'6' * 5000}", "settings of shard are bits"),
    ):
        with pytest.raises(ConfigError, match=words):
            variants([rule], CONFIG)


def test_the_plan_counts_a_basis_once(file, capsys, tmp_path):
    sizes = []
    for rule in (f"csa=shard:basis={file}", "csa=shard"):
        out = tmp_path / "p.json"
        assert plan.main(["--context", "4000", "--device", "cpu", "--kv", rule, "--json", str(out)]) in (0, 1)
        sizes.append(json.loads(out.read_text()))
    capsys.readouterr()
    found = [size["caches"]["csa"]["entries"] for size in sizes]
    row = read_basis(file, CONFIG, 6)[1]
    row_bytes = row.fit.codes.shape[1] + 2 + basis_fit.rotated_bytes(64, row.rope_bits)
    assert found[0] == 2 * (1000 * row_bytes + basis_fit.shared_bytes(64))
    assert found[1] == 2 * 1000 * basis_fit.rotated_bytes(128, 6)


def test_calibration_of_the_demo(tmp_path, capsys):
    out = tmp_path / "demo.safetensors"
    assert calibrate_kv.main([str(DEMO), "--out", str(out), "--tokens", "1500", "--bits", "4"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines()[-1].startswith(f"{out}: a basis for ")
    firsts = [line.split()[1] for line in said.out.splitlines() if line.startswith("│ ")]
    assert [first for first in firsts if first.isdigit()] == ["1", "2", "3"]
    assert "too few entries: 11, wants 256" in said.out  # of the HCA layer
    assert set(read_basis(out, CONFIG, 4)) <= {1, 3}
    text = tmp_path / "t.txt"
    text.write_text("The capital of France is Paris. " * 40)
    assert calibrate_kv.main([str(DEMO), "--out", str(out), "--text", str(text)]) == 0


def test_calibration_that_cannot_be(tmp_path, capsys):
    write_checkpoint(tmp_path / "m", tiny_config(head_dim=64), seed=1)
    write_checkpoint(tmp_path / "narrow", tiny_config(), seed=1)
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("")
    binary.write_bytes(b"\xff\xfe")
    for model, more, words in (
        ("m", [], "--text: this model does not read the demo's language"),
        ("narrow", [], "power of two; head_dim is 80"),
        (str(DEMO), ["--tokens", "99999999"], "--tokens 99999999: beyond the model's max_position_embeddings 1048576"),
        (str(DEMO), ["--text", str(empty)], f"{empty}: the text is empty"),
        (str(DEMO), ["--text", str(binary)], f"{binary}: byte 0 is no UTF-8"),
    ):
        given = [str(tmp_path / model), "--out", str(tmp_path / "o"), *more]
        assert run(lambda given=given: calibrate_kv.main(given)) == 2
        said = capsys.readouterr().err.splitlines()
        assert words in said[-1]
        assert len(said) == 1
    assert not (tmp_path / "o").exists()
