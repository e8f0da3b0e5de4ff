"""Triton twins of the codec kernels, for tensors on a GPU: the same bytes on the wire as `kernels.select`, `kernels.sparse`, `kernels.quantise`.

Importing a module of this package needs `triton`. Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1, set before the import), which
is how they are checked against the CPU kernels. They have not been run on a GPU yet.
Sums over blocks add in another order than on a CPU: scales may differ in the last bit. Everything else is equal bit for bit; fused
multiply-add is switched off for it.
"""

from __future__ import annotations

__all__: list[str] = []
