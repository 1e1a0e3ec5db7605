"""Memory of common GPUs, as a run is held to it: what PyTorch tells as a device's total capacity.

That is less than the label says and less than nvidia-smi shows (an H100 of 80 GB has 81,559 MiB there), and differs by
a little from driver to driver: where reports differ, this is the least of those that were found. Bandwidths are
nominal, but that of an H200, which was measured on one.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

_LOGS: Final = "logs of runs out of memory, in public repositories"


class Gpu(NamedTuple):
    """One kind of GPU."""

    gib: float  # GiB of memory in all
    source: str  # where PyTorch was seen to tell it
    bandwidth: float | None = None  # bytes of its memory in a second, where this project has a number


GPUS: Final[Mapping[str, Gpu]] = {
    "mi355x": Gpu(287.98, _LOGS),
    "b300": Gpu(267.69, _LOGS),
    "mi325x": Gpu(255.69, f"{_LOGS}; 255.98 in https://github.com/vllm-project/vllm/issues/41962"),
    "mi300x": Gpu(191.69, f"{_LOGS}; 191.98 in others"),
    "b200": Gpu(178.35, "https://github.com/pytorch/ao/pull/4002", 8e12),
    "h200": Gpu(139.72, f"{_LOGS}; 139.80 in others", 4.3e12),
    "rtx-pro-6000": Gpu(94.97, "https://github.com/antirez/ds4/issues/431"),
    "h100-nvl": Gpu(93.00, "https://github.com/ali-vilab/VACE/issues/56"),
    "a100-80": Gpu(79.15, f"{_LOGS}; 79.25 in https://github.com/levihsu/OOTDiffusion/issues/235"),
    "h100": Gpu(79.11, "https://github.com/vllm-project/vllm/issues/27508", 3.35e12),
    "l40s": Gpu(44.42, "https://github.com/stepfun-ai/Step-Video-T2V/issues/8"),
    "a100-40": Gpu(39.50, "https://github.com/TianheWu/CoSeR/issues/10"),
    "rtx-5090": Gpu(31.37, "https://github.com/Wan-Video/Wan2.1/issues/465"),
    "rtx-4090": Gpu(23.64, "https://github.com/ali-vilab/VGen/issues/104"),
}
