"""Random inputs of a case on a device; or, for compiling where there is none, uninitialised ones of the same shapes."""

import torch
from torch import Tensor

from kernels.formats import rows
from kernels.formats.stored import Dense, Fp4, Fp4Keys, Fp8, Fp8Entries, Fp8Keys, Rows, Weight
from scripts.make.values import E2M1_MEAN_SQUARE, E4M3_DEVIATION

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LARGEST = 416.0  # of the E4M3 values, as `scripts.make.values` draws them
BIAS = 127  # of E8M0


class Draw:
    """Where the tensors of a case come from; `values`: whether they are drawn, or left as they are allocated."""

    def __init__(self, device: torch.device, seed: int, *, values: bool) -> None:
        self.device, self.values = device, values
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Normal numbers."""
        out = torch.empty(shape, dtype=torch.float32 if dtype == E4M3 else dtype, device=self.device)
        if self.values:
            out.normal_(0.0, scale, generator=self.generator)
        return out.clamp_(-LARGEST, LARGEST).to(E4M3) if dtype == E4M3 else out

    def uniform(self, *shape: int, low: float = 0.0) -> Tensor:
        """fp32 numbers from `low` to 1."""
        out = torch.empty(shape, device=self.device)
        return out.uniform_(low, 1.0, generator=self.generator) if self.values else out

    def bytes(self, *shape: int) -> Tensor:
        """uint8, all values equally likely."""
        out = torch.empty(shape, dtype=torch.uint8, device=self.device)
        return out.random_(0, 256, generator=self.generator) if self.values else out

    def scales(self, *shape: int, power: int) -> Tensor:
        """E8M0 scales: half of them 2^power, half the next."""
        out = torch.empty(shape, dtype=torch.uint8, device=self.device)
        if self.values:
            out.random_(BIAS + power, BIAS + power + 2, generator=self.generator)
        return out.view(E8M0)

    def weight(self, form: str, *shape: int) -> Weight:
        """A matrix [out, in], or stacked ones [e, out, in], of about unit gain: "bf16", "fp8" or "fp4"."""
        *lead, out, columns = shape
        root = columns**-0.5
        if form == "bf16":
            return Dense(self.normal(*shape, scale=root))
        if form == "fp8":
            power = _power(root / E4M3_DEVIATION)
            return Fp8(
                torch.empty(shape, dtype=E4M3, device=self.device) if not self.values else self._narrow(*shape),
                self.scales(*lead, -(-out // 128), -(-columns // 128), power=power),
            )
        assert form == "fp4", form
        power = _power(root / E2M1_MEAN_SQUARE**0.5)
        return Fp4(
            self.bytes(*lead, out, columns // 2).view(torch.int8), self.scales(*lead, out, columns // 32, power=power)
        )

    def _narrow(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=E4M3, scale=E4M3_DEVIATION)

    def entries(self, form: str, n: int, d: int, rope: int) -> Rows:
        """Compressed entries of about unit size: "bf16" or "fp8"."""
        if form == "bf16":
            return self.normal(n, d)
        plain = rows.fp8_entries(n, d, rope, self.device)
        if self.values:
            plain = Fp8Entries(
                self._narrow(n, d - rope), self.normal(n, rope), self.scales(*plain.scale.shape, power=-7)
            )
        return plain

    def keys(self, form: str, n: int, d: int) -> Rows:
        """Index keys of about unit size: "bf16", "fp8" or "fp4"."""
        if form == "bf16":
            return self.normal(n, d)
        if form == "fp8":
            plain = rows.fp8_keys(n, d, self.device)
            return Fp8Keys(self._narrow(n, d), plain.scale.fill_(2.0**-7)) if self.values else plain
        assert form == "fp4", form
        return Fp4Keys(self.bytes(n, d // 2), self.scales(n, d // 32, power=-2))

    def experts_of(self, t: int, k: int, experts: int) -> Tensor:
        """Ids of k distinct experts for each token, all equally likely: [t, k] int64."""
        if not self.values:
            return torch.empty(t, k, dtype=torch.int64, device=self.device)
        return self.uniform(t, experts).argsort(1)[:, :k].contiguous()

    def chosen(self, t: int, k: int, n: int) -> Tensor:
        """K distinct entries of n for each token, in ascending order: [t, k] int32."""
        if not self.values:
            return torch.empty(t, k, dtype=torch.int32, device=self.device)
        step = n // k  # one of each run of so many
        inside = torch.randint(0, step, (t, k), generator=self.generator, device=self.device)
        return (torch.arange(k, device=self.device) * step + inside).to(torch.int32)

    def position(self, n: int) -> Tensor:
        """A position as a captured step has it: [] int64 on the device."""
        return torch.full((), n, dtype=torch.int64, device=self.device)


def _power(size: float) -> int:
    """The power of two below a scale."""
    return int(torch.tensor(size).log2().floor())
