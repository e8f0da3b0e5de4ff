"""Plays the Dockerfile without a container engine: `tools/dockerfile_play.py ROOTFS --python PREFIX [--arg NAME=VALUE ...] [-- COMMAND...]`.

Needs root. ROOTFS is a fresh Debian with what Python needs:
    debootstrap --variant=minbase --include=ca-certificates,libssl3,libffi8,libsqlite3-0,netbase,tzdata bookworm ROOTFS
PREFIX is an installed Python that stands at /usr/local in it. They take the place of `FROM python:...-slim`. Every stage is an overlay over ROOTFS.
COPY, RUN, ENV, ARG, USER and WORKDIR are carried out as they stand, RUN in a chroot with the machine's network and pip's configuration. Then each
COMMAND (default: a few that need no model) runs as the image's user in a mount namespace of its own: the root is read-only, /tmp is a small file
system in memory, and there is no network. Exit code 1 if any fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANDED_ON = ("/etc/pip.conf", "/etc/xdg/pip", "/etc/ssl/certs", "/etc/resolv.conf", "/opt/wheels")  # so that pip finds packages
SHOWN = (
    ["--version"], ["fabric", "list"], ["collective", "bound", "all-gather", "--fabric", "dgx-h100:2", "--size", "1GiB"],
    ["collective", "plan", "all-reduce", "--fabric", "two-islands:2", "--size", "64KiB", "--strategy", "ring", "--out", "/tmp/plan.json"],
)  # fmt: skip


@dataclass
class Stage:
    """One FROM: where its root is mounted and what its instructions have set."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0"
    entry: list[str] = field(default_factory=list)

    def filled(self, text: str) -> str:
        values = {**self.arguments, **self.environment}
        return re.sub(r"\$\{?(\w+)\}?", lambda m: values.get(m[1], ""), text)


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, rest) of every instruction; a line that ends in a backslash goes on."""
    joined = re.sub(r"\\\n", "", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    return [(word.upper(), rest) for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines() if line.strip())]


def mounted(work: Path, name: str, base: Path, python: Path) -> Path:
    """An overlay over a system, with Python and what this machine hands on bound into it."""
    upper, inner, root = (work / f"{name}-{part}" for part in ("upper", "inner", "root"))
    for folder in (upper, inner, root):
        folder.mkdir()
    options = f"lowerdir={base},upperdir={upper},workdir={inner}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(root)], check=True)
    for place, name in ((python, "usr/local"), *((Path(p), p.lstrip("/")) for p in HANDED_ON)):
        if place.exists():
            target = root / name
            (target if place.is_dir() else target.parent).mkdir(parents=True, exist_ok=True)
            if place.is_file():
                target.touch()
            subprocess.run(["mount", "--bind", "-o", "ro", str(place), str(target)], check=True)
    subprocess.run(["chroot", str(root), "/sbin/ldconfig"], check=True)  # Python's own library is found
    return root


def copied(stage: Stage, rest: str, stages: dict[str, Stage]) -> None:
    """COPY, from this repository or from another stage. Sources that are folders are copied by content, as Docker does."""
    words = shlex.split(stage.filled(rest))
    origin = stages[words.pop(0).partition("=")[2]].root if words[0].startswith("--from=") else ROOT
    *sources, target = words
    goal = stage.root / str(Path(stage.folder) / target).lstrip("/")
    for source in (origin / s.lstrip("/") for s in sources):
        if source.is_dir():
            shutil.copytree(source, goal, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            goal.mkdir(parents=True, exist_ok=True) if target.endswith(("/", ".")) else goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, goal)


def build(text: str, base: Path, python: Path, work: Path, given: dict[str, str]) -> Stage:
    """Carries out the Dockerfile; the last stage. Raises: CalledProcessError of a RUN; ValueError for an instruction it does not know."""
    stages: dict[str, Stage] = {}
    before: dict[str, str] = {}
    stage: Stage | None = None
    for word, rest in instructions(text):
        print(f"{word} {rest}", flush=True)
        if word == "FROM":
            _, _, name = rest.partition(" AS ")
            stage = Stage(mounted(work, name or "final", base, python))
            stages[name or "final"] = stage
        elif word == "ARG":
            name, _, value = rest.partition("=")
            (before if stage is None else stage.arguments)[name] = given.get(name, value)
        elif stage is None:
            raise ValueError(f"{word} before FROM")
        elif word == "COPY":
            copied(stage, rest, stages)
        elif word == "RUN":
            handed = {k: v for k, v in os.environ.items() if re.match(r"PIP_|SSL_|.*_proxy$", k, re.IGNORECASE)}
            environment = {**handed, **stage.environment, **stage.arguments, "HOME": "/root"}
            subprocess.run(["chroot", str(stage.root), "/bin/sh", "-ec", f"cd {shlex.quote(stage.folder)}; {rest}"], env=environment, check=True)
        elif word == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "ENV":
            name, _, value = rest.partition("=")
            stage.environment[name] = stage.filled(value)
        elif word == "USER":
            stage.user = rest
        elif word in ("ENTRYPOINT", "CMD"):
            stage.entry = re.findall(r'"([^"]*)"', rest) if word == "ENTRYPOINT" else stage.entry
        else:
            raise ValueError(f"cannot play {word}")
    assert stage is not None
    return stage


def run(stage: Stage, command: list[str]) -> int:
    """As `docker run --read-only --tmpfs /tmp --network none`."""
    asked = f"cd {stage.folder}; exec {shlex.join([*stage.entry, *command])}"
    inside = shlex.join(["chroot", f"--userspec={stage.user}:{stage.user}", ".", "/bin/sh", "-c", asked])
    script = (
        f"mount --rbind {stage.root} /mnt && cd /mnt && mount -t tmpfs -o size=256m,mode=1777 tmpfs tmp && mount -t proc proc proc && "
        f"mount -o remount,bind,ro /mnt && cd /mnt && {inside}"
    )
    environment = {**stage.environment, "HOME": "/home/meshwright"}
    return subprocess.run(["unshare", "--mount", "--net", "--pid", "--fork", "/bin/sh", "-c", script], env=environment, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="Plays the Dockerfile without a container engine.")
    parser.add_argument("rootfs", type=Path, help="a fresh Debian, made by debootstrap")
    parser.add_argument("--python", type=Path, required=True, metavar="PREFIX", help="an installed Python, e.g. /opt/python3.11")
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="as docker build --build-arg")
    words, command = (sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]) if "--" in sys.argv else (sys.argv[1:], [])
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dockerfile-", ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        try:
            given = dict(a.split("=", 1) for a in args.arg)
            stage = build((ROOT / "Dockerfile").read_text(encoding="utf-8"), args.rootfs.resolve(), args.python.resolve(), work, given)
            codes = []
            for shown in [command] if command else SHOWN:
                print(f"$ {shlex.join([*stage.entry, *shown])}", flush=True)
                codes.append(run(stage, shown))
        finally:
            for root in work.glob("*-root"):
                subprocess.run(["umount", "--lazy", "--recursive", str(root)], check=False)
    print(f"{codes.count(0)} of {len(codes)} commands ended well as user {stage.user} on a read-only root")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
