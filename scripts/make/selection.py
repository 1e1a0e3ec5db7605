"""Some layers of an architecture as an architecture of their own: the config.json of a shortened checkpoint."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fathom.model.checkpoint.published import Experts, ScaleType
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, shown


def chosen_layers(text: str, config: ModelConfig) -> list[int]:
    """The layers that a `--layers` flag names.

    Parameters
    ----------
    text : str
        A count, the first so many layers; or a list with commas, exactly these: `2,3`, or `3,` for one.
    config : ModelConfig
        The whole architecture.

    Raises
    ------
    ConfigError
        With one line naming the flag, when it is neither, or names a layer that there is not, or not in rising order:
        layers that are routed by token id come first in a config.json, so they must be chosen first.
    """
    parts = text.removesuffix(",").split(",")
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"--layers {shown(text)}: want a number of layers, or layers with commas between: 2,3")
    numbers, layers = [int(part[:9]) for part in parts], config.num_hidden_layers
    if "," not in text:
        if not 1 <= numbers[0] <= layers:
            raise ConfigError(f"--layers {text}: the architecture has {layers}, want 1 to {layers}")
        return list(range(numbers[0]))
    if max(numbers) >= layers:
        raise ConfigError(f"--layers {text}: the architecture has no layer {max(numbers)}, only 0 to {layers - 1}")
    for before, after in pairwise(numbers):
        if after <= before:
            hashed = config.is_hash(after) and not config.is_hash(before)
            why = "layers routed by token id come first" if hashed else "want each once, in rising order"
            raise ConfigError(f"--layers {text}: {after} after {before}: {why}")
    return numbers


def shortened(obj: Mapping[str, Any], config: ModelConfig, layers: Sequence[int]) -> dict[str, Any]:
    """The config.json of a checkpoint with exactly these layers, renumbered from 0, and without a draft head.

    Parameters
    ----------
    obj : Mapping[str, Any]
        The parsed config.json of the whole architecture, in DeepSeek's dialect.
    config : ModelConfig
        What it says.
    layers : Sequence[int]
        From `chosen_layers`.

    Raises
    ------
    ConfigError
        When the file is in transformers' dialect: the official format has DeepSeek's beside it.
    """
    if "compress_ratios" not in obj:
        raise ConfigError("compress_ratios: missing; want a config.json in DeepSeek's dialect, not transformers'")
    kept = {name: value for name, value in obj.items() if not name.startswith("dspark_")}  # they describe the head
    return kept | {
        "num_hidden_layers": len(layers),
        "compress_ratios": [config.ratio(layer) for layer in layers],
        "num_hash_layers": sum(config.is_hash(layer) for layer in layers),
        "num_nextn_predict_layers": 0,
    }


def stored_forms(obj: Mapping[str, Any]) -> tuple[Experts, ScaleType]:
    """The form of experts and of block scales that the release of a config.json has.

    Raises
    ------
    ConfigError
        When `expert_dtype` does not say it; DeepSeek's first uploads had no such field.
    """
    match obj.get("expert_dtype"):
        case "fp4":
            return "fp4", "F8_E8M0"
        case "fp8":
            return "fp8", "F32"  # as in the Base release
    raise ConfigError(f"expert_dtype is {shown(obj.get('expert_dtype'))}; want 'fp4' or 'fp8' to know what to write")
