"""The folder of a job that an engine runs: what its servers are told (`ranks-ATTEMPT.json`), and what they wrote down (docs/formats.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...cluster.placed import Placed
from ...errors import FormatError
from ..atomic import write_bytes
from ..strict_json import decode

__all__ = ["GRACE_S", "Ended", "Started", "ranks_document", "read_ended", "read_started", "write_ranks"]

SCHEMA, VERSION = "meshwright.ranks", 1
MAX_BYTES = 1 << 20  # of one note
GRACE_S = 30.0  # as Slurm's KillWait and Kubernetes' terminationGracePeriodSeconds have it


class Started(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server's note when it began: `host` is what the machine calls itself; `ranks` are started there."""

    time_s: float
    server: str
    host: str
    ranks: tuple[int, ...]
    cuda_visible_devices: str


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`asked`: the launcher was told to end before its processes did."""

    time_s: float
    code: int
    asked: bool = False


def ranks_document(
    placed: Placed, command: Sequence[str], *, plan: str = "", addresses: Mapping[str, str] | None = None, own_gpus: bool = False, port: int = 0,
    grace_s: float = GRACE_S,
) -> dict[str, object]:
    """`plan`: name of the plan's file beside it; `own_gpus`: the launcher says which GPUs are seen, not the engine; `port`: of rank 0, 0: a free
    one; `grace_s`: between asking its processes to leave and killing them."""
    return {
        "schema": SCHEMA, "version": VERSION, "job": placed.job, "attempt": placed.attempt, "command": list(command), "plan": plan,
        "addresses": dict(addresses or {}), "own_gpus": own_gpus, "port": port, "grace_s": grace_s,
        "ranks": [{"server": r.server, "gpus": list(r.gpus)} for r in placed.ranks],
    }  # fmt: skip


def write_ranks(folder: Path, document: Mapping[str, object]) -> None:
    write_bytes(folder / f"ranks-{document['attempt']}.json", msgspec.json.format(msgspec.json.encode(document)) + b"\n")


def _notes(folder: Path, kind: str, attempt: int) -> dict[str, tuple[str, bytes]]:
    """By server."""
    begin = f"{kind}-{attempt}-"
    found = {}
    for path in sorted(folder.glob(f"{begin}*")):
        if path.suffix != ".part":
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise FormatError(f"larger than {MAX_BYTES} bytes", where=path.name)
            found[path.name.removeprefix(begin).removesuffix(".json")] = (path.name, data)
    return found


def read_started(folder: Path, attempt: int) -> dict[str, Started]:
    """By server. Raises: FormatError."""
    decoder = msgspec.json.Decoder(Started)
    return {server: decode(data, decoder, name) for server, (name, data) in _notes(folder, "started", attempt).items()}


def read_ended(folder: Path, attempt: int) -> dict[str, Ended]:
    """By server. Raises: FormatError."""
    decoder = msgspec.json.Decoder(Ended)
    return {server: decode(data, decoder, name) for server, (name, data) in _notes(folder, "ended", attempt).items()}
