"""The checksum of a file of tensors that the runtime writes: of all of its content and what it says of itself."""

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, object]) -> str:
    """SHA-256 as 64 hex digits; names, dtypes and shapes are part of it.

    Each tensor is asked for once and let go before the next one: a mapping that reads them needs room for one.
    """
    found = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        part = tensors[name]
        found.update(f"{name} {part.dtype} {list(part.shape)}\n".encode())
        found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        del part  # before the next is read
    return found.hexdigest()
