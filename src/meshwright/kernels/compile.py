"""How the simulator's kernels are compiled.

`kernel` and `inlined` are `numba.njit` without the interpreter lock, with NumPy's division rules, and without numba's reference
counting: state travels through functions as tuples of arrays, and counting each of them at each call cost ten times the work itself.
So these functions must not allocate. `inlined` also asks LLVM to inline: tuples of arrays are long, and copying them for a call cost
as much again. No fastmath anywhere: results are the same bits everywhere.

`called` is as `inlined` where copies of a long function would take long to compile. `allocating` is a kernel that makes arrays of its own, and
`helper` a function that only such kernels call. None of `inlined`, `called` and `helper` can be called from Python: the
entry that numba would make for it unpacks every array of every tuple, and compiling that took half of a first run's time.

Whole arrays are not assigned in kernels (`a[:] = b`, `a[:] = 0`), nor reduced (`a.max()`): `fill`, `copy_into` and `largest` are loops, which compile
in a fraction of the time (0.1 to 0.5 s for each place).

A number written in a call is a type of its own to numba, and so are int32 and int64: kernels hand on `np.int64(2)` and `np.bool_(True)`, or each of
what they call is compiled once more per number.

numba keeps compiled code on disk per function and looks only at that function's own file to see whether it is still true. So parts that
other files use are not kept (`inlined`), and an entry point that uses them closes over the `fingerprint` of all their files: numba
hashes what a function closes over.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from numba import njit

__all__ = ["allocating", "called", "copy_into", "fill", "fingerprint", "helper", "inlined", "kernel", "largest"]

kernel = njit(cache=True, nogil=True, no_cfunc_wrapper=True, _nrt=False, error_model="numpy")
inlined = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, error_model="numpy", forceinline=True)
called = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False, error_model="numpy")
allocating = njit(cache=True, nogil=True, no_cfunc_wrapper=True)
helper = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@called
def fill(values, value):  # type: ignore[no-untyped-def]
    """`values[:] = value`, of one dimension."""
    for i in range(len(values)):
        values[i] = value


@called
def copy_into(to, source):  # type: ignore[no-untyped-def]
    """`to[:] = source`, of one dimension; they do not overlap."""
    for i in range(len(source)):
        to[i] = source[i]


@called
def largest(values):  # type: ignore[no-untyped-def]
    """`values.max()`, of one dimension."""
    found = values[0]
    for i in range(len(values)):
        found = max(found, values[i])
    return found


def fingerprint(*files: str) -> int:
    """A number that changes when one of the source files does."""
    total = 0
    for file in files:
        total = zlib.crc32(Path(file).read_bytes(), total)
    return total
