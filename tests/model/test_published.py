import dataclasses
import gzip
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.header import ITEM_BYTES
from fathom.model.checkpoint.published import published_tensors
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import ConfigError
from tests.make_checkpoint import tiny_config

CONFIGS = Path(__file__).parents[2] / "model" / "published"
LISTS = Path(__file__).parents[2].parent / "shared" / "data" / "checkpoints"  # 1.3 MB, not in the repository


def flash(**changes):
    return dataclasses.replace(ModelConfig.from_file(CONFIGS / "DeepSeek-V4-Flash.json"), **changes)


def nbytes(tensors):
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in tensors.values())


def with_preview_head(config):
    """The backbone, and the draft head of the first releases, from the published description of it alone.

    It is one block without compressor or hash table, two FP8 projections of the stream, three norms and a head of mHC.
    """
    scored = dataclasses.replace(config, num_hash_layers=0, compress_ratios=(0, *config.compress_ratios[1:]),
        layer_kinds=(LayerKind.SWA, *config.layer_kinds[1:]))  # fmt: skip
    block = {
        name.replace("layers.0.", "mtp.0."): entry
        for name, entry in published_tensors(scored, "fp4").items()
        if name.startswith("layers.0.")
    }
    D, hc = config.hidden_size, config.hc_mult
    for projection in ("e_proj", "h_proj"):
        block[f"mtp.0.{projection}.weight"] = ("F8_E4M3", (D, D))
        block[f"mtp.0.{projection}.scale"] = ("F8_E8M0", (D // 128, D // 128))
    block |= {f"mtp.0.{norm}.weight": ("BF16", (D,)) for norm in ("enorm", "hnorm", "norm")}
    block["mtp.0.hc_head_fn"] = ("F32", (hc, hc * D))
    block["mtp.0.hc_head_base"] = ("F32", (hc,))
    block["mtp.0.hc_head_scale"] = ("F32", (1,))
    return published_tensors(config, "fp4") | block


# The totals of the release pages and of the shards' own headers.
@pytest.mark.parametrize(
    ("name", "tensors", "in_head", "total"),
    [("Flash", 69_187, 1_575, 159_609_485_896), ("Pro", 145_116, 2_343, 864_704_792_696)],
)
def test_backbone_and_drafting_head_add_up_to_the_release_byte_for_byte(name, tensors, in_head, total):
    config = ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json")
    release = with_preview_head(config)
    assert sum(name.startswith("mtp.") for name in release) == in_head
    assert len(release) == tensors
    assert nbytes(release) == total


def test_flash_has_the_published_number_of_tensors_of_each_dtype():
    counts = Counter(dtype for dtype, _ in with_preview_head(flash()).values())
    assert counts == {"BF16": 433, "F32": 417, "F8_E4M3": 375, "F8_E8M0": 34_167, "I64": 3, "I8": 33_792}


@pytest.mark.skipif(not LISTS.is_dir(), reason="the published tensor lists are not beside this repository")
@pytest.mark.parametrize(
    ("name", "forms"),
    [
        ("Flash", ("fp4",)),
        ("Pro", ("fp4",)),
        ("Flash-0731", ("fp4",)),
        ("Pro-0813", ("fp4",)),
        ("Flash-Base", ("fp8", "F32")),
    ],
)
def test_every_name_dtype_and_shape_is_the_published_one(name, forms):
    with gzip.open(LISTS / f"expected_DeepSeek-V4-{name}.json.gz") as file:
        published = json.load(file)
    want = {stored: (dtype, tuple(shape)) for stored, (dtype, shape) in published.items() if stored[:4] != "mtp."}
    assert published_tensors(ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json"), *forms) == want


@pytest.mark.parametrize(
    ("forms", "expert", "linear"),
    [
        (("fp4",), Form.FP4, Form.FP8),
        (("fp8",), Form.FP8, Form.FP8),
        (("fp8", "F32"), Form.FP8_F32, Form.FP8_F32),
    ],
)
def test_the_census_binds_every_tensor(forms, expert, linear):
    config = ModelConfig.from_json(tiny_config(), "tiny config")  # head_dim 80: blocks that are not full
    counted = census(published_tensors(config, *forms), config)
    assert counted.mappings["layers.0.ffn.experts.7.w2.weight"].form is expert
    assert counted.mappings["layers.3.attn.indexer.wq_b.weight"].form is linear
    assert not counted.ignored


def test_an_expert_of_flash_takes_the_bytes_that_its_form_says():
    def expert(*forms):
        tensors = published_tensors(flash(), *forms).items()
        return nbytes({name: entry for name, entry in tensors if ".3.ffn.experts.9." in name})

    weights = 3 * 4096 * 2048
    assert expert("fp4") == weights // 2 + weights // 32
    assert expert("fp8") == weights + weights // 128**2
    assert expert("fp8", "F32") == weights + 4 * weights // 128**2


def test_fp4_with_f32_scales_does_not_exist():
    with pytest.raises(AssertionError, match="fp4 experts with F32 scales"):
        published_tensors(flash(), "fp4", "F32")


def test_experts_whose_columns_are_no_multiple_of_an_fp4_block_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"^layers\.0\.ffn\.experts\.0\.w2\.weight has 2000 columns: FP4 wants"):
        published_tensors(flash(moe_intermediate_size=2000), "fp4")
