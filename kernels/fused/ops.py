"""FUSED, the op set of NVIDIA GPUs. A module of its own because it needs Triton, which not every platform has."""

from kernels.fused import activations, attention, compress, experts, hyper, indexer, linear, norm, streams, swiglu
from kernels.ops import BLOCKED

# What has no kernel of its own is BLOCKED's: a few passes over one chunk. `kernels.ops.rooms` names each.
FUSED = BLOCKED._replace(
    name="fused",
    rms_norm=norm.rms_norm,
    rotate=activations.rotate,
    rotate_halves=activations.rotate_halves,
    simulate_fp8=activations.simulate_fp8,
    simulate_fp4=activations.simulate_fp4,
    hadamard=activations.hadamard,
    hyper_weights=hyper.hyper_weights,
    head_weights=hyper.head_weights,
    collapse=streams.collapse,
    read_streams=hyper.read,
    expand=streams.expand,
    linear=linear.linear,
    grouped_linear=linear.grouped_linear,
    compress=compress.compress,
    select=indexer.select,
    attend=attention.attend,
    swiglu=swiglu.swiglu,
    experts=experts.experts,
)
