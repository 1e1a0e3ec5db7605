"""What a cache holds, counted without asking it: the memory of every tensor that a run of it has written to.

Constants (signs, frequencies, rates) do not change and are not counted; every buffer does, once enough has come.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

INTEGER = 8  # bytes of a number that the host keeps and a saved state makes a tensor of
Snapshot = dict[int | str, bytes]  # by place in memory, or by the name of a list


def snapshot(part: object) -> Snapshot:
    """The bytes of every tensor, and every list of integers, that is reached from `part`."""
    return dict(_reached(part, "", set()))


def written(before: Snapshot, after: Snapshot) -> int:
    """Bytes of all that is there now and was not, or was not the same, before."""
    return sum(len(content) for place, content in after.items() if before.get(place) != content)


def _reached(part: object, name: str, seen: set[int]) -> Iterator[tuple[int | str, bytes]]:
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, Tensor):
        if part.numel():
            flat = torch.empty(0, dtype=torch.uint8, device=part.device).set_(part.untyped_storage())
            yield part.untyped_storage().data_ptr(), flat.cpu().numpy().tobytes()
    elif isinstance(part, list) and all(isinstance(item, int) for item in part):
        yield name, b"".join(item.to_bytes(INTEGER, "little", signed=True) for item in part)
    elif isinstance(part, list | tuple):
        for place, item in enumerate(part):
            yield from _reached(item, f"{name}.{place}", seen)
    elif hasattr(part, "__dict__") and type(part).__module__.split(".")[0] in {"model", "kernels", "probes"}:
        for key, item in vars(part).items():
            yield from _reached(item, f"{name}.{key}", seen)
