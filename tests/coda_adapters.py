"""The package `coda-gqa-l`'s Llama adapter in a transformers model: an oracle for adapters read by this runtime."""

import pytest
import torch
from coda_gqa_l import LlamaCoDAAdapter
from safetensors.torch import save_file

from tests.llama_model import oracle

SIZES = {"window": 12, "num_landmarks_exact": 6, "num_landmarks_summary": 5}
BLOCK = 8  # no more evicted at once than the exact bank's candidates


def adapted(directory, *, bounded, norm="identity", seed=3, head_dim=8):
    """Save a random Llama model; return it with every attention replaced by the package's, its parameters random."""
    model = oracle(head_dim=head_dim, hidden_size=4 * head_dim, num_hidden_layers=2)
    model.save_pretrained(directory)
    more = SIZES | {"block_size": BLOCK} if bounded else {}
    with pytest.warns(UserWarning, match="settings differ"):  # the adapter's own pairing and norm, which are Llama's
        adapters = LlamaCoDAAdapter.swap_llama_layers(model, bounded=bounded, head_norm_mode=norm, **more)
    generator = torch.Generator().manual_seed(seed)
    for adapter in adapters:
        for name, parameter in adapter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "proj.weight" in name:
                parameter.data += 0.3 * noise / parameter.shape[-1] ** 0.5  # the projections were trained with the rest
            else:
                parameter.data = noise
    return model.eval(), adapters


def write_pt(path, adapters):
    """As published: a dict of state dicts."""
    torch.save({f"layer_{i}": adapter.state_dict() for i, adapter in enumerate(adapters)}, path)


def write_safetensors(path, adapters):
    """The same tensors with their names joined."""
    flat = {
        f"layer_{i}.{name}": part for i, adapter in enumerate(adapters) for name, part in adapter.state_dict().items()
    }
    save_file(flat, path)
