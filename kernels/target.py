"""The kind of GPU that kernels are compiled for."""

import triton

from fathom.kernels.formats.triton_rounding import UPCAST

BLACKWELL = 100  # its first compute capability


def blackwell() -> bool:
    """Whether that is Blackwell, or newer; in the interpreter it is none."""
    return not UPCAST and triton.runtime.driver.active.get_current_target().arch >= BLACKWELL
