"""Checkpoint tensor name <-> parameter, in every dialect: where name strings stand, but those that `mtp` adds.

A parameter is called by DeepSeek's official name. Files spell it in one of these ways:

- official: `layers.3.attn.indexer.wq_b.weight`, scales beside it as `.scale`
- transformers at run time: `model.layers.3.self_attn.compressor.indexer.q_b_proj.weight`, scales as
  `.weight_scale_inv`, experts one by one or stacked into `mlp.experts.gate_up_proj` and `.down_proj`
- the hybrid that transformers' `save_pretrained` writes: official leaves under `model.layers.N`, except that
  the attention's `kv_norm` becomes `norm`
- half renamed: `attn.compressor.indexer.wkv.weight`

Dialects may mix within one checkpoint, and within one name: each tensor is read by its own name, and spellings of a
module and of its leaves combine freely, because each combination still means one thing; a test shows that no name has
two readings, and the census that no parameter is filled twice. Nothing is renamed by pattern: a name that is not in the
tables is unknown.
"""

import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from itertools import product
from typing import Final, Literal, NamedTuple

from fathom.model.config import LayerKind, ModelConfig

Kind = Literal["matrix", "bf16", "f32", "i64", "rows"]


class Parameter(NamedTuple):
    """What the architecture demands of one parameter."""

    shape: tuple[int, ...]
    kind: Kind  # "matrix": a linear [out, in] in any form; "bf16", "f32": BF16 or F32; "i64": a table; "rows": FP8


class Role(StrEnum):
    """What a stored tensor is to its parameter."""

    WEIGHT = "weight"
    SCALE = "scale"  # block scales of FP8 and FP4
    NVFP4_SCALE = "weight_scale"  # E4M3 scales of 16 columns
    NVFP4_GLOBAL_SCALE = "weight_scale_2"
    NVFP4_INPUT_SCALE = "input_scale"
    STACKED_GATE_UP = "stacked gate and up"  # [experts, 2 * intermediate, hidden]: w1's rows, then w3's
    STACKED_DOWN = "stacked down"  # [experts, hidden, intermediate]


class Meaning(NamedTuple):
    """One reading of a stored name."""

    parameter: str  # official name; for the two stacked roles, of the module `layers.N.ffn.experts`
    role: Role


INPUT_SCALE_REASON: Final = "NVFP4 input_scale: for 4-bit activations, which are not used"

_SUFFIXES: Final = {
    ".weight": Role.WEIGHT,
    ".scale": Role.SCALE,
    ".weight_scale_inv": Role.SCALE,
    ".weight_scale": Role.NVFP4_SCALE,
    ".weight_scale_2": Role.NVFP4_GLOBAL_SCALE,
    ".input_scale": Role.NVFP4_INPUT_SCALE,
}

# official module -> spellings. Those in the first three tables are followed by a suffix, the others stand alone.
_TOP_MODULES: Final = {
    "embed": ("embed", "embed_tokens"),
    "head": ("head", "lm_head"),
    "norm": ("norm",),
}
_COMPRESSOR: Final = {"wkv": ("wkv", "kv_proj"), "wgate": ("wgate", "gate_proj"), "norm": ("norm", "kv_norm")}
_INDEXER_COMPRESSOR: Final = ("indexer.compressor", "compressor.indexer")
_INDEXER: Final = ("indexer", "compressor.indexer")
_ATTENTION_MODULES: Final = {
    "wq_a": ("wq_a", "q_a_proj"),
    "q_norm": ("q_norm", "q_a_norm"),
    "wq_b": ("wq_b", "q_b_proj"),
    "wkv": ("wkv", "kv_proj"),
    "kv_norm": ("kv_norm", "norm"),
    "wo_a": ("wo_a", "o_a_proj"),
    "wo_b": ("wo_b", "o_b_proj"),
    **{f"compressor.{leaf}": tuple(f"compressor.{name}" for name in names) for leaf, names in _COMPRESSOR.items()},
    "indexer.wq_b": tuple(f"{a}.{b}" for a, b in product(_INDEXER, ("wq_b", "q_b_proj"))),
    "indexer.wk": ("indexer.wk",),
    "indexer.k_norm": ("indexer.k_norm",),
    "indexer.weights_proj": tuple(f"{a}.{b}" for a, b in product(_INDEXER, ("weights_proj", "scorer.weights_proj"))),
    **{
        f"indexer.compressor.{leaf}": tuple(f"{a}.{b}" for a, b in product(_INDEXER_COMPRESSOR, names))
        for leaf, names in _COMPRESSOR.items()
    },
}
_FEED_FORWARD: Final = {"w1": ("w1", "gate_proj"), "w2": ("w2", "down_proj"), "w3": ("w3", "up_proj")}
_LAYER_MODULES: Final = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "ffn_norm": ("ffn_norm", "post_attention_layernorm"),
    **{
        f"attn.{leaf}": tuple(f"{a}.{b}" for a, b in product(("attn", "self_attn"), names))
        for leaf, names in _ATTENTION_MODULES.items()
    },
    "engram.embed": ("engram.embed",),
    "engram.wkv": ("engram.wkv",),
    "ffn.gate": ("ffn.gate", "mlp.gate"),
    **{
        f"ffn.shared_experts.{leaf}": tuple(f"{a}.shared_experts.{b}" for a, b in product(("ffn", "mlp"), names))
        for leaf, names in _FEED_FORWARD.items()
    },
}
_TOP_LEAVES: Final = {f"hc_head_{leaf}": (f"hc_head_{leaf}", f"hc_head.hc_{leaf}") for leaf in ("fn", "base", "scale")}
_APE: Final = ("ape", "position_bias")
_LAYER_LEAVES: Final = {
    **{
        f"hc_{part}_{leaf}": (f"hc_{part}_{leaf}", f"{part}_hc.{leaf}")
        for part, leaf in product(("attn", "ffn"), ("fn", "base", "scale"))
    },
    "attn.attn_sink": tuple(f"{a}.{b}" for a, b in product(("attn", "self_attn"), ("attn_sink", "sinks"))),
    "attn.compressor.ape": tuple(f"{a}.compressor.{b}" for a, b in product(("attn", "self_attn"), _APE)),
    "attn.indexer.compressor.ape": tuple(
        f"{a}.{b}.{c}" for a, b, c in product(("attn", "self_attn"), _INDEXER_COMPRESSOR, _APE)
    ),
    "ffn.gate.bias": tuple(f"{a}.gate.{b}" for a, b in product(("ffn", "mlp"), ("bias", "e_score_correction_bias"))),
    "ffn.gate.bias_vl": ("ffn.gate.bias_vl",),
    "ffn.gate.tid2eid": ("ffn.gate.tid2eid", "mlp.gate.tid2eid"),
    "engram.q_weight": ("engram.q_weight",),
    "engram.k_weight": ("engram.k_weight",),
}
_STACKS: Final = {"gate_up_proj": Role.STACKED_GATE_UP, "down_proj": Role.STACKED_DOWN}

_LAYER = re.compile(r"(?:model\.)?layers\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
_STAGE = re.compile(r"mtp\.(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
_SOME_LAYER = re.compile(r"(?:^|\.)(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
_SOME_EXPERT = re.compile(r"\.(0|[1-9][0-9]{0,5})\.")
_EXPERT = re.compile(r"(?:ffn|mlp)\.experts\.(0|[1-9][0-9]{0,5})\.(\w+)(\.\w+)", re.ASCII)
_STACK = re.compile(r"(?:ffn|mlp)\.experts\.(\w+)", re.ASCII)
# transformers' modules that hold a DeepseekV4RotaryEmbedding: the model, each compressor, each indexer in one.
_ROTARY_BUFFER = re.compile(
    r"(?:model\.)?(?:layers\.(?P<layer>0|[1-9][0-9]{0,5})\.self_attn\.compressor\.(?P<indexer>indexer\.)?)?"
    r"rotary_emb\.\w*inv_freq",
    re.ASCII,
)


def _spellings(
    modules: Mapping[str, tuple[str, ...]], leaves: Mapping[str, tuple[str, ...]]
) -> dict[str, list[Meaning]]:
    """Every name that the tables allow -> its readings; a test shows that each list holds one."""
    readings: dict[str, list[Meaning]] = {}
    for (official, names), (suffix, role) in product(modules.items(), _SUFFIXES.items()):
        for name in names:
            readings.setdefault(name + suffix, []).append(Meaning(f"{official}.weight", role))
    for official, names in leaves.items():
        for name in names:
            readings.setdefault(name, []).append(Meaning(official, Role.WEIGHT))
    return readings


_TOP: Final = _spellings(_TOP_MODULES, _TOP_LEAVES)
_IN_LAYER: Final = _spellings(_LAYER_MODULES, _LAYER_LEAVES)
_OFFICIAL_FEED_FORWARD: Final = {name: leaf for leaf, names in _FEED_FORWARD.items() for name in names}


def translate(stored: str) -> Meaning | None:
    """What a stored name means, or None for a name that is in no dialect.

    Parameters
    ----------
    stored : str
        The name as the file writes it. Whether the config has such a parameter is not asked here.
    """
    in_layer = _LAYER.fullmatch(stored)
    if in_layer is None:
        return _only(_TOP, stored.removeprefix("model."))
    layer, rest = in_layer.groups()
    meaning = _expert(rest) or _only(_IN_LAYER, rest)
    return meaning and Meaning(f"layers.{layer}.{meaning.parameter}", meaning.role)


def spellings_near(stored: str) -> Iterator[tuple[str, Meaning]]:
    """Names that an unknown one might be meant for, and their meanings: all of its layer, or all that are of none."""
    numbered = _SOME_LAYER.search(stored)
    if numbered is None:
        prefix = "model." if stored.startswith("model.") else ""
        yield from ((f"{prefix}{name}", readings[0]) for name, readings in _TOP.items())
        return
    layer, rest = numbered.groups()
    prefix = f"model.layers.{layer}." if stored.startswith("model.") else f"layers.{layer}."
    expert = _SOME_EXPERT.search(rest)
    known = list(_IN_LAYER)
    if expert is not None:
        leaves = [f"{leaf}{suffix}" for leaf in _OFFICIAL_FEED_FORWARD for suffix in _SUFFIXES]
        known = [f"{part}.experts.{expert[1]}.{leaf}" for part in ("ffn", "mlp") for leaf in leaves]
    for name in known:
        if (meaning := translate(f"{prefix}{name}")) is not None:
            yield f"{prefix}{name}", meaning


def _only(readings: dict[str, list[Meaning]], name: str) -> Meaning | None:
    return readings[name][0] if name in readings else None


def _expert(rest: str) -> Meaning | None:
    """`experts.7.w1.weight` and its spellings, or a whole layer's stack `experts.gate_up_proj`."""
    if expert := _EXPERT.fullmatch(rest):
        number, leaf, suffix = expert.groups()
        if leaf in _OFFICIAL_FEED_FORWARD and suffix in _SUFFIXES:
            return Meaning(f"ffn.experts.{number}.{_OFFICIAL_FEED_FORWARD[leaf]}.weight", _SUFFIXES[suffix])
    elif (stack := _STACK.fullmatch(rest)) and stack[1] in _STACKS:
        return Meaning("ffn.experts", _STACKS[stack[1]])
    return None


def ignored(stored: str, config: ModelConfig) -> str | None:
    """The reason why a stored tensor is not part of the model, or None.

    `mtp.*` is the matter of `model.checkpoint.mtp`. `input_scale` is not listed here: it is ignored only beside the
    matrix it belongs to (`Role`).
    """
    buffer = _ROTARY_BUFFER.fullmatch(stored)
    if buffer is None or (buffer["layer"] and not _has_rotary(int(buffer["layer"]), buffer["indexer"], config)):
        return None
    return "rotary buffer: recomputed from the config"


def _has_rotary(layer: int, indexer: str | None, config: ModelConfig) -> bool:
    """Whether a layer has the compressor, or the indexer, that a rotary buffer belongs to."""
    kinds = (LayerKind.CSA,) if indexer else (LayerKind.CSA, LayerKind.HCA)
    return layer < config.num_hidden_layers and config.layer_kind(layer) in kinds


def expert_name(prefix: str, expert: int, part: str) -> str:
    """Official name of one routed expert's matrix of a layer (`ModelConfig.prefix`): w1 = gate, w3 = up, w2 = down."""
    return f"{prefix}.ffn.experts.{expert}.{part}.weight"


class Axis(StrEnum):
    """What the rows of a parameter belong to, by which they can be sharded."""

    HEADS = "attention heads"
    GROUPS = "output groups"
    OUTPUT = "columns of both sublayers' outputs"
    VOCABULARY = "vocabulary"
    KV_HEADS = "KV heads"
    INNER = "columns of SwiGLU"
    NONE = "none"  # read whole by every token


_AXES: Final = {
    "embed.weight": Axis.VOCABULARY,
    "head.weight": Axis.VOCABULARY,
    "attn.wq_b.weight": Axis.HEADS,
    "attn.attn_sink": Axis.HEADS,
    "attn.wo_a.weight": Axis.GROUPS,
    "attn.wo_b.weight": Axis.OUTPUT,
    "ffn.shared_experts.w1.weight": Axis.INNER,
    "ffn.shared_experts.w3.weight": Axis.INNER,
    "ffn.shared_experts.w2.weight": Axis.OUTPUT,
    # of the Llama family, see `model.llama.census`
    "model.embed_tokens.weight": Axis.VOCABULARY,
    "lm_head.weight": Axis.VOCABULARY,
    "self_attn.q_proj.weight": Axis.HEADS,
    "self_attn.k_proj.weight": Axis.KV_HEADS,
    "self_attn.v_proj.weight": Axis.KV_HEADS,
    "self_attn.o_proj.weight": Axis.OUTPUT,
    "mlp.gate_proj.weight": Axis.INNER,
    "mlp.up_proj.weight": Axis.INNER,
    "mlp.down_proj.weight": Axis.OUTPUT,
}
_OF_EXPERTS: Final = {"w1": Axis.INNER, "w3": Axis.INNER, "w2": Axis.OUTPUT}


def layer_and_rest(name: str) -> tuple[int, str] | None:
    """Layer and the name within it of a parameter, or None for one of no layer."""
    found = _LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def axis(name: str) -> Axis:
    """What the rows of a parameter (official name) belong to."""
    in_layer = _LAYER.fullmatch(name) or _STAGE.fullmatch(name)
    rest = in_layer[2] if in_layer else name
    if expert := _EXPERT.fullmatch(rest):
        return _OF_EXPERTS[expert[2]]
    return _AXES.get(rest, Axis.NONE)


def expert_number(name: str) -> int | None:
    """Which routed expert's a parameter (official name) is; None: no expert's."""
    in_layer = _LAYER.fullmatch(name) or _STAGE.fullmatch(name)
    found = _EXPERT.fullmatch(in_layer[2]) if in_layer else None
    return int(found[1]) if found else None


def of_shared_expert(name: str) -> bool:
    """Whether a parameter (official name) is a shared expert's."""
    return ".ffn.shared_experts." in name


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Every parameter that the architecture demands, by official name (scales are not parameters).

    Parameters
    ----------
    config : ModelConfig
        The architecture.

    Returns
    -------
    dict[str, Parameter]
        In the order embed, layers, head; about 70,000 entries for V4-Pro.
    """
    V, D = config.vocab_size, config.hidden_size
    demanded = {"embed.weight": Parameter((V, D), "bf16")}
    for layer in range(config.num_hidden_layers):
        demanded |= of_layer(config, layer)
    demanded |= {"norm.weight": Parameter((D,), "bf16"), "head.weight": Parameter((V, D), "bf16")}
    return demanded if config.v41 else demanded | hyper_head(config)


def hyper_head(config: ModelConfig, prefix: str = "") -> dict[str, Parameter]:
    """What reads the streams behind the last layer of V4; in V4.1 the last experts' `pre` does."""
    D, hc = config.hidden_size, config.hc_mult
    shapes = {"fn": (hc, hc * D), "base": (hc,), "scale": (1,)}
    return {f"{prefix}hc_head_{leaf}": Parameter(shape, "f32") for leaf, shape in shapes.items()}


def vision_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """V4.1's image tower by stored name, all BF16: nothing of it is run, and all of it is accounted for."""
    if config.v41 is None:
        return {}
    V, D = config.v41.vision, config.hidden_size
    v, patch, joined = V.hidden_size, 3 * V.patch_size**2, V.downsample_ratio**2 * V.hidden_size
    block = {
        "norm1.weight": (v,),
        "norm2.weight": (v,),
        "attn.wqkv.weight": (3 * v, v),
        "attn.wqkv.bias": (3 * v,),
        "attn.wo.weight": (v, v),
        "attn.wo.bias": (v,),
        "mlp.w1.weight": (2 * V.intermediate_size, v),
        "mlp.w2.weight": (v, V.intermediate_size),
    }
    return {
        **{f"image_{place}": (D,) for place in ("start", "end", "newline")},
        "vision.patch_embed.proj.weight": (v, patch),
        "vision.patch_embed.proj.bias": (v,),
        "vision.norm.weight": (v,),
        **{f"vision.blocks.{n}.{name}": shape for n in range(V.num_hidden_layers) for name, shape in block.items()},
        "aligner.w1.weight": (D, joined),
        "aligner.w1.bias": (D,),
        "aligner.w2.weight": (D, D),
        "aligner.w2.bias": (D,),
    }


def of_layer(config: ModelConfig, layer: int) -> dict[str, Parameter]:
    """The parameters of a layer, or of a stage's block (`ModelConfig.prefix`), by official name."""
    return {f"{config.prefix(layer)}.{name}": parameter for name, parameter in _layer(config, layer)}


def _layer(config: ModelConfig, layer: int) -> Iterator[tuple[str, Parameter]]:
    D, hc = config.hidden_size, config.hc_mult
    for part in ("attn", "ffn"):
        mixes = hc * hc + 2 * hc  # the combination matrix, then the pre and post weights of each stream
        yield f"hc_{part}_fn", Parameter((mixes, hc * D), "f32")
        yield f"hc_{part}_base", Parameter((mixes,), "f32")
        yield f"hc_{part}_scale", Parameter((3,), "f32")
        yield f"{part}_norm.weight", Parameter((D,), "bf16")
    for name, parameter in _attention(config, layer):
        yield f"attn.{name}", parameter
    for name, parameter in _engram(config, layer):
        yield f"engram.{name}", parameter
    for name, parameter in _feed_forward(config, layer):
        yield f"ffn.{name}", parameter


def _attention(config: ModelConfig, layer: int) -> Iterator[tuple[str, Parameter]]:
    D, h, d = config.hidden_size, config.num_attention_heads, config.head_dim
    groups, q_rank, o_rank = config.o_groups, config.q_lora_rank, config.o_lora_rank
    yield "attn_sink", Parameter((h,), "f32")
    yield "wq_a.weight", Parameter((q_rank, D), "matrix")
    yield "q_norm.weight", Parameter((q_rank,), "bf16")
    yield "wq_b.weight", Parameter((h * d, q_rank), "matrix")
    yield "wkv.weight", Parameter((d, D), "matrix")
    yield "kv_norm.weight", Parameter((d,), "bf16")
    yield "wo_a.weight", Parameter((groups * o_rank, h * d // groups), "matrix")
    yield "wo_b.weight", Parameter((D, groups * o_rank), "matrix")
    if config.v41 is not None:
        yield from _shared(config, layer)
        return
    kind, ratio = config.layer_kind(layer), config.ratio(layer)
    if kind is not LayerKind.SWA:
        # CSA pools overlapping windows: the widths hold two sets of projections.
        yield from _compressor("compressor", ratio, d, 2 if kind is LayerKind.CSA else 1, D)
    if kind is LayerKind.CSA:
        yield "indexer.wq_b.weight", Parameter((config.index_n_heads * config.index_head_dim, q_rank), "matrix")
        yield "indexer.weights_proj.weight", Parameter((config.index_n_heads, D), "bf16")
        yield from _compressor("indexer.compressor", ratio, config.index_head_dim, 2, D)


def _shared(config: ModelConfig, layer: int) -> Iterator[tuple[str, Parameter]]:
    """V4.1's compressor of layers that make entries, and indexer of those that select."""
    D, d, width = config.hidden_size, config.head_dim, config.index_head_dim
    if config.makes_entries(layer):
        yield "compressor.wkv.weight", Parameter((d, D), "bf16")
        yield "compressor.norm.weight", Parameter((d,), "bf16")
        yield "indexer.wk.weight", Parameter((width, d), "bf16")
        yield "indexer.k_norm.weight", Parameter((width,), "bf16")
        if config.ratio(layer) > 1:
            yield "compressor.wgate.weight", Parameter((d, D), "bf16")
    if config.selects(layer):
        yield "indexer.wq_b.weight", Parameter((config.index_n_heads * width, config.q_lora_rank), "matrix")
        yield "indexer.weights_proj.weight", Parameter((config.index_n_heads, D), "bf16")


def _engram(config: ModelConfig, layer: int) -> Iterator[tuple[str, Parameter]]:
    if config.v41 is None or layer not in config.v41.engram.layer_ids:
        return
    tables, D, s = config.v41.engram, config.hidden_size, config.hc_mult
    yield "embed.weight", Parameter((tables.rows[tables.layer_ids.index(layer)], tables.head_dim), "rows")
    yield "wkv.weight", Parameter(((s + 1) * D, tables.columns * tables.head_dim), "matrix")
    yield "q_weight", Parameter((s, D), "bf16")
    yield "k_weight", Parameter((s, D), "bf16")


def _compressor(name: str, ratio: int, width: int, overlap: int, D: int) -> Iterator[tuple[str, Parameter]]:
    yield f"{name}.ape", Parameter((ratio, overlap * width), "f32")
    yield f"{name}.wkv.weight", Parameter((overlap * width, D), "bf16")
    yield f"{name}.wgate.weight", Parameter((overlap * width, D), "bf16")
    yield f"{name}.norm.weight", Parameter((width,), "bf16")


def _feed_forward(config: ModelConfig, layer: int) -> Iterator[tuple[str, Parameter]]:
    D, I = config.hidden_size, config.moe_intermediate_size
    experts, _ = config.experts(layer)
    yield "gate.weight", Parameter((experts, D), "bf16")
    if config.is_hash(layer):
        yield "gate.tid2eid", Parameter((config.vocab_size, config.num_experts_per_tok), "i64")
    else:
        yield "gate.bias", Parameter((experts,), "f32")
    if config.v41 is not None:
        yield "gate.bias_vl", Parameter((experts,), "f32")
    modules = [("shared_experts", I * config.n_shared_experts), *((f"experts.{e}", I) for e in range(experts))]
    for module, width in modules:
        yield f"{module}.w1.weight", Parameter((width, D), "matrix")
        yield f"{module}.w2.weight", Parameter((D, width), "matrix")
        yield f"{module}.w3.weight", Parameter((width, D), "matrix")
