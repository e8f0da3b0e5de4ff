"""Batches of `ip`, `tc` and sysctl lines, run inside a lab by its first process; what failed is told in words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from . import namespaces as ns

__all__ = ["HERE", "run_batches"]

HERE = Path("/run/netns")


def run_batches(batches: list[list[Any]]) -> dict[str, Any] | None:
    """Run (tool, namespace, lines) in order. Returns what failed: {"command", "message"}; None when nothing did."""
    for tool, namespace, lines in batches:
        if tool == "sysctl":
            problem = _sysctl(namespace, [words[0] for words in lines])
        else:
            problem = _batch(tool, namespace, lines)[1]
        if problem is not None:
            return problem
    return None


def _batch(tool: str, namespace: str, lines: list[list[str]]) -> tuple[str, dict[str, Any] | None]:
    command = [tool, *(["-n", namespace] if namespace else []), "-batch", "-"]
    text = "".join(" ".join(words) + "\n" for words in lines)
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        return "", {"command": tool, "message": str(error.strerror)}
    if done.returncode == 0:
        return done.stdout, None
    at = done.stderr.rpartition("Command failed -:")[2].strip()
    line = lines[int(at) - 1] if at.isdigit() and 0 < int(at) <= len(lines) else []
    message = " ".join(x for x in done.stderr.splitlines() if not x.startswith("Command failed"))
    return done.stdout, {"command": " ".join([*command[:-2], *line]), "message": message or f"exit {done.returncode}"}


def _sysctl(namespace: str, settings: list[str]) -> dict[str, Any] | None:
    """Written by a child inside the namespace, because /proc/sys/net shows the settings of whoever looks."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ns.setns(os.open(HERE / namespace, os.O_RDONLY), ns.NEWNET)
            for setting in settings:
                key, _, value = setting.partition("=")
                Path("/proc/sys", key.replace(".", "\0").replace("/", ".").replace("\0", "/")).write_text(value)
            os._exit(0)
        except OSError as error:
            os.write(write, f"{setting}: {error.strerror}".encode())
        finally:
            os._exit(1)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        message = pipe.read().decode()
    os.waitpid(child, 0)
    return {"command": f"sysctl -w in {namespace}", "message": message} if message else None
