"""Record a run of vLLM's CPU engine with a fault put into the loaded model, for `compare` to find.

    python faults_vllm_cpu.py --fault sinks-ignored --model DIR --tokens ids.json --out recording.safetensors

Faults are changed weights and attributes of the engine's own modules, each in the layer that `FAULTS` says.
"""

import torch
from record_vllm_cpu import NEEDED, parser, run

FAULTS = {}


def fault(layer):
    """Put a function of a layer into `FAULTS`; None: of the whole model."""

    def added(change):
        name = change.__name__.replace("_", "-")
        FAULTS[name] = change if layer is None else lambda model: change(model.model.layers[layer])
        return change

    return added


@fault(1)
def sinks_ignored(layer):
    """Sinks stay at the -inf that they begin with, as if their weights had not been loaded."""
    layer.attn.attn_sink.data.fill_(-float("inf"))


@fault(1)
def ape_shifted(layer):
    """The compressor's position bias is that of one token earlier."""
    rolled(layer.attn.compressor.ape)


@fault(3)
def index_ape_shifted(layer):
    """The same of the indexer's compressor."""
    rolled(layer.attn.indexer.compressor.ape)


def rolled(bias):
    """Roll a bias by one token."""
    bias.data.copy_(bias.data.roll(1, 0))


@fault(2)
def bias_ignored(layer):
    """The router's e_score_correction_bias is zero."""
    layer.ffn.experts.router.e_score_correction_bias.data.zero_()


@fault(2)
def scale_dropped(layer):
    """Experts' weights are without routed_scaling_factor."""
    layer.ffn.experts.router.routed_scaling_factor = 1.0


@fault(0)
def window_short(layer):
    """The window has a token less."""
    layer.attn.window_size -= 1


@fault(0)
def hash_by_position(layer):
    """The hash router is given positions for token ids."""
    router = layer.ffn.experts.router
    route = router._compute_routing  # noqa: SLF001 -- it has no public name
    router._compute_routing = lambda hidden, logits, kind, *, input_ids: route(  # noqa: SLF001
        hidden, logits, kind, input_ids=torch.arange(len(input_ids))
    )


@fault(None)
def inverse_rotation_skipped(_model):
    """The attention's output is not rotated back, in every layer."""
    from vllm.models.deepseek_v4.cpu import cpu_sparse

    cpu_sparse.ops.inverse_gptj_rope_o_proj_cpu = lambda rows, _positions, _table, _width: rows.clone()


def main():
    """Run the command line."""
    p = parser()
    p.add_argument("--fault", choices=tuple(FAULTS), help="what is put in (default: nothing)")
    p.add_argument(
        "--without", choices=tuple(NEEDED), action="append", default=[], help="what vLLM needs here, and lacks"
    )
    args = p.parse_args()
    run(args, FAULTS.get(args.fault), args.without)


if __name__ == "__main__":
    main()
