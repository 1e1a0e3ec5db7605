import gzip
import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fathom.model.checkpoint import names
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import Head, announced, copied, head_parameters
from fathom.model.checkpoint.names import Role, parameters, translate
from fathom.model.checkpoint.published import published_tensors
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.checkpoint.weights import open_weights
from fathom.model.config import ModelConfig
from fathom.model.errors import CheckpointError, quoted
from tests.make_checkpoint import make_tensors, micro_config, tiny_config, write_checkpoint, write_tensors

CONFIGS = Path(__file__).parents[2] / "model" / "published"
LISTS = Path(__file__).parents[2].parent / "shared" / "data" / "checkpoints"  # 1.3 MB, not in the repository
DEMO = Path(__file__).parents[2] / "model" / "demo"

DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@pytest.fixture
def config():
    return ModelConfig.from_json(micro_config(), "micro config")


def listing(formats="official"):
    tensors = make_tensors(micro_config(), seed=0, formats=formats)
    return {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}


def complaint(tensors, config):
    with pytest.raises(CheckpointError) as caught:
        census(tensors, config)
    return str(caught.value)


needs_lists = pytest.mark.skipif(not LISTS.is_dir(), reason="the published tensor lists are not beside this repository")


def published(name):
    """Stored name -> dtype and shape, of a published checkpoint."""
    with gzip.open(LISTS / f"expected_DeepSeek-V4-{name}.json.gz") as file:
        return json.load(file)


def summed(shapes):
    """Tensors, elements, and SHA-256 of the sorted lines `name 2x3`."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))}\n" for name, shape in shapes.items())
    return len(shapes), sum(map(math.prod, shapes.values())), hashlib.sha256("".join(lines).encode()).hexdigest()


# Of the published lists, as `test_the_golden_values_are_those_of_the_lists` computes them: every tensor but `mtp.*` and
# scales, with its logical shape.
FLASH = (34_223, 284_334_567_511, "da8201456585b47c6e79701ce11bb21c604ecc1a1319adeb2fe46b0fa4f910c7")
PRO = (71_983, 1_572_999_528_803, "bd0e7ab04cfce7100ed98bef2dfd1953b084b030eba9a8bb060fb6edee0b2bb2")
GOLDEN = {"Flash": FLASH, "Flash-0731": FLASH, "Flash-Base": FLASH, "Pro": PRO, "Pro-0813": PRO}


@pytest.mark.parametrize("name", GOLDEN)
def test_a_published_config_demands_the_tensors_that_were_published(name):
    demanded = parameters(ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json"))
    assert summed({name: parameter.shape for name, parameter in demanded.items()}) == GOLDEN[name]


@needs_lists
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if "Pro" in n else []) for n in GOLDEN])
def test_the_golden_values_are_those_of_the_lists(name):
    shapes = {
        stored: [*shape[:-1], 2 * shape[-1]] if dtype == "I8" else shape  # two FP4 values in a byte
        for stored, (dtype, shape) in published(name).items()
        if not stored.startswith("mtp.") and not stored.endswith(".scale")
    }
    assert summed(shapes) == GOLDEN[name]


# The published totals, from the release pages and the shards' own headers: tensors, bytes, elements as the hub counts
# them, drafting stages and their kind. Flash-Base's bytes were never published; its list is derived. Totals of every
# kind, both draft heads and all forms of weights are in the three lists that `make test` reads, of seconds each.
@needs_lists
@pytest.mark.parametrize(
    ("name", "tensors", "nbytes", "elements", "mtp", "head"),
    [
        ("Flash", 69_187, 159_609_485_896, 158_069_433_298, 1, "preview MTP"),
        pytest.param("Pro", 145_116, 864_704_792_696, 861_608_274_846, 1, "preview MTP", marks=pytest.mark.slow),
        ("Flash-0731", 72_317, 166_878_536_440, None, 3, "DSpark"),
        pytest.param("Pro-0813", 149_782, 892_727_580_904, None, 3, "DSpark", marks=pytest.mark.slow),
        ("Flash-Base", 69_187, None, None, 1, "preview MTP"),
    ],
)
def test_published_lists_are_accounted_for_to_the_byte(name, tensors, nbytes, elements, mtp, head):
    config = ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json")
    counted = census(published(name), config)
    assert counted.tensors == tensors
    assert nbytes in (None, counted.nbytes)
    assert elements in (None, sum(tally.elements for tally in counted.by_dtype.values()))
    assert (counted.mtp_stages, counted.mtp_head) == (mtp, head)
    assert counted.mappings.keys() == parameters(config).keys()
    experts = 3 * config.num_hidden_layers * config.n_routed_experts
    linears = sum(parameter.kind == "matrix" for parameter in parameters(config).values()) - experts
    by_form = {form: tally.tensors for form, tally in counted.by_form.items() if form not in (Form.BF16, Form.F32)}
    base = name == "Flash-Base"
    want = {Form.FP8_F32: experts + linears} if base else {Form.FP4: experts, Form.FP8: linears}
    assert by_form == want | {Form.I64: 3}
    # every tensor has exactly one place
    bound = [
        stored for one in counted.mappings.values() for stored in (one.weight, one.scale, one.global_scale) if stored
    ]
    assert len(bound) == len(set(bound)) == tensors - len(counted.ignored)
    assert sum(tally.tensors for tally in counted.by_kind.values()) == tensors
    assert sum(tally.nbytes for tally in counted.by_kind.values()) == counted.nbytes


def test_demo_checkpoint_is_accounted_for():
    config = ModelConfig.from_file(DEMO / "config.json")
    checkpoint = Checkpoint.open(DEMO)
    counted = census(checkpoint.shapes(), config)
    assert not counted.ignored
    assert not checkpoint.unlisted
    assert {Form.FP8, Form.FP4} <= counted.by_form.keys()  # it shows the published formats
    open_weights(checkpoint, counted)


@pytest.mark.parametrize(
    ("formats", "experts", "linears"),
    [
        ("official", Form.FP4, Form.FP8),
        ("base", Form.FP8_F32, Form.FP8_F32),
        ("nvfp4", Form.NVFP4, Form.FP8),
        ("bf16", Form.BF16, Form.BF16),
        ("f32", Form.F32, Form.F32),
    ],
)
def test_the_form_is_chosen_for_each_parameter(config, formats, experts, linears):
    counted = census(listing(formats), config)
    for name, parameter in parameters(config).items():
        if parameter.kind == "matrix":
            assert counted.mappings[name].form is (experts if ".ffn.experts." in name else linears), name
    reasons = set(counted.ignored.values())
    assert reasons == ({names.INPUT_SCALE_REASON} if formats == "nvfp4" else set())


def test_forms_may_mix_within_a_layer(config):
    nvfp4, official = listing("nvfp4"), listing()
    mixed = {name: entry for name, entry in nvfp4.items() if "experts.1." not in name}
    mixed |= {name: entry for name, entry in official.items() if "experts.1." in name}
    counted = census(mixed, config)
    assert counted.mappings["layers.0.ffn.experts.0.w1.weight"].form is Form.NVFP4
    assert counted.mappings["layers.0.ffn.experts.1.w1.weight"].form is Form.FP4


WQ_A, EXPERT = "layers.1.attn.wq_a", "layers.0.ffn.experts.3.w2"


@pytest.mark.parametrize(
    ("formats", "change", "want"),
    [
        # one tensor gone
        ("official", {"norm.weight": None}, "missing (1): norm.weight"),
        ("official", {"layers.0.ffn.gate.tid2eid": None}, "missing (1): layers.0.ffn.gate.tid2eid"),
        ("official", {f"{WQ_A}.scale": None}, f"scale missing (1): scale of '{WQ_A}.weight'"),
        ("official", {f"{WQ_A}.weight": None}, f"scale without its weight (1): '{WQ_A}.scale'"),
        ("nvfp4", {f"{EXPERT}.weight_scale_2": None}, f"scale missing (1): weight_scale_2 of '{EXPERT}.weight'"),
        ("nvfp4", {f"{EXPERT}.weight_scale": None}, f"scale missing (1): weight_scale of '{EXPERT}.weight'"),
        # one too many
        ("official", {"layers.2.attn.attn_sink": ("F32", (2,))}, "not in this architecture (1): 'layers.2.attn"),
        ("official", {"layers.0.ffn.gate.bias": ("F32", (4,))}, "not in this architecture (1): 'layers.0.ffn"),
        ("official", {"layers.0.ffn.experts.4.w1.weight": ("BF16", (32, 64))}, "not in this architecture (1)"),
        ("official", {"layers.0.attn.wq_c.weight": ("BF16", (2,))}, "unknown name (1): 'layers.0.attn.wq_c.weight'"),
        ("official", {"layers.01.attn_norm.weight": ("BF16", (64,))}, "unknown name (1)"),
        ("official", {"model.norm.weight": ("BF16", (64,))}, "duplicate (1): 'model.norm.weight' and 'norm.weight'"),
        (
            "official",
            {f"{WQ_A}.weight_scale_inv": ("F8_E8M0", (1, 1))},
            f"duplicate (1): '{WQ_A}.weight_scale_inv' and '{WQ_A}.scale'",
        ),
        ("bf16", {f"{WQ_A}.scale": ("F8_E8M0", (1, 1))}, f"scale not of this form (1): '{WQ_A}.scale' beside"),
        ("official", {"norm.scale": ("F8_E8M0", (1, 1))}, "scale not of this form (1): 'norm.scale' beside"),
        ("official", {f"{WQ_A}.input_scale": ("F32", ())}, f"scale not of this form (1): '{WQ_A}.input_scale'"),
        ("nvfp4", {f"{EXPERT}.scale": ("F8_E8M0", (64, 1))}, f"scale not of this form (1): '{EXPERT}.scale' beside"),
        # one of another shape
        ("official", {"norm.weight": ("BF16", (65,))}, "misshapen (1): 'norm.weight' is [65], want [64]"),
        ("official", {f"{WQ_A}.weight": ("F8_E4M3", (64, 32))}, f"'{WQ_A}.weight' is [64, 32], want [32, 64]"),
        ("official", {f"{WQ_A}.scale": ("F8_E8M0", (1, 2))}, f"misshapen (1): '{WQ_A}.scale' is [1, 2], want [1, 1]"),
        ("official", {f"{EXPERT}.weight": ("I8", (64, 32))}, f"'{EXPERT}.weight' is [64, 32], want [64, 16]"),
        ("official", {f"{EXPERT}.scale": ("F8_E8M0", (64, 2))}, f"'{EXPERT}.scale' is [64, 2], want [64, 1]"),
        ("nvfp4", {f"{EXPERT}.weight_scale_2": ("F32", (2,))}, "weight_scale_2' is [2], want [] or [1]"),
        # one of another type
        ("official", {"norm.weight": ("F16", (64,))}, "wrong type (1): 'norm.weight' is F16, want BF16 or F32"),
        ("official", {"head.weight": ("F8_E4M3", (16, 64))}, "wrong type (1): 'head.weight' is F8_E4M3, want"),
        ("official", {"layers.0.ffn.gate.tid2eid": ("F32", (16, 2))}, "want I64 or I32"),
        ("official", {f"{WQ_A}.weight": ("F8_E5M2", (32, 64))}, f"wrong type (1): '{WQ_A}.weight' is F8_E5M2"),
        ("official", {f"{EXPERT}.scale": ("F32", (64, 1))}, f"wrong type (1): '{EXPERT}.scale' is F32, want F8_E8M0"),
        ("nvfp4", {f"{EXPERT}.weight_scale": ("F8_E8M0", (64, 2))}, "is F8_E8M0, want F8_E4M3"),
        ("official", {"norm.weight": ("F4", (64,))}, "unknown dtype (1): 'norm.weight' is 'F4'"),
    ],
)  # fmt: skip
def test_one_fault_is_named(config, formats, change, want):
    tensors = listing(formats) | change
    message = complaint({name: entry for name, entry in tensors.items() if entry is not None}, config)
    assert want in message
    if "unknown dtype" not in want:  # such a tensor is missing too
        assert "\n" not in message


@pytest.mark.parametrize(
    ("official", "renamed", "meant"),
    [
        (
            "layers.1.attn.indexer.compressor.wkv.weight",
            "layers.1.attn.indexer.compressor.kv_prj.weight",
            "layers.1.attn.indexer.compressor.kv_proj.weight",
        ),
        ("layers.1.attn.wq_a.weight", "layer.1.attn.wq_a.weight", "layers.1.attn.wq_a.weight"),
        (
            "layers.0.ffn.experts.3.w2.weight",
            "model.layers.0.mlp.experts.3.down_prj.weight",
            "model.layers.0.mlp.experts.3.down_proj.weight",
        ),
        ("hc_head_fn", "model.hc_head.fn", "model.hc_head_fn"),
        ("norm.weight", "final.weight", None),
        ("embed.weight", "x" * 1000, None),
    ],
)
def test_a_renamed_tensor_is_both_missing_and_unknown(config, official, renamed, meant):
    """The name that it is nearly is told, in its own dialect."""
    tensors = listing()
    tensors[renamed] = tensors.pop(official)
    unknown, missing = complaint(tensors, config).splitlines()  # its scale is there, where it has one
    assert unknown == f"unknown name (1): {quoted(renamed)}{'' if meant is None else f' (did you mean {meant}?)'}"
    assert missing.startswith((f"missing (1): {official}", f"scale without its weight (1): '{official[:-6]}scale'"))


def test_a_name_beside_all_that_are_expected_is_not_taken_for_one_of_them(config):
    tensors = listing() | {"layers.1.attn.wq_c.weight": ("BF16", (2,))}
    assert complaint(tensors, config) == "unknown name (1): 'layers.1.attn.wq_c.weight'"


def test_all_faults_are_told_at_once_and_long_lists_are_cut(config):
    tensors = {name: entry for name, entry in listing().items() if ".ffn.experts." not in name}
    tensors["norm.weight"] = ("BF16", (1,))
    lines = complaint(tensors, config).splitlines()
    assert lines[0] == "misshapen (1): 'norm.weight' is [1], want [64]" or lines[1].startswith("misshapen (1)")
    missing = next(line for line in lines if line.startswith("missing"))
    assert missing.startswith("missing (24): layers.0.ffn.experts.0.w1.weight; ")
    assert len(missing.split("; ")) == 21  # twenty names and the mark that there are more
    assert missing.endswith("; ...")


def test_the_checkpoint_is_named_when_it_is_known(config):
    with pytest.raises(CheckpointError, match=r"^/models/x: missing"):
        census({}, config, where="/models/x")


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_vectors_may_be_widened_or_narrowed(config, dtype):
    # save_pretrained narrows mHC, sinks, gate biases and position biases to BF16
    demanded = parameters(config)
    tensors = {
        name: (dtype if name in demanded and demanded[name].kind in ("bf16", "f32") else stored, shape)
        for name, (stored, shape) in listing().items()
    }
    assert census(tensors, config).by_kind["f32"].tensors == sum(p.kind == "f32" for p in demanded.values())


def test_tables_may_be_i32(config):
    tensors = listing() | {"layers.0.ffn.gate.tid2eid": ("I32", (16, 2))}
    assert census(tensors, config).mappings["layers.0.ffn.gate.tid2eid"].form is Form.I32


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ("mtp.0.e_proj.weight", "mtp"),
        ("model.rotary_emb.main_inv_freq", "rotary"),
        ("rotary_emb.inv_freq", "rotary"),
        ("model.layers.1.self_attn.compressor.rotary_emb.compress_original_inv_freq", "rotary"),
        ("model.layers.1.self_attn.compressor.indexer.rotary_emb.compress_inv_freq", "rotary"),
    ],
)
def test_what_is_not_of_the_model_is_ignored_for_a_reason(config, stored, reason):
    counted = census(listing() | {stored: ("F32", (8,))}, config)
    assert list(counted.ignored) == [stored]
    assert counted.ignored[stored].startswith(reason)
    assert counted.by_kind["ignored"].nbytes == 32


@pytest.mark.parametrize(
    "stored",
    [
        "mtpx.0.norm.weight",
        "mtp.norm.weight",
        "mtp.00.e_proj.weight",
        "layers.0.mtp.0.norm.weight",
        "inv_freq",
        # transformers has rotary buffers in the model, in compressors and in their indexers, and nowhere else
        "layers.0.attn.wq_a.rotary_emb.inv_freq",
        "anything.rotary_emb.inv_freq",
        "model.model.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.compressor.rotary_emb.main_inv_freq",  # an SWA layer has no compressor
        "model.layers.2.self_attn.compressor.rotary_emb.main_inv_freq",  # there is no such layer
        "model.rotary_emb.inv_freq.weight",
    ],
)
def test_what_only_looks_ignorable_is_not(config, stored):
    assert f"unknown name (1): '{stored}'" in complaint(listing() | {stored: ("F32", (8,))}, config)


# Draft heads. The published lists above prove what DeepSeek's two heads hold; here, what they do not.


def drafting(*names):
    return listing() | dict.fromkeys(names, ("BF16", (8,)))


PREVIEW = ("mtp.0.e_proj.weight", "mtp.0.e_proj.scale", "mtp.0.enorm.weight", "mtp.0.hc_head_fn", "mtp.0.norm.weight")
DSPARK = ("mtp.0.main_proj.weight", "mtp.1.ffn.gate.bias", "mtp.2.markov_head.markov_w1.weight")
BLOCK = ("attn.wq_a.weight", "ffn.experts.3.w2.scale", "hc_ffn_base", "ffn.gate.bias", "ffn_norm.weight")


@pytest.mark.parametrize(
    ("stored", "head", "stages"),
    [
        (PREVIEW, "preview MTP", 1),
        ((*PREVIEW, "mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"), "preview MTP", 1),  # as Flash-Base may
        (DSPARK, "DSpark", 3),
        ([f"model.{name}" for name in DSPARK], "DSpark", 3),
        ((*DSPARK, *(f"mtp.{stage}.{name}" for stage in range(3) for name in BLOCK)), "DSpark", 3),
        # requantised experts, beside a main model in another form
        ((*PREVIEW, "mtp.0.ffn.experts.0.w1.weight_scale_2", "mtp.0.ffn.experts.0.w1.input_scale"), "preview MTP", 1),
    ],
)
def test_a_drafting_head_is_ignored_as_a_whole(config, stored, head, stages):
    counted = census(drafting(*stored), config)
    assert (counted.mtp_head, counted.mtp_stages) == (head, stages)
    assert counted.ignored.keys() == set(stored)


@pytest.mark.parametrize(
    ("head", "stored"),
    [
        (PREVIEW, "mtp.9.rubbish"),
        (PREVIEW, "mtp.0.rubbish"),
        (PREVIEW, "mtp.0.rubbish.weight"),
        (PREVIEW, "mtp.1.attn.wq_a.weight"),
        (PREVIEW, "mtp.0.main_norm.weight"),
        (PREVIEW, "mtp.0.enorm.scale"),
        (PREVIEW, "mtp.0.attn_norm.scale"),
        (PREVIEW, "mtp.0.attn.compressor.ape"),  # a stage is an SWA layer
        (PREVIEW, "mtp.0.attn.indexer.wq_b.weight"),
        (PREVIEW, "mtp.0.ffn.gate.tid2eid"),  # and chooses its experts by score
        (PREVIEW, "mtp.0.ffn.experts.4.w1.weight"),  # of which the micro model has four
        (PREVIEW, "mtp.0.layers.0.attn.wq_a.weight"),
        (DSPARK, "mtp.3.attn.wq_a.weight"),
        (DSPARK, "mtp.0.norm.weight"),
        (DSPARK, "mtp.1.main_proj.weight"),
        (DSPARK, "mtp.2.enorm.weight"),
    ],
)
def test_what_a_drafting_head_does_not_have_is_unknown(config, head, stored):
    assert complaint(drafting(*head, stored), config) == f"unknown name (1): '{stored}'"


@pytest.mark.parametrize(
    ("stored", "want"),
    [
        ([*DSPARK, "mtp.0.e_proj.weight"], "mtp.0 holds both e_proj and main_proj"),
        (["mtp.9.rubbish"], "mtp.0 holds neither e_proj (preview MTP) nor main_proj (DSpark)"),
        (DSPARK[1:], "mtp.0 holds neither e_proj (preview MTP) nor main_proj (DSpark)"),
        (DSPARK[:2], "mtp stages [0, 1]; DSpark has [0, 1, 2]"),
        ([DSPARK[0], DSPARK[2]], "mtp stages [0, 2]; DSpark has [0, 1, 2]"),
    ],
)
def test_stages_that_are_no_head_are_refused(config, stored, want):
    assert complaint(drafting(*stored), config) == f"draft head (1): {want}"


# The same, bound as a part of the model: nothing of it may lack.


@pytest.fixture(scope="module", params=list(Head))
def whole(request):
    """A config, and the list of a checkpoint with this head."""
    added = {f"dspark_{name}": value for name, value in SMALL.items()} if request.param is Head.DSPARK else {}
    config = micro_config(**added)
    tensors = make_tensors(config, seed=1, head=request.param)
    names = {safetensors_name(tensor.dtype): None for tensor in tensors.values()}
    assert None not in names
    listed = {name: (safetensors_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    return request.param, ModelConfig.from_json(config, "micro"), listed


SMALL = {"block_size": 3, "noise_token_id": 15, "target_layer_ids": [0, 1], "markov_rank": 4}


def safetensors_name(dtype):
    of = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.int8: "I8"}
    return (of | {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0"})[dtype]


def test_a_head_that_is_bound_is_whole(whole):
    head, config, listed = whole
    counted = census(listed, config, head=True)
    assert (counted.head, census(listed, config).head) == (head, None)
    bound = {name for name in counted.mappings if name.startswith("mtp.")}
    assert bound == head_parameters(head, config).keys()
    assert not counted.ignored
    dialect = {f"model.{name}" if name.startswith("mtp.") else name: form for name, form in listed.items()}
    assert census(dialect, config, head=True).mappings.keys() == counted.mappings.keys()


def test_every_tensor_of_a_head_must_be_there_and_as_it_should_be(whole):
    """But where it is not run: then any of it may be missing, and of any shape."""
    _, config, listed = whole

    def told(changed):
        with pytest.raises(CheckpointError) as caught:
            census(changed, config, head=True)
        return str(caught.value)

    for name, (dtype, shape) in listed.items():
        if not name.startswith("mtp.") or re.search(r"experts\.[1-3]\.", name):
            continue
        less = {other: form for other, form in listed.items() if other != name}
        assert name.removesuffix(".scale").removesuffix(".weight") in told(less)
        assert name in told(listed | {name: (dtype, (*shape[:-1], shape[-1] + 1))})
        assert name in told(listed | {name: ("I64" if dtype != "I64" else "F32", shape)})
        assert census(less, config).head is None


def test_copies_of_embedding_and_head_are_not_bound(config):
    listed = {
        name: ("F32", tuple(tensor.shape))
        for name, tensor in make_tensors(micro_config(), seed=1, formats="f32", head=Head.MTP).items()
        if tensor.dtype != torch.int64
    }
    listed |= {name: form for name, form in listing("f32").items() if form[0] == "I64"}
    copies = {"mtp.0.emb.tok_emb.weight": ("F32", (16, 64)), "mtp.0.head.weight": ("F32", (16, 64))}
    assert census(listed | copies, config, head=True).ignored.keys() == copies.keys()


def test_dspark_needs_all_that_config_says_of_it(whole):
    head, config, listed = whole
    if head is Head.MTP:
        assert announced(replace(config, num_mtp_layers=1)) is Head.MTP
        assert announced(config) is None
        return
    assert announced(config) is Head.DSPARK
    with pytest.raises(CheckpointError, match=r"DSpark, and config\.json lacks some of dspark_block_size"):
        census(listed, replace(config, dspark=None), head=True)


@needs_lists
@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("Flash", "preview MTP"),
        ("Flash-0731", "DSpark"),
        ("Flash-Base", "preview MTP"),
        pytest.param("Pro", "preview MTP", marks=pytest.mark.slow),
        pytest.param("Pro-0813", "DSpark", marks=pytest.mark.slow),
    ],
)
def test_published_heads_are_bound_to_the_last_tensor(name, head):
    config, listed = ModelConfig.from_file(CONFIGS / f"DeepSeek-V4-{name}.json"), published(name)
    counted = census(listed, config, head=True)
    assert counted.head == announced(config) == head
    scales = sum(mapping.scale is not None for mapping in counted.mappings.values())
    assert len(counted.mappings) + scales == len(listed) - len(counted.ignored)
    assert all(copied(stored) for stored in counted.ignored)
    experts, scale = ("fp8", "F32") if name == "Flash-Base" else ("fp4", "F8_E8M0")
    assert published_tensors(config, experts, scale, counted.head).keys() == listed.keys() - counted.ignored.keys()


# Names


def test_no_name_has_two_readings():
    for table in (names._TOP, names._IN_LAYER):
        assert all(len(readings) == 1 for readings in table.values())
    assert not any(names._expert(rest) for rest in names._IN_LAYER)
    assert not any(name.startswith(("layers.", "model.", "mtp.")) for name in names._TOP)


@pytest.mark.parametrize("make", [micro_config, tiny_config])
def test_official_names_mean_themselves(make):
    for name in parameters(ModelConfig.from_json(make(), "config")):
        assert translate(name) == (name, Role.WEIGHT)


HALF_RENAMED = {
    "indexer.compressor.wkv": "compressor.indexer.wkv",
    "indexer.compressor.wgate": "compressor.indexer.wgate",
    "indexer.compressor.norm": "compressor.indexer.kv_norm",
    "indexer.compressor.ape": "compressor.indexer.position_bias",
    "indexer.wq_b": "compressor.indexer.wq_b",
    "indexer.weights_proj": "compressor.indexer.weights_proj",
}


def test_half_renamed_indexers_are_read(config):
    tensors = {}
    for name, entry in listing().items():
        known = next((old for old in HALF_RENAMED if f"attn.{old}" in name), "")
        tensors[name.replace(known, HALF_RENAMED.get(known, ""))] = entry
    assert len(tensors.keys() - listing().keys()) == 7  # one of them has a scale
    counted = census(tensors, config)
    assert counted.mappings["layers.1.attn.indexer.wq_b.weight"].scale == "layers.1.attn.compressor.indexer.wq_b.scale"


# transformers is the other implementation here: its rename rules, its saver and its loader, not a copy of them.


@pytest.fixture(scope="module")
def transformers_model(tmp_path_factory):
    """Our official BF16 checkpoint as transformers loads it, with the official tensors."""
    transformers = pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("official")
    write_checkpoint(directory, tiny_config(), seed=3, formats="bf16")
    model = transformers.DeepseekV4ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model, make_tensors(tiny_config(), seed=3, formats="bf16")


def assert_same_weights(directory, official):
    config = ModelConfig.from_file(directory / "config.json")
    checkpoint = Checkpoint.open(directory)
    weights = open_weights(checkpoint, census(checkpoint.shapes(), config))
    for name, parameter in parameters(config).items():
        if parameter.kind == "matrix":
            (value,) = weights.matrix(name)
        else:
            value = weights.table(name) if parameter.kind == "i64" else weights.vector(name)
        assert torch.equal(value.to(official[name].dtype), official[name]), name
    assert weights.unread() == []


def test_what_save_pretrained_writes_is_read(transformers_model, tmp_path):
    model, official = transformers_model
    model.save_pretrained(tmp_path)
    stored = Checkpoint.open(tmp_path).tensors
    assert "model.layers.0.attn.norm.weight" in stored  # the hybrid: kv_norm loses its name
    assert_same_weights(tmp_path, official)


def test_runtime_names_with_stacked_experts_are_read(transformers_model, tmp_path):
    model, official = transformers_model
    model.config.save_pretrained(tmp_path)
    write_tensors(tmp_path, {name: tensor.clone() for name, tensor in model.state_dict().items()}, shards=2)
    assert "model.layers.0.mlp.experts.gate_up_proj" in Checkpoint.open(tmp_path).tensors
    assert_same_weights(tmp_path, official)


def one_by_one(name, tensor):
    """A stack as the tensors of its experts, in runtime names."""
    if not (stack := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)):
        return {name: tensor}
    parts = {"gate_proj": 0, "up_proj": 1} if stack[2] == "gate_up" else {"down_proj": 0}
    return {
        f"{stack[1]}.{expert}.{part}.weight": rows.chunk(len(parts))[place].clone()
        for expert, rows in enumerate(tensor)
        for part, place in parts.items()
    }


def test_runtime_names_with_single_experts_are_read(transformers_model, tmp_path):
    model, official = transformers_model
    model.config.save_pretrained(tmp_path)
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors |= one_by_one(name, tensor.clone())
    save_file(tensors, tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in tensors
    assert_same_weights(tmp_path, official)


def test_a_stack_of_another_shape_and_a_stack_beside_its_experts_are_faults(config):
    tensors = {name: entry for name, entry in listing("bf16").items() if "layers.0.ffn.experts." not in name}
    tensors["layers.0.mlp.experts.down_proj"] = ("BF16", (4, 64, 32))
    tensors["layers.0.mlp.experts.gate_up_proj"] = ("BF16", (4, 64, 64))
    assert census(tensors, config).mappings["layers.0.ffn.experts.3.w3.weight"].part == (3, 32, 64)
    wrong = tensors | {"layers.0.mlp.experts.gate_up_proj": ("BF16", (4, 32, 64))}
    assert (
        complaint(wrong, config)
        == "misshapen (1): 'layers.0.mlp.experts.gate_up_proj' is [4, 32, 64], want [4, 64, 64]"
    )
    twice = tensors | {"layers.0.ffn.experts.2.w2.weight": ("BF16", (64, 32))}
    assert complaint(twice, config).startswith("duplicate (1): 'layers.0.ffn.experts.2.w2.weight' and")
    quantised = tensors | {"layers.0.mlp.experts.down_proj": ("F8_E4M3", (4, 64, 32))}
    assert "wrong type (4): 'layers.0.mlp.experts.down_proj' is F8_E4M3" in complaint(quantised, config)
