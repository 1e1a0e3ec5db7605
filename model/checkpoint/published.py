"""Which tensors a checkpoint of an architecture holds when DeepSeek publishes it: names, dtypes and shapes.

The census reads what a checkpoint holds, in any of the supported forms; this states the one form that is published,
without a file: for plans of memory and sharding, and for writing such a checkpoint. Draft heads (`mtp.*`) are in it
where they are asked for. The config.json of each release is in the folder `model/published`, as it was published.
"""

from pathlib import Path
from typing import Final, Literal, get_args

from fathom.kernels.formats.groups import FP4_BLOCK, ROW_BLOCK
from fathom.model.checkpoint.mtp import Head, head_parameters
from fathom.model.checkpoint.names import Kind, Parameter, parameters, vision_tensors
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError

Experts = Literal["fp4", "fp8"]
EXPERT_DTYPES: Final[tuple[Experts, ...]] = get_args(Experts)
ScaleType = Literal["F8_E8M0", "F32"]

CONFIGS: Final = Path(__file__).resolve().parents[1] / "published"

_PLAIN: Final[dict[Kind, str]] = {"bf16": "BF16", "f32": "F32", "i64": "I64"}


def published_configs() -> dict[str, Path]:
    """The config.json of every release, by its name in lower case, as deepseek-v4-flash."""
    return {path.stem.lower(): path for path in sorted(CONFIGS.glob("*.json"))}


def released_scale(experts: Experts) -> ScaleType:
    """How the releases with such experts store block scales: V4-Flash-Base, the one with FP8 experts, in F32."""
    return "F8_E8M0" if experts == "fp4" else "F32"


def published_tensors(
    config: ModelConfig, experts: Experts, scale: ScaleType = "F8_E8M0", head: Head | None = None
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the published checkpoint of an architecture, without or with its draft head.

    Linears are FP8 with a scale for each 128 x 128 block (V4.1: 32 x 32), routed experts are that too or FP4 with a
    scale for each 32 columns of a row, V4.1's n-gram tables FP8 with such a scale; embedding, head, norms, compressors,
    gates and `weights_proj` are BF16; sinks, `ape`, mHC and the gates' biases F32; `tid2eid` I64.

    Parameters
    ----------
    config : ModelConfig
        The architecture.
    experts : "fp4" | "fp8"
        What the routed experts are: FP4 in V4-Flash, V4-Pro and their successors, FP8 in the Base releases.
        `ModelConfig` does not say it, because the files that do are wrong at times.
    scale : "F8_E8M0" | "F32"
        Of all block scales. V4-Flash-Base writes powers of two as F32; FP4 has E8M0 only.
    head : Head | None
        A draft head that belongs to it.

    Returns
    -------
    dict[str, tuple[str, tuple[int, ...]]]
        Stored name -> dtype as safetensors writes it, and shape as stored: two FP4 values share a byte, so an expert
        [out, in] is I8 [out, in / 2]. In the order of `model.checkpoint.names.parameters`, a scale after its weight.

    Raises
    ------
    ConfigError
        When `hidden_size` or `moe_intermediate_size` is no multiple of 32 and the experts are FP4.
    """
    assert experts == "fp8" or scale == "F8_E8M0", f"{experts} experts with {scale} scales: no release has them"
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    added = {} if head is None else head_parameters(head, config)
    for name, parameter in (parameters(config) | added).items():
        fp4 = experts == "fp4" and ".ffn.experts." in name
        stored |= _stored(name, parameter, "fp4" if fp4 else "fp8", scale, config.fp8_block)
    return stored | {name: ("BF16", shape) for name, shape in vision_tensors(config).items()}


def _stored(
    name: str, parameter: Parameter, form: Experts, scale: ScaleType, block: int
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What one parameter is stored as, a matrix in FP8 with a scale for each square block."""
    if parameter.kind not in {"matrix", "rows"}:
        return {name: (_PLAIN[parameter.kind], parameter.shape)}
    rows, columns = parameter.shape
    of_scale = f"{name.removesuffix('.weight')}.scale"
    if parameter.kind == "rows":
        return {name: ("F8_E4M3", (rows, columns)), of_scale: ("F8_E8M0", (rows, columns // ROW_BLOCK))}
    if form == "fp8":
        blocks = (-(-rows // block), -(-columns // block))
        return {name: ("F8_E4M3", (rows, columns)), of_scale: (scale, blocks)}
    if columns % FP4_BLOCK != 0:
        raise ConfigError(f"{name} has {columns} columns: FP4 wants a multiple of {FP4_BLOCK}")
    return {name: ("I8", (rows, columns // 2)), of_scale: ("F8_E8M0", (rows, columns // FP4_BLOCK))}
