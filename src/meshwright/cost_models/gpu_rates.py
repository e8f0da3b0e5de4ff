"""What kernels of a kind of GPU reach, in a few measured numbers each: matrix products, fused attention, collectives inside a server.

- Products: the eight numbers of `products.ProductModel`, as `benchmarks/gpu_tables.py` fits them to `aiconfigurator-core` 0.12's tables of
  `torch.nn.functional.linear` in bfloat16 (its raw output has them; vllm 0.24.0, for A100 vllm 0.14.0).
- Attention: share of the peak on a causal mask, forward and backward together, that rises with the sequence as E / (1 + h / s). `flash-2`: off
  the bars of Dao-AILab/flash-attention's assets/flash2_{a100,h100}_fwd_bwd_benchmark.png (commit 0251105), heads of 128, all six lengths within
  4 %; `flash-1` off the same pictures (within 16 %). `flash-3`: the forward pass of the same package's attention tables (vllm
  0.24.0), taken for the backward pass too, which was not measured.
- Collectives: the eight numbers of `collectives.CollectiveModel`, fitted to the same package's NCCL tables (2.27.3; H200 2.26.2).
- `sustained_clock`: a product alone runs at the boost clock, hours of products at what the power limit leaves: share of the tables' clock. Fitted,
  one number a board, on the seen half of benchmarks/published.toml; not measured directly. At another power limit: by
  its power of POWER_EXPONENT. Attention's kernels draw less and keep their measured rate.
Rates of other GPUs are not here: they stay on the roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from .collectives import CollectiveModel
from .products import GpuPeaks, ProductModel

__all__ = ["GPU_RATES", "GpuRates"]

HALF_BYTES = 2.0  # of a bfloat16 value
# The clock under a power limit: 1/3 where the voltage follows the clock, 1 where it is at its floor. Fitted between H100s of 700 and of 500 W on the
# same seen half.
POWER_EXPONENT = 0.6


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """`attention`: by generation of the kernel, (share of the peak on long sequences, positions at which half of it is reached)."""

    processors: int
    product: tuple[float, ...]
    tile: int
    attention: Mapping[str, tuple[float, float]]
    collective: tuple[float, ...]
    sustained_clock: float
    power_W: float  # limit at which that clock holds

    def limited(self, power_W: float) -> GpuRates:
        """The same board under another power limit; the clock does not rise above the tables'."""
        return replace(self, sustained_clock=min(1.0, self.sustained_clock * (power_W / self.power_W) ** POWER_EXPONENT), power_W=power_W)

    def products(self, flops: float, memory_Bps: float) -> ProductModel:
        """Of a device with that peak and memory, at the clock that it keeps up."""
        peaks = GpuPeaks(
            flops=flops * self.sustained_clock, memory_Bps=memory_Bps, processors=self.processors, weight_bytes=HALF_BYTES, input_bytes=HALF_BYTES,
        )  # fmt: skip
        return ProductModel(peaks=peaks, numbers=self.product, tile=self.tile)

    def collectives(self, link_Bps: float) -> CollectiveModel:
        return CollectiveModel(link_Bps=link_Bps, numbers=self.collective)

    def attention_share(self, generation: str, positions: int) -> float:
        """Of the peak. A generation that was not measured on this GPU is answered by the newest that was."""
        best, half = self.attention.get(generation) or list(self.attention.values())[-1]
        return best / (1 + half / max(1, positions))


_H100 = GpuRates(
    processors=132, product=(2.5303, 0.8805, 0.2105, 4.3834, 0.9031, 2.8708, 48.614), tile=64,
    attention={"flash-1": (0.142, 250.0), "flash-2": (0.334, 505.0), "flash-3": (0.66, 1265.0)},
    collective=(4.7659, 0.7966, 5.2745, 0.889, 0.8088, 0.9368, 7.0915, 1.1427), sustained_clock=0.75, power_W=700.0,
)  # fmt: skip
GPU_RATES: dict[str, GpuRates] = {
    "a100": GpuRates(
        processors=108, product=(4.0674, 0.845, 1.5891, 0.0556, 0.8314, 1.4385, 155.3048), tile=128,
        attention={"flash-1": (0.266, 347.0), "flash-2": (0.615, 454.0)},
        collective=(8.0747, 0.9304, 11.9006, 0.8391, 0.7871, 0.8769, 11.9898, 0.8936), sustained_clock=0.92, power_W=400.0,
    ),
    "h100": _H100,
    "h200": GpuRates(
        processors=132, product=(2.5767, 0.8731, 0.1963, 0.9181, 0.866, 3.5738, 19.3707), tile=64, attention=_H100.attention,
        collective=(4.2397, 0.8852, 5.7697, 1.0184, 0.8002, 0.8516, 6.6667, 1.0528), sustained_clock=0.75, power_W=700.0,
    ),
}  # fmt: skip
