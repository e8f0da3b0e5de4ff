"""How the simulator's kernels are compiled.

`kernel` and `inlined` are `numba.njit` with an on-disk cache, without the interpreter lock, with NumPy's division rules, and without
numba's reference counting: state travels through functions as tuples of arrays, and counting each of them at each call cost ten
times the work itself. So these functions must not allocate. `inlined` also asks LLVM to inline: tuples of arrays are long, and
copying them for a call cost as much again. No fastmath anywhere: results are the same bits everywhere.
"""

from __future__ import annotations

from numba import njit

__all__ = ["inlined", "kernel"]

kernel = njit(cache=True, nogil=True, _nrt=False, error_model="numpy")
inlined = njit(cache=True, nogil=True, _nrt=False, error_model="numpy", forceinline=True)
