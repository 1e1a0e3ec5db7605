"""The kind of GPU that kernels are compiled for."""

import triton

from fathom.kernels.formats.triton_rounding import UPCAST

HOPPER, BLACKWELL = 90, 100  # their first compute capabilities


def blackwell() -> bool:
    """Whether that is Blackwell, or newer; in the interpreter it is none."""
    return not UPCAST and triton.runtime.driver.active.get_current_target().arch >= BLACKWELL


def multiplies_fp8() -> bool:
    """Whether its tensor cores multiply E4M3 codes: those of Hopper do, and newer ones; the interpreter does too."""
    return UPCAST or triton.runtime.driver.active.get_current_target().arch >= HOPPER
