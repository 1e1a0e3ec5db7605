"""The relative identity, its mean and its layouts, against rotate and dot in float64."""

import pytest
import torch

from kernels.formats.coded_rows import undo_hadamard
from kernels.formats.eigenbasis import eigen_keys
from kernels.formats.stored import CodebookValues
from kernels.quantise.reference import hadamard
from kernels.rope import reference as rope
from kernels.shard import cpu as shard
from kernels.shard.reference import relative_scores, rotated_values, turn

layouts = pytest.mark.parametrize("interleaved", [False, True])
HEADS, QUERY_HEADS, D, RANK, N, AT = 2, 6, 16, 12, 40, 57


def drawn():
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, c, basis, mean = normal(QUERY_HEADS, D), normal(N, RANK), normal(HEADS * D, RANK), 3 * normal(HEADS * D)
    return q, c, basis, mean, rope.frequencies(D, 10_000.0).double()


def trig(positions, freqs):
    angle = torch.as_tensor(positions, dtype=torch.float64).reshape(-1, 1) * freqs
    return angle.cos(), angle.sin()


def by_hand(x, positions, freqs, interleaved):
    """Rotation as multiplication of complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    z = torch.view_as_complex(pairs.contiguous()) * torch.polar(
        torch.ones(1).double(), positions[:, None, None] * freqs
    )
    out = torch.view_as_real(z)
    return out.flatten(-2) if interleaved else out.mT.flatten(-2)


def scores(q, keys):
    return torch.einsum("hd,nhd->hn", q, keys.repeat_interleave(QUERY_HEADS // HEADS, dim=1))


@layouts
def test_turn_is_a_complex_product_and_undone_by_the_negative_sine(interleaved):
    x, positions = torch.randn(N, HEADS, D).double(), torch.arange(N).double() + 1000
    freqs = rope.frequencies(D, 10_000.0).double()
    cos, sin = trig(positions, freqs)
    turned = turn(x, cos, sin, interleaved=interleaved)
    assert (turned - by_hand(x, positions, freqs, interleaved)).abs().max() < 1e-13
    assert (turn(turned, cos, -sin, interleaved=interleaved) - x).abs().max() < 1e-14
    single = turn(
        turn(x.float(), cos.float(), sin.float(), interleaved=interleaved),
        cos.float(),
        -sin.float(),
        interleaved=interleaved,
    )
    assert (single - x).abs().max() < 4e-6


@layouts
def test_the_identity_equals_rotate_and_dot(interleaved):
    q, c, basis, mean, freqs = drawn()
    positions = torch.arange(N).double() + 9
    plain = (c @ basis.mT + mean).view(N, HEADS, D)
    keys = by_hand(plain, positions, freqs, interleaved)
    turned = by_hand(q[None], torch.tensor([AT]).double(), freqs, interleaved)[0]
    wanted = scores(turned, keys)
    got = relative_scores(q, c, basis, mean, *trig(positions - AT, freqs), interleaved=interleaved)
    assert (got - wanted).abs().max() < 1e-12 * wanted.abs().max()


@layouts
def test_each_way_to_get_it_wrong_is_far_off(interleaved):
    """The test above would notice: no mean, the distance's sign, the other layout, the absolute position."""
    q, c, basis, mean, freqs = drawn()
    positions = torch.arange(N).double() + 9
    cos, sin = trig(positions - AT, freqs)
    right = relative_scores(q, c, basis, mean, cos, sin, interleaved=interleaved)
    for wrong in (
        relative_scores(q, c, basis, torch.zeros_like(mean), cos, sin, interleaved=interleaved),
        relative_scores(q, c, basis, mean, cos, -sin, interleaved=interleaved),
        relative_scores(q, c, basis, mean, cos, sin, interleaved=not interleaved),
        relative_scores(q, c, basis, mean, *trig(positions, freqs), interleaved=interleaved),
    ):
        assert (wrong - right).square().mean().sqrt() > 0.3 * right.square().mean().sqrt()


@layouts
def test_the_identity_is_what_the_tiles_compute(interleaved):
    """Stored keys in fp32: within 3e-6 of the scores' root mean square, as kv-variants C.4 demands."""
    q, _, _, _, freqs = drawn()
    g = torch.Generator().manual_seed(1)
    stored = eigen_keys(N, HEADS * D, RANK, RANK, 0, torch.device("cpu"))
    stored.codes.copy_(torch.randint(1, 256, stored.codes.shape, generator=g))
    stored.basis.copy_(torch.randint(-127, 128, stored.basis.shape, generator=g))
    stored.basis_scale.copy_(torch.rand(RANK, generator=g) / 127)
    stored.scale.copy_(torch.rand(RANK, generator=g) / 7)
    stored.mean.copy_(torch.randn(HEADS * D, generator=g))
    values = CodebookValues(torch.zeros(N, 8, dtype=torch.uint8), torch.zeros(256, 4), torch.zeros(HEADS, D))
    middle = shard.Middle(stored, values, 4, freqs.float(), interleaved)
    nibbles = torch.stack((stored.codes & 15, stored.codes >> 4), dim=-1).flatten(1).double() - 8
    basis = stored.basis.double() * stored.basis_scale.double()
    distance = trig(torch.arange(4, 4 + N) - AT, freqs)
    wanted = relative_scores(
        q, nibbles * stored.scale.double(), basis, stored.mean.double(), *distance, interleaved=interleaved
    )
    turned = turn(q[None], *trig(AT, freqs), interleaved=interleaved)[0].float()
    got = scores(turned, torch.cat((shard.middle_keys(middle, 0, 23), shard.middle_keys(middle, 23, N))))
    assert (got - wanted).abs().max() < 3e-6 * wanted.square().mean().sqrt()


def test_values_rotated_late_are_values_rotated_early():
    g = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 256, (N, HEADS * D // 4), generator=g, dtype=torch.uint8)
    codebook, largest = torch.randn(256, 4, generator=g), torch.rand(HEADS, D, generator=g)
    stored = rotated_values(codes, codebook, largest)
    for i, head, j in ((0, 0, 0), (39, 1, 3), (7, 1, 0)):
        row = codebook[int(codes[i, head * D // 4 + j])] * largest[head, 4 * j : 4 * j + 4]
        assert torch.equal(stored[i, head, 4 * j : 4 * j + 4], row)
    weights = torch.rand(N, generator=g)
    early = torch.einsum("n,nhd->hd", weights, hadamard(stored))
    late = undo_hadamard(torch.einsum("n,nhd->hd", weights, stored), None)
    assert (early - late).abs().max() < 2e-6 * N**0.5
