from collections import Counter
from pathlib import Path

import pytest

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import Axis, axis, parameters
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.checkpoint.weights import open_weights
from fathom.model.choices import AUTO, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.runtime.options import DEMO
from fathom.runtime.sharding import sharding_plan
from tests.make_checkpoint import tiny_config, write_checkpoint

PUBLISHED = Path(__file__).resolve().parents[2] / "model" / "published"
# every axis splits over four ranks in whole blocks of 128 rows, but SwiGLU's columns, 32 of a block for each
WIDE = {
    "head_dim": 144,
    "hidden_size": 512,
    "num_attention_heads": 32,
    "o_groups": 8,
    "o_lora_rank": 64,
    "q_lora_rank": 128,
}
OUTPUT, NO_BLOCKS = "columns of both sublayers' outputs", "neither whole blocks of 128 nor a part of one"


def wide_config(**changes):
    return ModelConfig.from_json(tiny_config(**WIDE | changes), "wide")


def held(sharding, config, rank):
    """Rows of each parameter that a rank holds, by its own reading of the contract."""
    found = {}
    for name, parameter in parameters(config).items():
        share = sharding.rows(name, parameter.shape[0], rank)
        found[name] = set(range(share.start, share.stop))
    return found


@pytest.mark.parametrize("experts", [ROWS, WHOLE])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_ranks_together_hold_every_row_once_or_every_rank_holds_it(size, experts):
    config = wide_config()
    sharding = sharding_plan(config, size, experts)
    assert sharding.replicated == ()
    ranks = [held(sharding, config, rank) for rank in range(size)]
    for name, parameter in parameters(config).items():
        copies = Counter(row for rank in ranks for row in rank[name])
        assert set(copies) == set(range(parameter.shape[0])), name
        everywhere = axis(name) is Axis.NONE or (experts == WHOLE and "shared_experts" in name)
        assert set(copies.values()) == {size if everywhere else 1}, name


def test_whole_experts_lie_on_one_rank_each():
    config = wide_config()
    sharding = sharding_plan(config, 4, WHOLE)
    for expert in range(8):
        for matrix in ("w1", "w2", "w3"):
            name = f"layers.1.ffn.experts.{expert}.{matrix}.weight"
            rows = parameters(config)[name].shape[0]
            held = [sharding.rows(name, rows, rank) for rank in range(4)]
            assert [part.size for part in held] == [rows if rank == expert // 2 else 0 for rank in range(4)]
            assert all(part.split for part in held)
    assert [shards.experts[:3] for shards in sharding.ranks] == [(0, 2, 8), (2, 4, 8), (4, 6, 8), (6, 8, 8)]
    assert not any(shards.inner.split for shards in sharding.ranks)
    assert all(shards.output.split for shards in sharding.ranks), "rows of wo_b"


def test_how_experts_lie_where_one_way_does_not_divide():
    config = wide_config(n_routed_experts=6)
    assert [sharding_plan(config, 4, experts).experts for experts in (AUTO, ROWS)] == [ROWS, ROWS]
    with pytest.raises(ConfigError, match=r"^4 ranks: n_routed_experts, routed experts: 6, which 4 does not divide$"):
        sharding_plan(config, 4, WHOLE)
    config = wide_config(moe_intermediate_size=384)
    assert [sharding_plan(config, 2, experts).experts for experts in (AUTO, WHOLE)] == [WHOLE, WHOLE]
    with pytest.raises(ConfigError, match=r"^2 ranks: moe_intermediate_size, columns of SwiGLU: 192 rows"):
        sharding_plan(config, 2, ROWS)


def test_what_is_sharded():
    config = wide_config()
    sharding = sharding_plan(config, 4)
    sharded = {
        "embed.weight": (128, 256),  # of 512 tokens
        "head.weight": (128, 256),
        "layers.1.attn.wq_b.weight": (8 * 144, 16 * 144),  # heads 8 to 15
        "layers.1.attn.attn_sink": (8, 16),
        "layers.1.attn.wo_a.weight": (128, 256),  # groups 2 and 3
        "layers.1.attn.wo_b.weight": (128, 256),  # of 512 columns of the output
        "layers.1.ffn.experts.7.w1.weight": (32, 64),
        "layers.1.ffn.experts.0.w3.weight": (32, 64),
        "layers.1.ffn.experts.3.w2.weight": (128, 256),
        "layers.1.ffn.shared_experts.w1.weight": (32, 64),
        "layers.1.ffn.shared_experts.w2.weight": (128, 256),
    }
    for name, rows in sharded.items():
        share = sharding.rows(name, parameters(config)[name].shape[0], 1)
        assert (share.start, share.stop) == rows, name
    whole = [name for name in parameters(config) if axis(name) is Axis.NONE and name.startswith("layers.1.")]
    assert {name.removeprefix("layers.1.") for name in whole if name.endswith(("wkv.weight", "w1.weight", "_fn"))} == {
        "attn.wkv.weight",
        "attn.compressor.wkv.weight",
        "attn.indexer.compressor.wkv.weight",
        "hc_attn_fn",
        "hc_ffn_fn",
    }
    for name in whole:
        assert not sharding.rows(name, parameters(config)[name].shape[0], 3).split


@pytest.mark.parametrize(
    ("changes", "size", "said"),
    [
        ({"num_attention_heads": 6, "o_groups": 2}, 4, "attention heads: 6, which 4 does not divide"),
        ({"o_groups": 2}, 4, "output groups: 2, which 4 does not divide"),
        ({"vocab_size": 510}, 4, "vocabulary: 510, which 4 does not divide"),
        ({"hidden_size": 768}, 4, f"{OUTPUT}: 192 rows for each rank, {NO_BLOCKS}"),
        ({"o_lora_rank": 96}, 4, f"output groups: 192 rows for each rank, {NO_BLOCKS}"),
    ],
)
def test_what_does_not_divide_is_replicated_and_said(changes, size, said):
    config = wide_config(**changes)
    sharding = sharding_plan(config, size)
    assert said in sharding.replicated
    rows = {
        "attention heads": "layers.1.attn.wq_b.weight",
        "output groups": "layers.1.attn.wo_a.weight",
        "vocabulary": "embed.weight",
        OUTPUT: "layers.1.ffn.experts.0.w2.weight",
    }[said.split(":")[0]]
    for rank in range(size):
        share = sharding.rows(rows, parameters(config)[rows].shape[0], rank)
        assert (share.start, share.stop) == (0, share.total)


def test_output_groups_stay_whole_where_heads_do():
    sharding = sharding_plan(wide_config(head_dim=80, num_attention_heads=8, o_groups=4, o_lora_rank=128), 4)
    assert sharding.replicated == (
        f"attention heads: 160 rows for each rank, {NO_BLOCKS}",
        "output groups: as the attention heads",
    )
    assert not any(shares.groups.split or shares.heads.split for shares in sharding.ranks)


@pytest.mark.parametrize("size", [3, 5])
def test_experts_that_do_not_divide_are_refused(size):
    said = f"^{size} ranks: moe_intermediate_size, columns of SwiGLU: 128, which {size} does not divide$"
    with pytest.raises(ConfigError, match=said):
        sharding_plan(wide_config(), size)


def test_experts_whose_blocks_would_be_cut_are_refused():
    with pytest.raises(ConfigError, match=f"^2 ranks: moe_intermediate_size, .*: 192 rows for each rank, {NO_BLOCKS}$"):
        sharding_plan(wide_config(moe_intermediate_size=384), 2, ROWS)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("formats", ["official", "base", "nvfp4", "bf16"])
@pytest.mark.parametrize("experts", [ROWS, WHOLE])
def test_bytes_held_sum_to_the_checkpoints_and_the_announced_replication(tmp_path, formats, size, experts):
    write_checkpoint(tmp_path, tiny_config(**WIDE), seed=3, formats=formats)
    config = ModelConfig.from_file(tmp_path / "config.json")
    checkpoint = Checkpoint.open(tmp_path)
    counted = census(checkpoint.shapes(), config)
    sharding = sharding_plan(config, size, experts)
    receipts = []
    for rank in range(size):
        weights = open_weights(checkpoint, counted, held=lambda name, rows, rank=rank: sharding.rows(name, rows, rank))
        for name, parameter in parameters(config).items():
            if not sharding.rows(name, parameter.shape[0], rank).size:
                continue  # another rank's expert
            {"matrix": weights.matrix, "i64": weights.table}.get(parameter.kind, weights.vector)(name)
        assert weights.unread() == []
        receipts.append(weights.handed())
    stored = {
        name: sum(checkpoint.tensors[part].nbytes for part in parts(counted.mappings[name]))
        for name in counted.mappings
    }
    total = sum(tensor.nbytes for name, tensor in checkpoint.tensors.items() if name not in counted.ignored)
    assert sum(stored.values()) == total
    # what of each is on every rank: all of the axis NONE
    splits = {axis_: not any(note.startswith(axis_.value) for note in sharding.replicated) for axis_ in Axis}
    splits[Axis.NONE] = False

    def cut(name):
        """Whether ranks have parts of it: neither all, nor, of an expert that lies whole, one of them."""
        return splits[axis(name)] and (experts == ROWS or "experts." not in name)

    on_one = [name for name in stored if experts == WHOLE and ".experts." in name]
    copies = sum((size - 1) * stored[name] for name in stored if not cut(name) and name not in on_one)
    # and with each part NVFP4's scale of the whole matrix; where blocks of 128 rows are cut, the scales of its block
    for name, mapping in counted.mappings.items():
        each = parameters(config)[name].shape[0] // size
        if mapping.global_scale is not None and cut(name):
            copies += (size - 1) * checkpoint.tensors[mapping.global_scale].nbytes
        if mapping.form in (Form.FP8, Form.FP8_F32) and cut(name) and each < 128:
            copies += checkpoint.tensors[mapping.scale].nbytes * (128 // each - 1)
    assert sum(sum(receipt.values()) for receipt in receipts) == total + copies


def parts(mapping):
    return [name for name in (mapping.weight, mapping.scale, mapping.global_scale) if name is not None]


@pytest.mark.parametrize("model", ["Flash", "Pro"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(("experts", "other"), [(ROWS, "experts"), (WHOLE, "inner")])
def test_published_models_split_on_every_axis(model, size, experts, other):
    config = ModelConfig.from_file(PUBLISHED / f"DeepSeek-V4-{model}.json")
    sharding = sharding_plan(config, size, experts)
    assert sharding.replicated == ()
    for shards in sharding.ranks:
        assert {axis_ for axis_, shard in shards._asdict().items() if not shard.split} == {"kv_heads", other}


def test_the_demo_on_two_ranks():
    config = ModelConfig.from_file(DEMO / "config.json")
    sharding = sharding_plan(config, 2)
    assert sharding.replicated == ()
    assert [shares.heads[:3] for shares in sharding.ranks] == [(0, 2, 4), (2, 4, 4)]
    assert [shares.groups[:3] for shares in sharding.ranks] == [(0, 1, 2), (1, 2, 2)]
    assert [shares.inner[:3] for shares in sharding.ranks] == [(0, 64, 128), (64, 128, 128)]
