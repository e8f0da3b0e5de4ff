"""What a lab leaves on the disk: one folder per name with its state, its fabric, its socket and its log.

The folder lies in a runtime directory of the user: `$MESHWRIGHT_LAB_DIR`, else `$XDG_RUNTIME_DIR/meshwright/labs`, else for root
`/run/meshwright/labs`, else one in the temporary directory that only the user may read. A name is taken by making its folder, so
two `lab up` cannot both get it. The lab itself lives in its holder process; a folder without one is what a killed lab left.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import FormatError, RunError, UnknownName, UsageError
from ..io.atomic import write_bytes
from ..run.machine.cpu_quota import process_start_ticks

__all__ = ["LabState", "LinkState", "claim", "folder_of", "known_labs", "new_name", "read_state", "remove", "runtime_folder", "write_state"]

SCHEMA, VERSION = "meshwright.lab", 1
MAX_STATE_BYTES = 32 << 20  # of a lab's state file, which anybody may have damaged
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,23}\Z")


class LinkState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One direction of a cable. Measured figures are 0 where nothing was measured."""

    src: str
    dst: str
    rate_Bps: int
    burst_bytes: int
    segment_bytes: int
    delay_s: float = 0.0
    loss: float = 0.0
    goodput_Bps: int = 0
    ceiling_Bps: int = 0  # of payload, from the rate and the headers
    round_trip_s: float = 0.0
    cut: bool = False


class LabState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`owner` is the process with which the lab ends, 0 for a lab that is kept until `lab down`. Start times tell recycled pids apart."""

    schema: str = SCHEMA
    version: int = VERSION
    name: str
    fabric: str
    scale: str
    style: str
    interface: str
    mtu: int
    offload: bool = True
    owner: int = 0
    owner_start: str = ""
    holder: int = 0
    holder_start: str = ""
    user_namespace: bool = False
    verified: bool = False
    pacing: str = "none"  # how device speeds are kept: none | quota | paced
    shares: list[float] = []
    devices: list[str] = []
    addresses: list[str] = []
    namespaces: list[str] = []
    hostnames: list[str] = []
    links: list[LinkState] = []
    method: Literal["", "netem", "relay"] = ""  # how delays and losses are made: "" | netem | relay
    seed: int = 0  # of losses
    acks_first: bool = False  # acknowledgements do not wait behind data
    notes: list[str] = []
    machine: dict[str, float | int | str | bool] = {}

    @property
    def alive(self) -> bool:
        """Whether the holder still is the process that it was."""
        return bool(self.holder) and process_start_ticks(self.holder) == self.holder_start


def runtime_folder() -> Path:
    """The folder of all labs of this user, made if need be. Raises: RunError when it is not safely ours."""
    given = os.environ.get("MESHWRIGHT_LAB_DIR")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if given:
        folder = Path(given)
    elif session and os.access(session, os.W_OK):
        folder = Path(session, "meshwright", "labs")
    elif os.geteuid() == 0 and os.access("/run", os.W_OK):
        folder = Path("/run/meshwright/labs")
    else:
        folder = Path(tempfile.gettempdir(), f"meshwright-{os.geteuid()}", "labs")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise RunError(f"cannot make the folder of labs: {error.strerror}", where=str(folder), hint="set MESHWRIGHT_LAB_DIR") from error
    if owner != os.geteuid():
        raise RunError("the folder of labs belongs to somebody else", where=str(folder), hint="set MESHWRIGHT_LAB_DIR", data={"owner": owner})
    return folder


def folder_of(name: str) -> Path:
    """Raises: UsageError for a name that cannot be one."""
    if not _NAME.match(name):
        raise UsageError(
            f"not a name for a lab: {name[:64]!r}", where="--name", hint="up to 24 small letters, digits and dashes, beginning with a letter or digit"
        )
    return runtime_folder() / name


def new_name() -> str:
    return f"lab-{secrets.token_hex(3)}"


def claim(name: str) -> Path:
    """Make the folder of a new lab, which takes the name. What a dead lab left under it is removed first.

    Raises: UsageError when a live lab has the name (code "usage", data.name).
    """
    folder = folder_of(name)
    for _ in range(2):
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            if _in_use(folder):
                break
            remove(folder)
        except OSError as error:
            raise RunError(f"cannot make the lab's folder: {error.strerror}", where=str(folder), hint="check free space and permissions") from error
    raise UsageError(
        f"a lab is called {name!r} already", where="--name", hint=f"choose another name, or `meshwright lab down {name}`", data={"name": name}
    )


def _in_use(folder: Path) -> bool:
    try:
        state = read_state(folder)
    except (UnknownName, FormatError):  # claimed this moment by a process that has not written yet, or abandoned by one
        return _fresh(folder)
    return state.alive or (not state.holder and process_start_ticks(state.owner or -1) == state.owner_start)


def _fresh(folder: Path) -> bool:
    import time

    try:
        return time.time() - folder.stat().st_mtime < 30
    except OSError:
        return False


def write_state(folder: Path, state: LabState) -> None:
    write_bytes(folder / "state.json", msgspec.json.format(msgspec.json.encode(state)))


def read_state(folder: Path) -> LabState:
    """Raises: UnknownName when there is no such lab; FormatError."""
    path = folder / "state.json"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_STATE_BYTES + 1)
    except OSError:
        names = [x.name for x in known_labs()]
        hint = f"there {'is' if len(names) == 1 else 'are'} {', '.join(names)}" if names else "see `meshwright lab up`"
        raise UnknownName(f"no lab is called {folder.name!r}", hint=hint) from None
    try:
        state = msgspec.json.decode(data, type=LabState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(str(error), where=str(path), hint="remove what is left of it: `meshwright lab gc`") from None
    if state.schema != SCHEMA or state.version != VERSION:
        raise FormatError(f"is {state.schema} version {state.version}, not {SCHEMA} version {VERSION}", where=str(path), hint="`meshwright lab gc`")
    return state


def known_labs() -> list[Path]:
    """Folders of all labs of this user, dead ones too."""
    return sorted(x for x in runtime_folder().iterdir() if x.is_dir() and _NAME.match(x.name))


def remove(folder: Path) -> None:
    """Remove a lab's files, in a step that frees the name at once."""
    away = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.rename(away)
    except OSError:
        return
    shutil.rmtree(away, ignore_errors=True)
