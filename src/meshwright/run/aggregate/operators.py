"""What a switch does with contributions: adds numbers, saturating bytes or bfloat16, keeps the largest with its payload, or what its owner wrote.

Cite: D. De Sensi, S. Di Girolamo, S. Ashkboos, S. Li, T. Hoefler, "Flare: Flexible In-Network Allreduce" (SC 2021, arXiv 2106.15565), sections 4, 5.
Left open by the paper: who vouches that an operator may be applied in any order. Our answer: it says so, and random numbers try it (`own_operator`).
Deviations: an operator is a pure function of two numbers of 32 bits (or what is packed in them), not of a packet.
Invariant: what is commutative and associative bit for bit is applied as packets come, in one row; everything else along the fold over
worker numbers, which keeps all contributions of a chunk. So equal bits on every run, whatever the order of arrival.
Cost: one pass over a packet per contribution.

A payload is always whole 32-bit words. `int8`: four to a word, sums held between -128 and 127 (not associative: it folds). `bf16`: two to a word,
each sum rounded to the nearest, ties to even. `argmax`: pairs of a float32 and an int32, the larger float with its payload; of equal ones the smaller
payload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from ...errors import UsageError
from ...kernels.compile import called, inlined

__all__ = ["ARGMAX_PAIR", "MODES", "NUMBERS_OF", "Mode", "Operator", "combine", "fold", "nothing", "own_operator"]

ADD, FLOAT, INT8, BF16, ARGMAX, OWN = range(6)
ARGMAX_PAIR = np.dtype([("value", "<f4"), ("payload", "<i4")])
TRIALS = 4096  # pairs and triples of numbers on which an operator's claims are tried


@dataclass(frozen=True)
class Mode:
    """`kind`: what the loop does; `folds`: along the tree over workers; `dtype`: of a worker's array, None where the client codes it itself."""

    kind: int
    folds: bool
    dtype: np.dtype[Any] | None = None


MODES: dict[str, Mode] = {
    "sum": Mode(ADD, False), "tree": Mode(FLOAT, True), "int8": Mode(INT8, True, np.dtype(np.int8)),
    "bf16": Mode(BF16, True, np.dtype(np.uint16)),
    "argmax": Mode(ARGMAX, False, ARGMAX_PAIR),
}  # fmt: skip


@inlined
def _float(bits):  # type: ignore[no-untyped-def]
    return np.int32(bits).view(np.float32)


@inlined
def _rounded(value):  # type: ignore[no-untyped-def]
    """The bits of the nearest bfloat16, ties to even; what is not a number stays so."""
    bits = np.float32(value).view(np.uint32)
    if value != value:
        return np.uint32(bits >> 16 | 0x40)
    return np.uint32((bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16)


@inlined
def _bytes_added(a, b):  # type: ignore[no-untyped-def]
    out = np.uint32(0)
    for k in range(4):
        left, right = np.int32(a << np.int32(24 - 8 * k)) >> np.int32(24), np.int32(b << np.int32(24 - 8 * k)) >> np.int32(24)
        total = min(max(left + right, np.int32(-128)), np.int32(127))
        out |= np.uint32(np.uint32(total & np.int32(255)) << np.uint32(8 * k))
    return np.int32(out)


@inlined
def _halves_added(a, b):  # type: ignore[no-untyped-def]
    high = np.int32(-65536)
    low = _rounded(_float(np.int32(a << np.int32(16))) + _float(np.int32(b << np.int32(16))))
    return np.int32(np.uint32(low | _rounded(_float(a & high) + _float(b & high)) << np.uint32(16)))


@inlined
def _wins(value, payload, other, others):  # type: ignore[no-untyped-def]
    """Does the second pair take the first one's place? Equal in both: the greater bits, so that +0 is taken before -0, in any order."""
    a, b = _float(value), _float(other)
    if a != b:
        return b > a
    return others < payload or (others == payload and other > value)


@called
def combine(kind, own, out, into, got, row, first, count):  # type: ignore[no-untyped-def]
    """out[into, x] = operator(out[into, x], got[row, first + x]) for `count` words."""
    if kind == ADD:
        for x in range(count):
            out[into, x] += got[row, first + x]
    elif kind == FLOAT:
        for x in range(count):
            out[into, x] = np.float32(_float(out[into, x]) + _float(got[row, first + x])).view(np.int32)
    elif kind == INT8:
        for x in range(count):
            out[into, x] = _bytes_added(out[into, x], got[row, first + x])
    elif kind == BF16:
        for x in range(count):
            out[into, x] = _halves_added(out[into, x], got[row, first + x])
    elif kind == ARGMAX:
        for x in range(0, count - 1, 2):
            if _wins(out[into, x], out[into, x + 1], got[row, first + x], got[row, first + x + 1]):
                out[into, x], out[into, x + 1] = got[row, first + x], got[row, first + x + 1]
    else:
        own(np.int64(out[into].ctypes.data), np.int64(got[row, first:].ctypes.data), np.int64(count))


@called
def fold(kind, own, pool, base, workers, seen, worker, count):  # type: ignore[no-untyped-def]
    """A contribution has come into row `base + worker`: climb the fold for as long as the other half is complete.

    The fold is the complete binary tree over worker numbers, left to right, an odd tail promoted; a node's result lies in its first worker's row.
    """
    level = 0
    while 1 << level < workers:
        other = (worker >> level ^ 1) << level
        if other < workers:
            most = min(other + (1 << level), workers)
            half = (1 << most) - (1 << other)
            if seen & half != half:
                return
            left, right = base + min(worker, other), base + max(worker, other)
            combine(kind, own, pool, left, pool, right, np.int64(0), count)
            worker = min(worker, other)
        level += 1


# ---- an operator of one's own ------------------------------------------------------------------------------------------
_SIGNATURE = types.void(types.int64, types.int64, types.int64)
NUMBERS_OF = {"float32": types.float32, "int32": types.int32}


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_context: Any, _address: Any) -> Any:
    def made(_: Any, builder: Any, __: Any, args: Any) -> Any:
        from llvmlite import ir

        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), made


@cfunc(_SIGNATURE)  # type: ignore[untyped-decorator]
def nothing(_out: int, _got: int, _count: int) -> None:
    """The operator of a switch that has none of its own."""
    return


@dataclass(frozen=True)
class Operator:
    """An operator that a switch was given: `name`, `dtype` of its numbers, whether it may be applied as packets come, its loop."""

    name: str
    dtype: str
    order_free: bool
    loop: Any

    @property
    def mode(self) -> str:
        """What workers join with."""
        return f"own:{self.name}:{self.dtype}"


def own_operator(
    function: Callable[[Any, Any], Any], *, name: str = "", dtype: str = "float32", commutative: bool = False, associative: bool = False,
    seed: int = 0,
) -> Operator:  # fmt: skip
    """An operator from a pure function (accumulated, got) -> number, which numba compiles.

    `commutative`, `associative`: what the function claims, bit for bit, for all numbers that workers send; with both, contributions are combined as
    they come, else along the fold over worker numbers. The claims are tried on random numbers.
    Raises: UsageError for a claim that does not hold (with the numbers), a type that is not there, or a function that does not compile.
    """
    name = name or getattr(function, "__name__", "operator")
    if dtype not in NUMBERS_OF or not name.isidentifier() or len(name) > 32:
        raise UsageError(f"operator {name!r} on {dtype!r}: a name of up to 32 letters, and numbers", where="operator", hint=", ".join(NUMBERS_OF))
    kind = NUMBERS_OF[dtype]
    try:
        compiled = njit(kind(kind, kind))(function)
        loop = _loop(compiled, getattr(np, dtype))
    except (NumbaError, TypeError) as error:
        said = (str(error).strip().splitlines() or ["no message"])[0]
        raise UsageError(f"{name} does not compile: {said}", where="operator", hint="a function of two numbers, in what numba knows") from None
    _try(compiled, name, getattr(np, dtype), commutative, associative, seed)
    return Operator(name, dtype, commutative and associative, loop)


def _loop(compiled: Any, dtype: Any) -> Any:
    @cfunc(_SIGNATURE)  # type: ignore[untyped-decorator]
    def loop(out: int, got: int, count: int) -> None:
        into, source = carray(_pointer(out), count, dtype), carray(_pointer(got), count, dtype)
        for i in range(count):
            into[i] = compiled(into[i], source[i])

    return loop


def _samples(dtype: Any, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """[3, TRIALS] numbers: of all magnitudes, small whole ones (that meet each other again), and the ends of the type; what is no number too."""
    if dtype is np.int32:
        wide = rng.integers(-(2**31), 2**31, (3, TRIALS), dtype=np.int64).astype(np.int32)
        ends = np.array([0, 1, -1, 2**31 - 1, -(2**31)], np.int32)
    else:
        wide = (rng.standard_normal((3, TRIALS)) * np.exp2(rng.integers(-40, 40, (3, TRIALS)))).astype(np.float32)
        ends = np.array([0.0, -0.0, 1.0, -1.0, np.finfo(np.float32).max, np.finfo(np.float32).tiny, np.inf, -np.inf, np.nan], np.float32)
    how = rng.integers(0, 4, (3, TRIALS))
    small, end = rng.integers(-4, 5, (3, TRIALS)).astype(dtype), ends[rng.integers(0, len(ends), (3, TRIALS))]
    return np.where(how < 2, wide, np.where(how == 2, small, end)).astype(dtype)


def _try(compiled: Any, name: str, dtype: Any, commutative: bool, associative: bool, seed: int) -> None:
    trials = _samples(dtype, np.random.default_rng(seed))

    def bits(x: Any) -> bytes:
        return dtype(x).tobytes() if x == x else b"nan"

    for a, b, c in trials.T:
        claims: list[tuple[str, bool, tuple[Any, ...], Any, Any]] = [
            ("to be commutative", commutative, (a, b), compiled(a, b), compiled(b, a)),
            ("to be associative", associative, (a, b, c), compiled(compiled(a, b), c), compiled(a, compiled(b, c))),
        ]
        for what, claimed, numbers, left, right in claims:
            if claimed and bits(left) != bits(right):
                raise UsageError(
                    f"{name} claims {what}, and is not: of {', '.join(map(str, numbers))} it makes {left!s} one way, {right!s} the other",
                    where="operator",
                    hint="leave the claim out: contributions are then folded in the order of workers",
                    data={"claim": what, "numbers": [float(x) for x in numbers]},
                )  # fmt: skip
