"""Runs the commands that pages show, as they stand: `python tools/page_commands.py check|write PAGE...` (default: start.md and howto/*.md of docs/).

`check` says where a page differs from what is printed today, `write` puts that into the page. Each page has a folder of its own:
    a block ```LANGUAGE title="FILE"``` is written to FILE,
    a block ```console``` has lines `$ meshwright ...` or `$ python ...` (`\\` continues a line), each followed by what it prints; both streams,
    a line `...` stands for the rest of what is printed (alone: `write` puts the first lines before it),
    `<!-- measured -->` before a block: its times differ in each run, so numbers are not compared (and of what ends in `...` only the first line),
    and `write` leaves the block alone where all else is equal,
    `<!-- exit 3 -->` before a block: its last command ends with this code; all others with 0,
    `<!-- lab -->` before a block: it needs root and network namespaces; without them the page's blocks of this kind are left out, and that is said.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTE = r"(?:^<!-- (?P<note>measured|lab|lab measured|exit \d+) -->\n)?"
BLOCK = re.compile(NOTE + r"^```(?P<head>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRESS = re.compile(r"measured \d+ of \d+ links")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?: ?(?:n|u|m)?s\b| ?[kMGT]?i?B(?:/s)?\b)?")
COLUMNS = "80"
FIRST_LINES = 8  # before a `...` that stands alone
FIRST_COMPARED = 1  # of a measured block that ends in `...`


@dataclass(frozen=True)
class Said:
    """One command of a block, what the page says it prints, and what it printed with which exit code."""

    command: str
    shown: list[str]
    printed: list[str]
    code: int
    cpu_s: float


def pages() -> list[Path]:
    """Those that are run: all blocks of these run as they stand."""
    return [ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "howto").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]


def shown_commands(body: str) -> list[tuple[str, list[str]]]:
    """(command, lines below it) of a console block."""
    found: list[tuple[str, list[str]]] = []
    for line in body.splitlines():
        if found and found[-1][0].endswith("\\") and not found[-1][1]:
            found[-1] = (found[-1][0] + "\n" + line, [])
        elif line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
        else:
            raise ValueError(f"a console block begins with what is no command: {line!r}")
    return found


def ran(command: str) -> tuple[int, list[str]]:
    """Exit code and both streams, blank lines at the end left out."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    if words[0] == "python" or words[:2] == ["meshwright", "lab"]:  # a lab writes bytes, not text
        program = words[1:] if words[0] == "python" else ["-m", *words]
        done = subprocess.run([sys.executable, *program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, check=False)
        return done.returncode, done.stdout.rstrip().splitlines()
    if words[0] != "meshwright":
        raise ValueError(f"a page shows a command that is not run: {command}")
    from meshwright.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words[1:])
    return code, [line.rstrip() for line in out.getvalue().rstrip().splitlines()]


def as_shown(said: Said, measured: bool) -> list[str]:
    """What the page should say: what was printed, cut where the page cuts; the page's own lines where they differ in measured numbers only."""
    printed = said.printed
    if said.shown[-1:] == ["..."]:
        printed = [*printed[: len(said.shown) - 1 or FIRST_LINES], "..."]
    shown = list(said.shown)
    while shown and not shown[-1]:
        shown.pop()
    if measured and shown[-1:] == ["..."]:  # which rows follow depends on the times
        return shown if masked(shown)[:FIRST_COMPARED] == masked(printed)[:FIRST_COMPARED] else printed
    return shown if measured and masked(shown) == masked(printed) else printed


def masked(lines: Iterable[str]) -> list[str]:
    """Numbers and columns left out, and how often a measurement was repeated."""
    return [" ".join(NUMBER.sub("#", line).split()) for line in lines if not PROGRESS.match(line)]


def has_lab() -> bool:
    """As the tests of the lab ask."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


def page_today(text: str, report: list[str]) -> str:
    """The page with what its commands print today, run in the current folder; what went wrong and what was left out goes to `report`."""

    def today(block: re.Match[str]) -> str:
        head, body, note = block["head"], block["body"], block["note"] or ""
        if title := re.search(r'title="([^"]+)"', head):
            Path(title[1]).write_text(body, encoding="utf-8")
        if head.split()[:1] != ["console"]:
            return block[0]
        if note.startswith("lab") and not has_lab():
            report.append("left out: a block that needs root and network namespaces")
            return block[0]
        lines: list[str] = []
        commands = shown_commands(body)
        for i, (command, shown) in enumerate(commands):
            begin = time.process_time()
            code, printed = ran(command)
            said = Said(command, shown, printed, code, time.process_time() - begin)
            wanted = int(note.split()[1]) if note.startswith("exit") and i == len(commands) - 1 else 0
            if code != wanted:
                report.append(f"wrong: exit code {code}, not {wanted}: {command}\n" + "\n".join(printed[-8:]))
            if "PAGE_TIMES" in os.environ:
                print(f"{said.cpu_s:6.2f} s  {command}", file=sys.stderr)
            lines += [f"$ {command}", *as_shown(said, "measured" in note), *([""] if i < len(commands) - 1 and printed else [])]
        return block[0][: block.start("head") - block.start()] + head + "\n" + "\n".join(lines) + "\n```"

    return BLOCK.sub(today, text)


def run_page(page: Path, write: bool) -> list[str]:
    """What is wrong with the page, and what was left out."""
    report: list[str] = []
    text = page.read_text(encoding="utf-8")
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        for name in ("examples", "benchmarks"):
            Path(folder, name).symlink_to(ROOT / name)
        os.chdir(folder)
        try:
            today = page_today(text, report)
        finally:
            os.chdir(here)
    if today != text:
        if write:
            page.write_text(today, encoding="utf-8")
            report.append("written anew")
        else:
            report.append("wrong: it prints something else today; `python tools/page_commands.py write` puts it into the page:")
            report += difflib.unified_diff(text.splitlines(), today.splitlines(), "the page", "today", lineterm="", n=1)
    return report


def main(words: list[str]) -> int:
    os.environ["COLUMNS"] = COLUMNS
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    sys.path.insert(0, str(ROOT / "src"))
    os.environ["MESHWRIGHT_CACHE"] = "0"
    os.environ["MESHWRIGHT_PROGRESS"] = "0"  # when a line of it comes depends on the machine
    os.environ["KINETO_LOG_LEVEL"] = "6"  # torch's profiler says nothing on stderr
    wrong = False
    for page in [Path(w).resolve() for w in words[1:]] or pages():
        report = run_page(page, write=words[0] == "write")
        wrong |= any(line.startswith("wrong:") for line in report)
        print("\n".join([f"{page.relative_to(ROOT)}:", *report] if report else [f"{page.relative_to(ROOT)}: as today"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] not in (["check"], ["write"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
