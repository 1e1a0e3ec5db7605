"""Memory of common GPUs, as a run is held to it, and rates for estimates of time.

Memory is what PyTorch tells as a device's total capacity. That is less than the label says and less than nvidia-smi
shows (an H100 of 80 GB has 81,559 MiB there), and differs by a little from driver to driver: where reports differ, this
is the least of those that were found.

Rates are nominal, but the bandwidth of an H200, which was measured on one. A link is what a rank receives in a second:
half of the 900 and 1,800 GB/s that NVIDIA's data sheets give NVLink of Hopper (SXM) and of Blackwell for both ways.
Products are dense, half of what the sheets give with sparsity: https://www.nvidia.com/en-us/data-center/h100/ and
h200/, https://www.nvidia.com/en-us/data-center/hgx/ for B200 and B300, of eight of which it has the sum.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

_LOGS: Final = "logs of runs out of memory, in public repositories"


class Rates(NamedTuple):
    """How fast a kind of GPU is: all that an estimate of time takes."""

    bandwidth: float  # bytes of its memory in a second
    link: float  # bytes that it receives from other GPUs of the machine in a second
    fp8: float  # operations of products of FP8 codes in a second, a multiplication and an addition being two
    bf16: float  # the same of BF16


class Gpu(NamedTuple):
    """One kind of GPU."""

    gib: float  # GiB of memory in all
    source: str  # where PyTorch was seen to tell it
    rates: Rates | None = None  # where this project has them


GPUS: Final[Mapping[str, Gpu]] = {
    "mi355x": Gpu(287.98, _LOGS),
    "b300": Gpu(267.69, _LOGS, Rates(8e12, 900e9, 4.5e15, 2.25e15)),
    "mi325x": Gpu(255.69, f"{_LOGS}; 255.98 in https://github.com/vllm-project/vllm/issues/41962"),
    "mi300x": Gpu(191.69, f"{_LOGS}; 191.98 in others"),
    "b200": Gpu(178.35, "https://github.com/pytorch/ao/pull/4002", Rates(8e12, 900e9, 4.5e15, 2.25e15)),
    "h200": Gpu(139.72, f"{_LOGS}; 139.80 in others", Rates(4.3e12, 450e9, 1.979e15, 0.989e15)),
    "rtx-pro-6000": Gpu(94.97, "https://github.com/antirez/ds4/issues/431"),
    "h100-nvl": Gpu(93.00, "https://github.com/ali-vilab/VACE/issues/56"),
    "a100-80": Gpu(79.15, f"{_LOGS}; 79.25 in https://github.com/levihsu/OOTDiffusion/issues/235"),
    "h100": Gpu(79.11, "https://github.com/vllm-project/vllm/issues/27508", Rates(3.35e12, 450e9, 1.979e15, 0.989e15)),
    "l40s": Gpu(44.42, "https://github.com/stepfun-ai/Step-Video-T2V/issues/8"),
    "a100-40": Gpu(39.50, "https://github.com/TianheWu/CoSeR/issues/10"),
    "rtx-5090": Gpu(31.37, "https://github.com/Wan-Video/Wan2.1/issues/465"),
    "rtx-4090": Gpu(23.64, "https://github.com/ali-vilab/VGen/issues/104"),
}


def named(device: str) -> str | None:
    """Which of these a device is, by the name that torch tells, as "NVIDIA H100 80GB HBM3"; None: none that has rates.

    Variants with slower memory or without NVLink have names of their own: they are none.
    """
    return _NAMES.get(device)


_NAMES: Final = {
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
}
