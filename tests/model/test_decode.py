"""Every stored form, decoded by an independent path; the values that are refused; what `Weights` hands out."""

import math
import shutil
import struct
from fractions import Fraction

import pytest
import torch

from fathom.kernels.formats.reference import decode, e2m1, e8m0
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, nbytes
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import parameters
from fathom.model.checkpoint.weights import fingerprint, is_not_negative, is_positive, is_power_of_two, open_weights
from fathom.model.config import ModelConfig
from fathom.model.errors import CheckpointError
from tests.make_checkpoint import FORMATS, make_tensors, micro_config, random_values, write_checkpoint, write_tensors

# The formats as integers and exact fractions, from their definitions; NaN is None.


def e4m3_exact(byte):
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return None
    size = Fraction(mantissa, 8) if exponent == 0 else 1 + Fraction(mantissa, 8)
    return (-1 if byte >> 7 else 1) * size * Fraction(2) ** (max(exponent, 1) - 7)


def e2m1_exact(nibble):
    exponent, mantissa = nibble >> 1 & 3, nibble & 1
    size = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    return -size if nibble >> 3 else size


def e8m0_exact(byte):
    return None if byte == 255 else Fraction(2) ** (byte - 127)


def f32(value):
    """An exact value as float32's bits; None is any NaN."""
    return struct.unpack("<I", struct.pack("<f", float(value)))[0]


ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def test_e8m0_of_every_byte():
    decoded = e8m0(ALL_BYTES.view(torch.float8_e8m0fnu))
    bits = decoded.view(torch.int32).tolist()
    assert bits[:255] == [f32(e8m0_exact(byte)) for byte in range(255)]  # 2^-127 included: a float32 subnormal
    assert math.isnan(decoded[255])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_e2m1_of_every_byte_low_nibble_first(dtype):
    decoded = e2m1(ALL_BYTES.view(dtype)[:, None])  # [256, 2]
    for byte, pair in enumerate(decoded.tolist()):
        want = [float(e2m1_exact(byte & 15)), float(e2m1_exact(byte >> 4))]
        assert pair == want, byte
    assert torch.signbit(decoded[0x08, 0])  # code 8 is -0


def test_e4m3_of_every_byte():
    weight = Fp8(ALL_BYTES.view(torch.float8_e4m3fn)[None], torch.ones(1, 2, dtype=torch.float32))
    for byte, value in enumerate(decode(weight)[0].tolist()):
        want = e4m3_exact(byte)
        assert math.isnan(value) if want is None else value == want, byte


def bytes_of(seed, *shape, high=256):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64).to(
        torch.uint8
    )


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (257, 130), (3, 400)])
@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_blocks_may_be_partial(shape, scale_dtype):
    codes = bytes_of(0, *shape, high=0x7F)  # positive and finite
    exponents = bytes_of(1, -(-shape[0] // 128), -(-shape[1] // 128), high=20) + 117
    scale = exponents.view(torch.float8_e8m0fnu).to(scale_dtype)
    decoded = decode(Fp8(codes.view(torch.float8_e4m3fn), scale)).tolist()
    for i in {0, shape[0] // 2, shape[0] - 1}:
        for j in range(shape[1]):
            exact = e4m3_exact(codes[i, j].item()) * e8m0_exact(exponents[i // 128, j // 128].item())
            assert decoded[i][j] == exact, (i, j)


@pytest.mark.parametrize("shape", [(1, 32), (3, 64), (130, 96)])
def test_fp4_scales_run_along_the_input(shape):
    codes = bytes_of(2, shape[0], shape[1] // 2)
    exponents = bytes_of(3, shape[0], shape[1] // 32, high=255)
    decoded = decode(Fp4(codes.view(torch.int8), exponents.view(torch.float8_e8m0fnu))).tolist()
    for i in range(shape[0]):
        for j in range(shape[1]):
            nibble = codes[i, j // 2].item() >> 4 * (j % 2) & 15
            exact = e2m1_exact(nibble) * e8m0_exact(exponents[i, j // 32].item())
            assert decoded[i][j] == (exact if abs(exact) < Fraction(2) ** 128 else math.copysign(math.inf, exact)), (
                i,
                j,
            )


@pytest.mark.parametrize("shape", [(1, 16), (5, 48), (20, 128)])
def test_nvfp4_has_two_levels_of_scales(shape):
    codes = bytes_of(4, shape[0], shape[1] // 2)
    scales = bytes_of(5, shape[0], shape[1] // 16, high=0x7E) + 1
    overall = 0.0123
    weight = NvFp4(codes, scales.view(torch.float8_e4m3fn), torch.tensor(overall))
    decoded = decode(weight).tolist()
    exactly = Fraction(weight.global_scale.item())
    for i in range(shape[0]):
        for j in range(shape[1]):
            nibble = codes[i, j // 2].item() >> 4 * (j % 2) & 15
            exact = e2m1_exact(nibble) * e4m3_exact(scales[i, j // 16].item()) * exactly
            assert decoded[i][j] == pytest.approx(float(exact), rel=2**-24, abs=0), (i, j)  # one rounding to float32


def test_dense_is_widened():
    data = torch.randn(3, 5, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    assert torch.equal(decode(Dense(data)), data.float())
    assert decode(Dense(data)).dtype == torch.float32


# From files to weights


def opened(directory):
    checkpoint = Checkpoint.open(directory)
    counted = census(checkpoint.shapes(), ModelConfig.from_file(directory / "config.json"))
    return checkpoint, counted


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    for formats in FORMATS:
        write_checkpoint(root / formats, micro_config(), seed=1, formats=formats)
    return root


# What rounding to the format can lose. E4M3 has 3 mantissa bits: 2^-4 of the value, and below its normals half of 2^-9
# of the scale, which is less than largest / 224. E2M1's widest step is 2, from 4 to 6, so it loses up to one scale:
# largest / 3 at most for Fp4, whose power of two leaves the largest value between 3 and 6; largest / 6 for NvFp4, and
# 2^-4 more because its E4M3 scale is rounded itself. BF16 has 7 mantissa bits: 2^-8 of the
# value.
@pytest.mark.parametrize(
    ("formats", "share_of_value", "share_of_largest"),
    [
        ("official", 2**-4, 2**-10 / 224),
        ("base", 2**-4, 2**-10 / 224),
        ("nvfp4", 2**-4, 2**-10 / 224),
        ("bf16", 2**-8, 0),
        ("f32", 0, 0),
    ],
)
def test_weights_are_near_what_was_written(checkpoints, formats, share_of_value, share_of_largest):
    checkpoint, counted = opened(checkpoints / formats)
    weights = open_weights(checkpoint, counted)
    generator = torch.Generator().manual_seed(1)  # as write_checkpoint draws them
    for name, parameter in parameters(ModelConfig.from_json(micro_config(), "")).items():
        written = random_values(name, parameter, 4, generator)
        if parameter.kind == "i64":
            assert torch.equal(weights.table(name), written)
            continue
        if parameter.kind != "matrix":
            assert torch.allclose(weights.vector(name).float(), written, rtol=2**-8, atol=0), name
            continue
        weight = weights.matrix(name)
        largest = written.abs().max()
        bound = share_of_value * written.abs() + share_of_largest * largest
        if isinstance(weight, Fp4 | NvFp4):
            bound = torch.full_like(written, 1 / 3 if isinstance(weight, Fp4) else 1 / 6 + 2**-4) * largest
        assert ((decode(weight) - written).abs() <= bound).all(), name
        assert nbytes(weight) < 2.1 * written.numel() or formats == "f32", name
    assert weights.unread() == []


@pytest.mark.parametrize(
    ("formats", "expert", "linear"),
    [
        ("official", Fp4, Fp8),
        ("base", Fp8, Fp8),
        ("nvfp4", NvFp4, Fp8),
        ("bf16", Dense, Dense),
        ("f32", Dense, Dense),
    ],
)
def test_weights_keep_their_stored_form(checkpoints, formats, expert, linear):
    checkpoint, counted = opened(checkpoints / formats)
    weights = open_weights(checkpoint, counted)
    one, other = weights.matrix("layers.0.ffn.experts.2.w2.weight"), weights.matrix("layers.1.attn.indexer.wq_b.weight")
    assert (type(one), type(other)) == (expert, linear)
    assert (one.shape, other.shape) == ((64, 32), (64, 32))
    stored = checkpoint.read("layers.0.ffn.experts.2.w2.weight")
    assert one.data.data_ptr() == stored.data_ptr()  # a view of the file, not a copy
    if isinstance(one, NvFp4):
        assert one.global_scale.shape == ()


def test_unread_parameters_are_listed(checkpoints):
    weights = open_weights(*opened(checkpoints / "official"))
    everything = weights.unread()
    assert everything == list(parameters(ModelConfig.from_json(micro_config(), "")))
    weights.vector("norm.weight")
    weights.matrix("layers.0.attn.wq_a.weight")
    weights.table("layers.0.ffn.gate.tid2eid")
    asked = {"norm.weight", "layers.0.attn.wq_a.weight", "layers.0.ffn.gate.tid2eid"}
    assert weights.unread() == [name for name in everything if name not in asked]


@pytest.mark.parametrize(
    ("method", "name", "complaint"),
    [
        ("matrix", "layers.9.attn.wq_a.weight", "the architecture has no parameter 'layers.9.attn.wq_a.weight'"),
        ("vector", "layers.0.attn.wq_a.scale", "the architecture has no parameter"),
        ("vector", "layers.0.attn.wq_a.weight", "is matrix, asked for as bf16 or f32"),
        ("matrix", "head.weight", "head.weight is bf16, asked for as matrix"),
        ("table", "head.weight", "asked for as i64"),
        ("vector", "layers.0.ffn.gate.tid2eid", "is i64, asked for as bf16 or f32"),
    ],
)
def test_what_is_not_there_is_refused(checkpoints, method, name, complaint):
    weights = open_weights(*opened(checkpoints / "official"))
    with pytest.raises(CheckpointError, match=complaint):
        getattr(weights, method)(name)


# Values


def rewritten(tmp_path, formats, name, change):
    """A checkpoint with one tensor changed in place by `change`."""
    tensors = make_tensors(micro_config(), seed=1, formats=formats)
    change(tensors[name])
    write_checkpoint(tmp_path, micro_config(), seed=1, formats=formats)
    write_tensors(tmp_path, tensors, shards=2)
    return opened(tmp_path)


def put(*place, value=None, byte=None):
    def change(tensor):
        if byte is None:
            tensor[place] = value
        else:
            tensor.view(torch.uint8)[place] = byte

    return change


WQ_A, EXPERT, TABLE = "layers.0.attn.wq_a.scale", "layers.1.ffn.experts.2.w3", "layers.0.ffn.gate.tid2eid"


@pytest.mark.parametrize(
    ("formats", "name", "change", "complaint"),
    [
        ("official", WQ_A, put(0, 0, byte=255), r"scale \[0, 0\] is nan, want a power of two"),
        ("official", f"{EXPERT}.scale", put(7, 1, byte=255), r"scale \[7, 1\] is nan, want a power of two"),
        ("base", WQ_A, put(0, 0, value=math.nan), r"scale \[0, 0\] is nan"),
        ("base", WQ_A, put(0, 0, value=math.inf), r"scale \[0, 0\] is inf"),
        ("base", WQ_A, put(0, 0, value=0.0), r"scale \[0, 0\] is 0\.0"),
        ("base", WQ_A, put(0, 0, value=-0.5), r"scale \[0, 0\] is -0\.5"),
        ("base", WQ_A, put(0, 0, value=0.75), r"scale \[0, 0\] is 0\.75, want a power of two"),
        ("base", WQ_A, put(0, 0, value=2.0**-128), "want a power of two"),
        ("nvfp4", f"{EXPERT}.weight_scale", put(31, 3, byte=0x7F), r"scale \[31, 3\] is nan, want a finite number"),
        ("nvfp4", f"{EXPERT}.weight_scale", put(31, 3, byte=0x88), r"scale \[31, 3\] is -0\.015625"),
        ("nvfp4", f"{EXPERT}.weight_scale_2", put(value=0.0), r"scale \[\] is 0\.0, want a finite positive number"),
        ("nvfp4", f"{EXPERT}.weight_scale_2", put(value=math.inf), r"scale \[\] is inf"),
        ("official", TABLE, put(5, 1, value=4), "row 5 names expert 4 of 4"),
        ("official", TABLE, put(5, 0, value=-1), "row 5 names expert -1 of 4"),
        ("official", TABLE, lambda table: table[9].fill_(3), r"row 9 names an expert twice: \[3, 3\]"),
        ("bf16", TABLE, put(0, 0, value=2**62), "row 0 names expert 4611686018427387904 of 4"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_meant_is_named(tmp_path, formats, name, change, complaint):
    checkpoint, counted = rewritten(tmp_path, formats, name, change)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        open_weights(checkpoint, counted)
    assert str(checkpoint.tensors[name].shard) in str(caught.value)
    assert f"'{name}'" in str(caught.value)
    assert "\n" not in str(caught.value)
    of_other_ranks = [parameter for parameter in counted.mappings if not parameter.startswith(name.rpartition(".")[0])]
    open_weights(checkpoint, counted, only=of_other_ranks)


def test_a_rank_may_not_ask_for_what_is_not_there(checkpoints):
    with pytest.raises(CheckpointError, match=r"no parameter 'layers\.7\.norm'"):
        open_weights(*opened(checkpoints / "official"), only=["layers.7.norm"])


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**-126, 1.0, 2.0**127])
def test_every_power_of_two_that_e8m0_has_is_accepted_as_f32(tmp_path, scale):
    open_weights(*rewritten(tmp_path, "base", WQ_A, put(0, 0, value=scale)))


def test_a_block_scale_of_nvfp4_may_underflow_to_zero(tmp_path):
    open_weights(*rewritten(tmp_path, "nvfp4", f"{EXPERT}.weight_scale", put(31, 3, byte=0)))


def test_the_predicates_on_every_byte():
    assert is_power_of_two(ALL_BYTES.view(torch.float8_e8m0fnu)).tolist() == [byte != 255 for byte in range(256)]
    positive = [0 < byte < 0x7F for byte in range(256)]
    assert is_positive(ALL_BYTES.view(torch.float8_e4m3fn)).tolist() == positive
    zeros = [byte in {0, 0x80} for byte in range(256)]
    not_negative = [a or b for a, b in zip(positive, zeros, strict=True)]
    assert is_not_negative(ALL_BYTES.view(torch.float8_e4m3fn)).tolist() == not_negative
    powers = torch.tensor([e8m0_exact(byte) for byte in range(255)], dtype=torch.float64).float()
    assert is_power_of_two(powers).all()
    assert not is_power_of_two(powers[:254] * 1.5).any()
    assert not is_power_of_two(-powers).any()


# Fingerprint


def test_fingerprint_is_stable_and_follows_content(checkpoints, tmp_path):
    prints = {formats: fingerprint(Checkpoint.open(checkpoints / formats)) for formats in FORMATS}
    assert len(set(prints.values())) == len(FORMATS)
    copy = shutil.copytree(checkpoints / "official", tmp_path / "elsewhere")
    assert fingerprint(Checkpoint.open(copy)) == prints["official"]
    tensor = Checkpoint.open(copy).tensors["layers.1.attn.wkv.weight"]
    raw = bytearray(tensor.shard.read_bytes())
    raw[(tensor.start + tensor.stop) // 2] ^= 1
    tensor.shard.write_bytes(raw)
    assert fingerprint(Checkpoint.open(copy)) != prints["official"]


def test_fingerprint_of_a_large_checkpoint_reads_the_ends_of_each_tensor(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr("fathom.model.checkpoint.weights.HASHED_WHOLE", 0)
    monkeypatch.setattr("fathom.model.checkpoint.weights.HASHED_END", 16)
    before = fingerprint(Checkpoint.open(checkpoints / "official"))
    seen = {}
    for place in (0, 15, 16, -17, -16, -1):
        copy = shutil.copytree(checkpoints / "official", tmp_path / str(place))
        tensor = Checkpoint.open(copy).tensors["layers.1.attn.wkv.weight"]
        raw = bytearray(tensor.shard.read_bytes())
        raw[place + (tensor.start if place >= 0 else tensor.stop)] ^= 1
        tensor.shard.write_bytes(raw)
        seen[place] = fingerprint(Checkpoint.open(copy)) != before
    assert seen == {0: True, 15: True, 16: False, -17: False, -16: True, -1: True}
