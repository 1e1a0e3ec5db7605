"""FUSED, the op set of NVIDIA GPUs. A module of its own because it needs Triton, which not every platform has."""

from kernels.fused import attention, indexer, linear, norm, swiglu
from kernels.ops import BLOCKED

# What has no kernel of its own is BLOCKED's: a few passes over one chunk. `kernels.ops.rooms` names each.
FUSED = BLOCKED._replace(
    name="fused",
    rms_norm=norm.rms_norm,
    linear=linear.linear,
    grouped_linear=linear.grouped_linear,
    select=indexer.select,
    attend=attention.attend,
    swiglu=swiglu.swiglu,
)
