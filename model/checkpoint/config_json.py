"""config.json of either dialect -> the fields of `ModelConfig`, each one checked."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.config_fields import (
    DEEPSEEK,
    DSPARK,
    FIXED,
    FIXED_DEEPSEEK,
    FIXED_TRANSFORMERS,
    IGNORABLE,
    INTEGERS,
    NUMBERS,
    QUANTIZATION_FIXED,
    QUANTIZATION_IGNORABLE,
    TOKENS,
    TRANSFORMERS,
    V41,
    V41_INTEGERS,
    V41_LISTS,
    V41_TOP,
    V41_VISION_IGNORABLE,
    Dspark,
    Engram,
    LayerKind,
    Vision,
    Yarn,
)
from fathom.model.checkpoint.json_values import (
    MAX_INTEGER,
    Json,
    check_fixed,
    check_keys,
    check_known,
    integer,
    mapping,
    number,
    required,
)
from fathom.model.errors import ConfigError, shown
from fathom.model.files import read_bounded

MODEL_TYPE, MODEL_TYPE_V41 = "deepseek_v4", "deepseek_v41"
MAX_CONFIG_BYTES = 16 << 20

KIND_OF_LAYER_TYPE = {
    "sliding_attention": LayerKind.SWA,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}
IS_HASH_OF_MLP_LAYER_TYPE = {"hash_moe": True, "moe": False}
CSA_RATIO = 4  # the one ratio at which DeepSeek's model.py builds an indexer and overlapping windows

T = TypeVar("T")


def read_json(path: Path) -> Json:
    """Parse a config.json strictly.

    Raises
    ------
    ConfigError
        When there is no such file, or it is not one JSON object.
    """
    data = read_bounded(path, MAX_CONFIG_BYTES, ConfigError)
    try:
        obj = strict_json.parse(data)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(obj, dict):
        raise ConfigError(f"{path}: want a JSON object, found {shown(obj)}")
    return obj


def fields(obj: Json) -> dict[str, Any]:
    """The constructor arguments of `ModelConfig` for a parsed config.json of either dialect.

    Raises
    ------
    ConfigError
        With one line naming the field at fault; the caller puts the file before it.
    """
    if _model_type(obj) == MODEL_TYPE_V41:
        return _v41(obj)
    in_dialect, layout = (_deepseek, DEEPSEEK) if _is_deepseek(obj) else (_transformers, TRANSFORMERS)
    fixed = {*FIXED, *FIXED_DEEPSEEK, *(FIXED_TRANSFORMERS if layout is TRANSFORMERS else ())}
    check_known(obj, {"model_type", *INTEGERS, *NUMBERS, *TOKENS, *fixed, *layout, *DSPARK, *IGNORABLE})
    common = _common(obj, obj)
    check_fixed(obj, FIXED)
    if obj.get("quantization_config") is not None:
        _check_quantization(obj["quantization_config"], QUANTIZATION_FIXED)
    of_drafts = {"num_mtp_layers": _mtp_layers(obj), "dspark": _dspark(obj)}
    return common | of_drafts | {"v41": None} | in_dialect(obj, common)


def _model_type(obj: Json) -> str:
    model_type = required(obj, "model_type")
    if model_type not in (MODEL_TYPE, MODEL_TYPE_V41):
        raise ConfigError(f"model_type is {shown(model_type)}; supported: {MODEL_TYPE!r}, {MODEL_TYPE_V41!r}")
    return str(model_type)


def _common(text: Json, top: Json, prefix: str = "") -> dict[str, Any]:
    """The numbers that all files have, those of tokens at the top."""
    return (
        {name: integer(text, name, prefix) for name in INTEGERS}
        | {name: number(text, name, prefix) for name in NUMBERS}
        | {name: integer(top, name, least=0) for name in TOKENS}
    )


def _v41(obj: Json) -> dict[str, Any]:
    """The fields of a V4.1 file: what is of the text model stands in an object of its own, under V4's names."""
    check_known(obj, {*V41_TOP, *IGNORABLE})
    fixed, prefix = FIXED | FIXED_DEEPSEEK, "text_config."
    text = mapping(required(obj, "text_config"), "text_config")
    own = (*V41_INTEGERS, *V41_LISTS, "candidate_source_layer_id", "engram_pad_token_id")
    layers_are = ("compress_ratios", "rope_scaling")
    check_known(text, {"model_type", *INTEGERS, *NUMBERS, *fixed, *DSPARK, *own, *layers_are, *IGNORABLE}, prefix)
    check_fixed(text, {"model_type": f"{MODEL_TYPE_V41}_text"} | fixed, prefix)
    common = _common(text, obj, prefix)
    _check_quantization(required(obj, "quantization_config"), QUANTIZATION_FIXED | {"weight_block_size": [32, 32]})
    ratios, stages = _integers(text, "compress_ratios", prefix), _mtp_layers(text)
    layers = common["num_hidden_layers"]
    if len(ratios) != layers + stages or any(ratios[layers:]) or {*ratios} - {0, 1, 2}:
        want = f"0, 1 or 2 for each of {layers} layers, and 0 for {stages} mtp stages"
        raise ConfigError(f"{prefix}compress_ratios is {shown(list(ratios))}; want {want}")
    drafts = _dspark(text)
    if drafts is None:
        raise ConfigError(f"{prefix}: want all of {', '.join(DSPARK)}")
    return common | {
        "compress_ratios": ratios[:layers],
        "layer_kinds": tuple(LayerKind.CSA if ratio else LayerKind.SWA for ratio in ratios[:layers]),
        "num_hash_layers": 0,
        "rope_scaling": _yarn(required(text, "rope_scaling", prefix), f"{prefix}rope_scaling"),
        "num_mtp_layers": stages,
        "dspark": drafts,
        "v41": _shared(text, prefix, _vision(obj), integer(obj, "image_token_id", least=0)),
    }


def _shared(text: Json, prefix: str, vision: Vision, image: int) -> V41:
    numbers = {name: integer(text, name, prefix) for name in V41_INTEGERS}
    lists = {name: _integers(text, name, prefix) for name in V41_LISTS}
    return V41(
        kv_sources=lists["kv_source_layer_ids"],
        index_sources=lists["index_source_layer_ids"],
        candidate_source=integer(text, "candidate_source_layer_id", prefix, least=0),
        candidate_blocks=numbers["candidate_topk_blocks"],
        candidate_block_size=numbers["candidate_block_size"],
        engram=Engram(
            layer_ids=lists["engram_layer_ids"],
            rows=lists["engram_num_embeddings"],
            max_ngram=numbers["engram_max_ngram_size"],
            heads=numbers["engram_n_heads"],
            head_dim=numbers["engram_head_dim"],
            first_prime=numbers["engram_vocab_size"],
            pad_token_id=integer(text, "engram_pad_token_id", prefix, least=0),
            compressed_vocab=numbers["engram_compressed_vocab_size"],
        ),
        draft_experts=numbers["dspark_n_routed_experts"],
        draft_experts_per_tok=numbers["dspark_num_experts_per_tok"],
        vision=vision,
        image_token_id=image,
    )


def _vision(obj: Json) -> Vision:
    vision, names = mapping(required(obj, "vision_config"), "vision_config"), Vision.__dataclass_fields__
    check_known(vision, {*names, *V41_VISION_IGNORABLE}, "vision_config.")
    return Vision(**{name: integer(vision, name, "vision_config.") for name in names})


def _is_deepseek(obj: Json) -> bool:
    if "compress_ratios" in obj and "layer_types" in obj:
        raise ConfigError("compress_ratios and layer_types both describe the layers; want one of them")
    return "layer_types" not in obj


def _deepseek(obj: Json, common: Json) -> dict[str, Any]:
    check_fixed(obj, FIXED_DEEPSEEK)
    ratios = _integers(obj, "compress_ratios")
    layers, stages = common["num_hidden_layers"], _mtp_layers(obj)
    if len(ratios) not in (layers, layers + stages):
        want = f"num_hidden_layers {layers}, or {layers + stages} with {stages} mtp stages"
        raise ConfigError(f"compress_ratios has {len(ratios)} entries; want {want}")
    if any(ratios[layers:]):
        raise ConfigError(f"compress_ratios gives mtp stages {shown(list(ratios[layers:]))}; supported: 0")
    return {
        "compress_ratios": ratios[:layers],
        "layer_kinds": tuple(_kind_of_ratio(ratio) for ratio in ratios[:layers]),
        "num_hash_layers": integer(obj, "num_hash_layers", least=0),
        "rope_scaling": _yarn(required(obj, "rope_scaling"), "rope_scaling"),
    }


def _kind_of_ratio(ratio: int) -> LayerKind:
    if ratio == 0:
        return LayerKind.SWA
    if ratio == CSA_RATIO:
        return LayerKind.CSA
    if ratio < CSA_RATIO:
        raise ConfigError(f"compress_ratios holds {ratio}; supported: 0 (SWA), {CSA_RATIO} (CSA), more (HCA)")
    return LayerKind.HCA


def _transformers(obj: Json, common: Json) -> dict[str, Any]:
    carried_over = {name: want for name, want in FIXED_DEEPSEEK.items() if name in obj}
    check_fixed(obj, FIXED_TRANSFORMERS | carried_over)
    kinds = _labels(obj, "layer_types", KIND_OF_LAYER_TYPE, common["num_hidden_layers"])
    hashed = _labels(obj, "mlp_layer_types", IS_HASH_OF_MLP_LAYER_TYPE, common["num_hidden_layers"])
    if sorted(hashed, reverse=True) != list(hashed):
        raise ConfigError("mlp_layer_types puts hash_moe after moe; supported: hash_moe in the first layers only")
    rates = mapping(required(obj, "compress_rates"), "compress_rates")
    check_keys(rates, ("compressed_sparse_attention", "heavily_compressed_attention"), "compress_rates")
    ratio = {LayerKind.SWA: 0} | {KIND_OF_LAYER_TYPE[name]: integer(rates, name, "compress_rates.") for name in rates}
    if 1 in ratio.values():
        raise ConfigError("compress_rates holds 1; want at least 2 tokens for each compressed entry")
    return {
        "compress_ratios": tuple(ratio[kind] for kind in kinds),
        "layer_kinds": kinds,
        "num_hash_layers": sum(hashed),
        "rope_scaling": _rope_parameters(obj, common),
    }


def _rope_parameters(obj: Json, common: Json) -> Yarn | None:
    both = mapping(required(obj, "rope_parameters"), "rope_parameters")
    check_keys(both, ("main", "compress"), "rope_parameters")
    rope, head = common["qk_rope_head_dim"], common["head_dim"]
    _check_rotary_factor(obj, "", rope, head)
    for name, theta in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
        part, prefix = mapping(both[name], f"rope_parameters.{name}"), f"rope_parameters.{name}."
        _check_rotary_factor(part, prefix, rope, head)
        if number(part, "rope_theta", prefix) != common[theta]:
            raise ConfigError(f"{prefix}rope_theta is {shown(part['rope_theta'])}, but {theta} is {common[theta]:g}")
    if (kind := required(both["main"], "rope_type", "rope_parameters.main.")) != "default":
        raise ConfigError(f"rope_parameters.main.rope_type is {shown(kind)}; supported: 'default'")
    check_keys(both["main"], ("rope_type", "rope_theta", "partial_rotary_factor"), "rope_parameters.main")
    own = {key: both["compress"][key] for key in both["compress"] if key not in ("rope_theta", "partial_rotary_factor")}
    if own == {"rope_type": "default"}:
        return None
    return _yarn(own, "rope_parameters.compress")


def _check_rotary_factor(obj: Json, prefix: str, rope: int, head: int) -> None:
    factor = number(obj, "partial_rotary_factor", prefix)
    if round(factor * head) != rope:
        raise ConfigError(f"{prefix}partial_rotary_factor is {factor:g}, but qk_rope_head_dim {rope} of {head} dims")


def _yarn(value: Any, where: str) -> Yarn | None:
    """YaRN's parameters; `type` and `rope_type` are two spellings, and transformers writes both."""
    if value is None:
        return None
    obj = mapping(value, where)
    numbers = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    check_keys(obj, numbers, where, may=("type", "rope_type", "attention_factor"))
    spellings = [obj[key] for key in ("type", "rope_type") if key in obj]
    if not spellings or any(kind != "yarn" for kind in spellings):
        raise ConfigError(f"{where}: type is {shown(spellings[-1] if spellings else None)}; supported: 'yarn'")
    if "attention_factor" in obj and number(obj, "attention_factor", f"{where}.") != 1:
        raise ConfigError(f"{where}.attention_factor is {shown(obj['attention_factor'])}; supported: 1")
    return Yarn(
        factor=number(obj, "factor", f"{where}."),
        original_max_position_embeddings=integer(obj, "original_max_position_embeddings", f"{where}."),
        beta_fast=number(obj, "beta_fast", f"{where}."),
        beta_slow=number(obj, "beta_slow", f"{where}."),
    )


def _mtp_layers(obj: Json) -> int:
    """Stages that the file announces: 0731 and 0813 ship three and still write num_nextn_predict_layers 1."""
    announced = integer(obj, "num_nextn_predict_layers", least=0)
    return len(_integers(obj, "dspark_target_layer_ids")) if "dspark_target_layer_ids" in obj else announced


def _dspark(obj: Json) -> Dspark | None:
    """What the file says of DSpark's stages; None where it does not say all of it: then none can be run."""
    if not all(name in obj for name in DSPARK):
        return None
    return Dspark(
        block_size=integer(obj, "dspark_block_size"),
        noise_token_id=integer(obj, "dspark_noise_token_id", least=0),
        target_layer_ids=_integers(obj, "dspark_target_layer_ids"),
        markov_rank=integer(obj, "dspark_markov_rank"),
    )


def _check_quantization(value: Any, fixed: Mapping[str, object]) -> None:
    obj = mapping(value, "quantization_config")
    check_known(obj, {*fixed, *QUANTIZATION_IGNORABLE}, "quantization_config.")
    required(obj, "quant_method", "quantization_config.")
    check_fixed(obj, {key: fixed[key] for key in obj if key in fixed}, "quantization_config.")


def _integers(obj: Json, name: str, prefix: str = "") -> tuple[int, ...]:
    value = required(obj, name, prefix)
    if not isinstance(value, list):
        raise ConfigError(f"{prefix}{name} is {shown(value)}; want a list of integers")
    for place, item in enumerate(value):
        if type(item) is not int or not 0 <= item <= MAX_INTEGER:
            raise ConfigError(f"{prefix}{name}[{place}] is {shown(item)}; want an integer from 0 to {MAX_INTEGER}")
    return tuple(value)


def _labels(obj: Json, name: str, table: Mapping[str, T], length: int) -> tuple[T, ...]:
    value = required(obj, name)
    if not isinstance(value, list) or len(value) != length:
        raise ConfigError(f"{name} is {shown(value)}; want a list of num_hidden_layers {length} labels")
    for place, item in enumerate(value):
        if not isinstance(item, str) or item not in table:
            raise ConfigError(f"{name}[{place}] is {shown(item)}; supported: {', '.join(table)}")
    return tuple(table[item] for item in value)
