"""Random transformers models of the Llama family as an oracle, saved by transformers and read by this runtime."""

import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from fathom.kernels.ops import CPU, Ops
from fathom.model.llama.transformer import LlamaTransformer
from fathom.runtime.load import LoadedLlama, load_any
from fathom.runtime.options import RunOptions

# Short contexts, so that test prompts of some 50 tokens stand on both sides of the original one, and so few frequencies
# that each of the three ranges (kept, interpolated, slowed) holds some.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}


def oracle(
    kind: str = "llama", *, rope: dict[str, Any] | None = None, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A tiny model with every parameter random and logits of unit scale, in fp32."""
    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "attn_implementation": "eager",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | (rope or {}),
    }
    if kind == "mistral":
        fields["sliding_window"] = None
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}[kind]
    made = model(config(**fields | changes)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed" in name and not made.config.tie_word_embeddings:
                parameter.copy_(noise)
            else:  # so that logits of attention have unit scale too
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
    return made


def load_ours(directory: Path, ops: Ops = CPU, dtype: str = "fp32") -> LoadedLlama:
    """The saved model in this runtime."""
    loaded = load_any(directory, RunOptions("plain", dtype), ops)
    assert isinstance(loaded.model, LlamaTransformer)
    return loaded


@torch.no_grad()
def their_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [t, vocab] of one uncached forward pass."""
    return model(tokens[None], use_cache=False).logits[0]


def write_tokenizer(directory: Path, begin: str = "<|begin|>") -> None:
    """A byte-level tokenizer whose own template puts BOS, called `begin`, before a text, as Llama 3's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens([begin, "<|end|>"])  # 256 and 257
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A $B", [(begin, 256)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.save(str(directory / "tokenizer.json"))
