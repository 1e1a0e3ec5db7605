"""The two architectures, and which of them a config.json describes."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fathom.model.checkpoint.config_json import read_json
from fathom.model.config import ModelConfig
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.fields import ARCHITECTURES

if TYPE_CHECKING:
    from fathom.model.llama.transformer import LlamaTransformer
    from fathom.model.transformer import Transformer

Config = ModelConfig | LlamaConfig
Model: TypeAlias = "Transformer | LlamaTransformer"  # a config is read before torch is


def config_from_file(path: Path) -> Config:
    """Read a config.json of either architecture, by its model_type.

    Raises
    ------
    ConfigError
        With one line naming the file and the field at fault; `ModelConfig` refuses what is neither.
    """
    obj = read_json(path)
    kind = obj.get("model_type")
    if isinstance(kind, str) and kind in ARCHITECTURES:
        return LlamaConfig.from_json(obj, str(path))
    return ModelConfig.from_json(obj, str(path))
