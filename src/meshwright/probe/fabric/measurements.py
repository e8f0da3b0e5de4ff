"""What a probe of a fabric measured, as data and as a JSON file: `meshwright.fabric-measurements` version 1 (docs/formats.md).

Round trips between all pairs, and trials: transfers that ran at once with the rate of each. Trials that are held out judge the fabric and are not
used to find it. Rates are payload (goodput) of TCP, in bytes/s, counted by the receiver.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from ...decide.collective.cloudcollectives.cost import CostMatrix
from ...errors import FormatError
from ...io.strict_json import decode, header, read_document, refuse_ambiguous, write_document
from .fair_share import F64, Trial

__all__ = ["Measurements", "measurements_of_matrix", "read_measurements", "write_measurements"]

SCHEMA, VERSION = "meshwright.fabric-measurements", 1
COSTS = "meshwright.rank-costs"
MAX_ENDPOINTS, MAX_TRIALS, MAX_FLOWS = 1024, 100_000, 4096
MAX_Bps = 1e15


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """`host[i]`: endpoints of one host have one name here. `rtt_s[i, j]`: 0 = not measured. `held_out[k]`: trial k was not used to find the fabric.

    library_latency_s: what a message of the library takes one way beyond half a round trip; 0 = not measured. idle: the least share of any machine's
    processors that was idle during a trial (0 to 1; 1 = not known): near 0 the processors, not the links, may have been the limit.
    """

    names: tuple[str, ...]
    host: tuple[str, ...]
    address: tuple[str, ...]
    rtt_s: F64
    trials: tuple[Trial, ...]
    held_out: tuple[bool, ...]
    library_latency_s: float = 0.0
    seconds: float = 0.0
    idle: float = 1.0
    source: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def fitted(self) -> tuple[Trial, ...]:
        return tuple(t for t, out in zip(self.trials, self.held_out, strict=True) if not out)

    def with_trials(self, trials: Sequence[Trial], *, held_out: bool) -> Measurements:
        return replace(self, trials=(*self.trials, *trials), held_out=(*self.held_out, *[held_out] * len(trials)))


class _TrialFile(msgspec.Struct, forbid_unknown_fields=True):
    flows: list[tuple[int, int]]
    rate_Bps: list[float]
    kind: str = "given"
    held_out: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    schema: str
    version: int
    names: list[str]
    trials: list[_TrialFile]
    host: list[str] = []
    address: list[str] = []
    rtt_s: list[list[float]] = []
    library_latency_s: float = 0.0
    seconds: float = 0.0
    idle: float = 1.0
    source: str = ""


def write_measurements(path: str | os.PathLike[str], measured: Measurements) -> None:
    """Write the JSON file (gzipped if it ends in `.gz`). Raises: MeshwrightError where the system refuses."""
    document = {
        "schema": SCHEMA, "version": VERSION, "source": measured.source, "names": list(measured.names), "host": list(measured.host),
        "address": list(measured.address), "library_latency_s": measured.library_latency_s, "seconds": measured.seconds, "idle": measured.idle,
        "rtt_s": measured.rtt_s.tolist(),
        "trials": [
            {"kind": t.kind, "held_out": out, "flows": [list(f) for f in t.flows], "rate_Bps": list(t.rate_Bps)}
            for t, out in zip(measured.trials, measured.held_out, strict=True)
        ],
    }  # fmt: skip
    write_document(path, json.dumps(document).encode() + b"\n")


def read_measurements(path: str | os.PathLike[str]) -> Measurements:
    """A file of `fabric probe --save`, or the costs that `collective order --save-matrix` writes (pairs by themselves only).

    Raises: UsageError (cannot be read), FormatError naming the field.
    """
    where = Path(path).name
    data = read_document(path, limit=256 << 20)
    refuse_ambiguous(data, where)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}", where=where) from None
    if isinstance(document, dict) and document.get("schema") == COSTS:
        try:
            return measurements_of_matrix(CostMatrix.from_document(document))
        except FormatError as error:
            raise FormatError(error.message, where=f"{where}: {error.where}") from None
    header(data, schema=SCHEMA, version=VERSION, where=where)
    return _checked(decode(data, msgspec.json.Decoder(_File), where), where)


def measurements_of_matrix(matrix: CostMatrix) -> Measurements:
    """Every ordered pair by itself. Raises: FormatError where a pair has no rate."""
    n = len(matrix)
    off = ~np.eye(n, dtype=bool)
    if (matrix.beta_s_per_byte[off] <= 0).any():
        i, j = next((int(a), int(b)) for a, b in np.argwhere(off & (matrix.beta_s_per_byte <= 0)))
        text = f"{matrix.names[i]} -> {matrix.names[j]} has no rate, only a latency"
        raise FormatError(text, where="beta_s_per_byte", hint="probe with bursts")
    trials = tuple(Trial("alone", ((i, j),), (1 / float(matrix.beta_s_per_byte[i, j]),)) for i in range(n) for j in range(n) if i != j)
    return Measurements(
        names=matrix.names, host=tuple(f"host{h}" for h in matrix.host), address=("",) * n, rtt_s=matrix.alpha_s + matrix.alpha_s.T, trials=trials,
        held_out=(False,) * len(trials), source=matrix.source,
    )  # fmt: skip


def _checked(file: _File, where: str) -> Measurements:
    n = len(file.names)
    if not 2 <= n <= MAX_ENDPOINTS:
        raise FormatError(f"must be 2 to {MAX_ENDPOINTS} names", where=f"{where}: names")
    if len(set(file.names)) < n:
        twice = next(x for i, x in enumerate(file.names) if x in file.names[:i])
        raise FormatError(f"{twice!r} is there twice", where=f"{where}: names")
    for field, values in (("host", file.host), ("address", file.address)):
        if values and len(values) != n:
            raise FormatError(f"must have {n} entries, or none", where=f"{where}: {field}")
    rtt = np.array(file.rtt_s or np.zeros((n, n)), np.float64) if all(len(r) == n for r in file.rtt_s) else np.zeros(0)
    if rtt.shape != (n, n) or not np.isfinite(rtt).all() or (rtt < 0).any():
        raise FormatError(f"must be {n} x {n} finite numbers >= 0", where=f"{where}: rtt_s")
    for field, value in (("library_latency_s", file.library_latency_s), ("seconds", file.seconds), ("idle", file.idle)):
        if not 0 <= value < 1e9:
            raise FormatError("must be finite and >= 0", where=f"{where}: {field}")
    if not 1 <= len(file.trials) <= MAX_TRIALS:
        raise FormatError(f"must be 1 to {MAX_TRIALS} trials", where=f"{where}: trials")
    trials = tuple(_trial(entry, n, f"{where}: trials[{k}]") for k, entry in enumerate(file.trials))
    return Measurements(
        names=tuple(file.names), host=tuple(file.host or file.names), address=tuple(file.address or [""] * n), rtt_s=rtt, trials=trials,
        held_out=tuple(t.held_out for t in file.trials), library_latency_s=file.library_latency_s, seconds=file.seconds, idle=file.idle,
        source=file.source or where,
    )  # fmt: skip


def _trial(entry: _TrialFile, n: int, where: str) -> Trial:
    if not 1 <= len(entry.flows) <= MAX_FLOWS or len(entry.flows) != len(entry.rate_Bps):
        raise FormatError(f"must have 1 to {MAX_FLOWS} flows and a rate for each", where=where)
    for k, ((i, j), rate) in enumerate(zip(entry.flows, entry.rate_Bps, strict=True)):
        if not (0 <= i < n and 0 <= j < n) or i == j:
            raise FormatError(f"must join two different endpoints 0..{n - 1}, got {i} and {j}", where=f"{where}.flows[{k}]")
        if not 0 <= rate <= MAX_Bps:
            raise FormatError(f"must be 0 to {MAX_Bps:g} B/s, got {rate}", where=f"{where}.rate_Bps[{k}]")
    return Trial(entry.kind, tuple((i, j) for i, j in entry.flows), tuple(entry.rate_Bps))
