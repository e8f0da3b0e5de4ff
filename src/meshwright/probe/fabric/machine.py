"""What the tools on this machine say of it: which are there, and their outputs; and where NCCL's topology file is.

Programs are started without a shell, with fixed arguments, in the C locale, for at most `TIMEOUT_S` each; what they print is cut at a limit.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from ...errors import UsageError

__all__ = ["COMMANDS", "machine_outputs", "nccl_settings", "nccl_topology_file", "read_outputs", "save_outputs"]

COMMANDS: dict[str, tuple[str, ...]] = {
    "topo": ("nvidia-smi", "topo", "-m"),
    "nvidia-q": ("nvidia-smi", "-q"),
    "ibstat": ("ibstat",),
    "ibv_devinfo": ("ibv_devinfo", "-v"),
    "lscpu": ("lscpu",),
}
TIMEOUT_S = 60
MAX_BYTES = 4 << 20
_TOPOLOGYD = "/var/run/nvidia-topologyd/virtualTopology.xml"  # where NCCL looks when nothing is set
_CONF_FILES = ("~/.nccl.conf", "/etc/nccl.conf")


def machine_outputs() -> tuple[dict[str, str], list[str]]:
    """(output by name, what could not be read and why)."""
    outputs: dict[str, str] = {}
    missing: list[str] = []
    for name, argv in COMMANDS.items():
        said = " ".join(argv)
        program = shutil.which(argv[0])
        if program is None:
            missing.append(f"{said}: not installed")
            continue
        try:
            done = subprocess.run([program, *argv[1:]], capture_output=True, timeout=TIMEOUT_S, env={**os.environ, "LC_ALL": "C"}, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            missing.append(f"{said}: {error if isinstance(error, OSError) else f'no answer in {TIMEOUT_S} s'}")
            continue
        if done.returncode:
            missing.append(f"{said}: exit code {done.returncode}: {(done.stderr or done.stdout)[:120].decode('utf-8', 'replace').strip()}")
        else:
            outputs[name] = done.stdout[:MAX_BYTES].decode("utf-8", "replace")
    file = nccl_topology_file()
    if file is not None:
        outputs["nccl"] = file.read_bytes()[:MAX_BYTES].decode("utf-8", "replace")
    else:
        missing.append("NCCL's topology file: none is set")
    return outputs, missing


def nccl_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """NCCL's variables: from its configuration files, overridden by the environment."""
    found: dict[str, str] = {}
    for path in reversed(_CONF_FILES):
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")[:65536].splitlines()
        except (OSError, RuntimeError):  # no such file, or no home
            continue
        found |= {m[1]: m[2].strip() for line in lines if (m := re.match(r"\s*(NCCL_\w{1,64})\s*=(.{0,1024})", line))}
    return found | {k: v for k, v in (os.environ if environ is None else environ).items() if k.startswith("NCCL_")}


def nccl_topology_file() -> Path | None:
    """The file that NCCL would read its topology from, if there is one."""
    path = Path(nccl_settings().get("NCCL_TOPO_FILE") or _TOPOLOGYD)
    return path if path.is_file() else None


def save_outputs(outputs: Mapping[str, str], folder: str) -> None:
    """One file per output, for `read_outputs`. Raises: UsageError."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in outputs.items():
            (Path(folder) / f"{name}.txt").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write: {error.strerror}", where=folder, hint="check the path") from error


def read_outputs(folder: str) -> dict[str, str]:
    """What `save_outputs` wrote, or files of these names made by hand. Raises: UsageError where none is there."""
    found = {}
    for name in (*COMMANDS, "nccl"):
        try:
            with (Path(folder) / f"{name}.txt").open(encoding="utf-8", errors="replace") as file:
                found[name] = file.read(MAX_BYTES)
        except OSError:
            continue
    if not found:
        names = ", ".join(f"{name}.txt ({' '.join(argv)})" for name, argv in COMMANDS.items())
        raise UsageError("none of the outputs is there", where=folder, hint=f"some of {names}, nccl.txt")
    return found
