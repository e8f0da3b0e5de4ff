"""Triton twins of the codec and expert kernels, for tensors on a GPU.

Codecs put the same bytes on the wire as `kernels.select`, `kernels.sparse`, `kernels.quantise`. Importing a module of this package needs `triton`.
Without a GPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1, set before the import), which is how they are checked against the CPU
kernels. On a GPU they are compared and timed by `benchmarks/gpu.py`.
Sums over blocks add in another order than on a CPU: scales may differ in the last bit. Everything else of the codecs is equal bit for bit; fused
multiply-add is switched off for it.
"""

from __future__ import annotations

__all__: list[str] = []
