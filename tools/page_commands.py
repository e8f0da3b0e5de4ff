"""Runs the commands that pages show, as they stand: `python tools/page_commands.py check|write [--all] PAGE...` (default: every page of docs/).

`check` says where a page differs from what is printed today, `write` puts that into the page. Each page has a folder of its own:
    what lies in tools/page_inputs/PAGE is copied there first (files that the page's reader has; `bin/`: programs of other machines),
    a block ```LANGUAGE title="FILE"``` is written to FILE,
    a block ```console``` has lines `$ meshwright ...` or `$ python ...` (`\\` continues a line, `&` starts a server, which ends with the page; `|`
    and other programs go through bash), each followed by what it prints; both streams,
    ```python``` blocks without a title are run in turn, in one namespace, after `before.py` of the page's inputs and after its commands,
    what tools/page_inputs/pages.toml names is run with --all only, or nowhere; each entry has its reason,
    start page, how-to and method pages show all that is printed; on other pages a command may stand without what it prints,
    a line `...` stands for lines left out (at the end: `write` puts the first lines before it),
    `<!-- measured -->` before a block: its times differ in each run, so numbers are not compared (and of what ends in `...` only the first line),
    and `write` leaves the block alone where all else is equal,
    `<!-- exit 3 -->` before a block: its last command ends with this code; all others with 0,
    `<!-- lab -->` before a block: it needs root and network namespaces; without them the page's blocks of this kind are left out, and that is said.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INPUTS = Path(__file__).with_name("page_inputs")
NOTE = r"(?:^ *<!-- (?P<note>(?:(?:measured|lab|exit \d+) )+)-->\n)?"
BLOCK = re.compile(NOTE + r"^(?P<indent> *)```(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
SHELL = {"cat", "torchrun", "nvidia-smi", "rocm-smi", "kubectl", "scontrol"}  # programs that pages show beside ours
COMMAND_LIMIT_S = 900
SERVER_LIMIT_S = 60
OF_THE_MACHINE = re.compile(r"measured \d+ of \d+ links|note: other programs used \d+ % of the machine")  # lines that measurements have at times
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


@dataclass(frozen=True)
class Page:
    """How the blocks of one page are run."""

    strict: bool = True  # every command shows what it prints
    apart: tuple[str, ...] = ()  # beginnings of commands that are left out, "python" for the page's Python


def pages() -> list[Path]:
    """Those that show all that is printed: start, how-to and method pages."""
    return [ROOT / "docs" / "start.md", *sorted((ROOT / "docs" / "howto").glob("*.md")), *sorted((ROOT / "docs" / "methods").glob("*.md"))]


def other_pages() -> list[Path]:
    """All others with commands or Python; what `tools/reference.py` writes shows none."""
    return sorted(p for p in (ROOT / "docs").glob("*.md") if p not in pages() and re.search(r"```(console|python)", p.read_text(encoding="utf-8")))


def inputs_of(page: Path) -> dict[str, Any]:
    """What tools/page_inputs/pages.toml says of a page."""
    said: dict[str, Any] = tomllib.loads((INPUTS / "pages.toml").read_text(encoding="utf-8")).get(page.stem, {})
    return said


def how(page: Path, everything: bool) -> Page:
    """Strict pages run whole; of others the commands that the list leaves out are not run."""
    if page in pages():
        return Page()
    said = inputs_of(page)
    return Page(strict=False, apart=tuple(said.get("elsewhere", {})) + (() if everything else tuple(said.get("dear", {}))))


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


def ran(command: str, servers: list[subprocess.Popen[str]]) -> tuple[int, list[str]]:
    """Exit code and both streams, blank lines at the end left out; a server is put into `servers`."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    shell = words[0] in SHELL or "=" in words[0] or bool({"|", "&", ";"} & set(words))
    if not shell and words[0] not in ("meshwright", "python"):
        raise ValueError(f"a page shows a command that is not run: {command}")
    if words[-1] == "&":
        servers.append(subprocess.Popen([sys.executable, "-m", *words[:-1]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        select.select([servers[-1].stdout], [], [], SERVER_LIMIT_S)  # until it says where it listens, or ends
        return servers[-1].poll() or 0, []
    if shell or words[0] == "python" or words[:2] == ["meshwright", "lab"]:  # a lab writes bytes, not text
        program = ["bash", "-c", command] if shell else [sys.executable, *(words[1:] if words[0] == "python" else ["-m", *words])]
        done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_LIMIT_S, check=False)
        return done.returncode, done.stdout.rstrip().splitlines()
    from meshwright.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words[1:])
    return code, [line.rstrip() for line in out.getvalue().rstrip().splitlines()]


def as_shown(said: Said, measured: bool) -> list[str]:
    """What the page should say: what was printed, cut where the page cuts; the page's own lines where they differ in measured numbers or in where
    a line was broken only."""
    shown = list(said.shown)
    while shown and not shown[-1]:
        shown.pop()
    printed = said.printed
    if "..." in shown[:-1]:
        printed = cut(shown, printed) or printed
    elif shown[-1:] == ["..."]:
        printed = [*printed[: len(shown) - 1 or FIRST_LINES], "..."]
    if measured and shown[-1:] == ["..."]:  # which rows follow depends on the times
        return shown if masked(shown[:FIRST_COMPARED]) == masked(printed[:FIRST_COMPARED]) else printed
    same = masked(shown) == masked(printed) if measured else " ".join(shown).split() == " ".join(printed).split()
    return shown if same else printed


def cut(shown: list[str], printed: list[str]) -> list[str] | None:
    """What is printed at the places of the parts between `...`, found by their words; None where one is not found."""
    lines: list[str] = []
    at = 0
    for part in [list(rows) for dots, rows in itertools.groupby(shown, key=lambda line: line == "...") if not dots]:
        places = [place for i in range(at, len(printed)) if (place := found_at(part, printed, i))]
        if not places or (not lines and shown[0] != "..." and places[0][0]):
            return None
        first, at = next((place for place in places if printed[slice(*place)] == part), places[0])
        lines += [*(["..."] if lines or shown[0] == "..." else []), *printed[first:at]]
    return [*lines, *(["..."] if shown[-1] == "..." else [])]


def found_at(part: list[str], printed: list[str], first: int) -> tuple[int, int] | None:
    """The lines from `first` on that have the part's words, however they are broken."""
    words = masked(part)
    for end in range(first + 1, len(printed) + 1):
        found = masked(printed[first:end])
        if found == words:
            return first, end
        if len(found) > len(words):
            break
    return None


def masked(lines: Iterable[str]) -> list[str]:
    """Words, numbers and columns left out, and how often a measurement was repeated."""
    return NUMBER.sub("#", " ".join(" ".join(line.split()) for line in lines if not OF_THE_MACHINE.match(line))).split()


def has_lab() -> bool:
    """As the tests of the lab ask."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    return subprocess.run(["unshare", "-n", "true"], check=False, capture_output=True).returncode == 0


def page_today(text: str, report: list[str], how: Page = Page()) -> str:
    """The page with what its commands print today, run in the current folder; what went wrong and what was left out goes to `report`."""
    servers: list[subprocess.Popen[str]] = []
    python: list[str] = []

    def today(block: re.Match[str]) -> str:
        head, body, note, indent = block["head"], block["body"], block["note"] or "", block["indent"]
        body = re.sub(f"^{indent}", "", body, flags=re.MULTILINE)
        if title := re.search(r'title="([^"]+)"', head):
            Path(title[1]).write_text(body, encoding="utf-8")
        elif head.split()[:1] == ["python"] and not how.strict:
            python.append(body)
        if head.split()[:1] != ["console"]:
            return block[0]
        if "lab" in note and not has_lab():
            report.append("left out: a block that needs root and network namespaces")
            return block[0]
        lines: list[str] = []
        commands = shown_commands(body)
        for i, (command, shown) in enumerate(commands):
            last = i == len(commands) - 1
            lines.append(f"$ {command}")
            if command.startswith(how.apart or "\n"):
                report.append(f"left out: {command.splitlines()[0]}")
                lines += shown
                continue
            begin = sum(os.times()[:4])
            code, printed = ran(command, servers)
            said = Said(command, shown, printed, code, sum(os.times()[:4]) - begin)
            wanted = int(note.split("exit")[1].split()[0]) if "exit" in note and last else 0
            if code != wanted:
                report.append(f"wrong: exit code {code}, not {wanted}: {command}\n" + "\n".join(printed[-8:]))
            if "PAGE_TIMES" in os.environ:
                print(f"{said.cpu_s:6.2f} s  {command}", file=sys.stderr)
            wanted_lines = as_shown(said, "measured" in note) if how.strict or any(shown) else []
            same = wanted_lines == [line for i, line in enumerate(shown) if any(shown[i:])]
            lines += shown if same else [*wanted_lines, *([""] if not last and printed else [])]
        block_today = [head, *lines, ""]
        return block[0][: block.start("head") - block.start()] + f"\n{indent}".join(block_today) + "```"

    try:
        today_text = BLOCK.sub(today, text)
        if python and "python" not in how.apart:
            run_python(python, report)
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    return today_text


def run_python(blocks: list[str], report: list[str]) -> None:
    """All of a page in one namespace, as a reader would type them."""
    names: dict[str, object] = {"__name__": "page"}
    begin = sum(os.times()[:4])
    before = Path("before.py")
    with contextlib.redirect_stdout(io.StringIO()):
        for i, body in enumerate([before.read_text(encoding="utf-8") if before.is_file() else "", *blocks]):
            try:
                exec(compile(body, f"block {i}", "exec"), names)
            except Exception as error:
                line = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == f"block {i}"]
                report.append(f"wrong: Python block {i}, line {line[-1] if line else '?'}: {type(error).__name__}: {error}")
                break
        if callable(end := names.get("end")):
            end()
    if "PAGE_TIMES" in os.environ:
        print(f"{sum(os.times()[:4]) - begin:6.2f} s  python", file=sys.stderr)


def run_page(page: Path, write: bool, everything: bool = False) -> list[str]:
    """What is wrong with the page, and what was left out."""
    report: list[str] = []
    text = page.read_text(encoding="utf-8")
    here, outer = Path.cwd(), dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        for name in ("examples", "benchmarks"):
            Path(folder, name).symlink_to(ROOT / name)
        if (inputs := INPUTS / page.stem).is_dir():
            shutil.copytree(inputs, folder, dirs_exist_ok=True)
        bin_folder = Path(folder, "bin")
        bin_folder.mkdir(exist_ok=True)
        Path(folder, "docs").mkdir(exist_ok=True)
        for program, module in {"meshwright": "meshwright", "torchrun": "torch.distributed.run"}.items():
            (bin_folder / program).write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n', encoding="utf-8")
            (bin_folder / program).chmod(0o755)
        rules, given = how(page, everything), inputs_of(page)
        for name, source in given.get("files", {}).items():
            shutil.copy(ROOT / source, Path(folder, name))
        os.chdir(folder)
        os.environ |= {"PATH": f"{bin_folder}{os.pathsep}{outer['PATH']}", "MESHWRIGHT_CACHE": str(Path(folder, ".plans"))}
        try:
            for command in given.get("before", []) if "before" not in rules.apart else []:
                code, printed = ran(command, [])
                report += [f"wrong: exit code {code} before the page: {command}", *printed[-8:]] if code else []
            today = page_today(text, report, rules)
            for command in given.get("after", []) if everything else []:
                ran(command, [])
        finally:
            os.chdir(here)
            os.environ |= {name: outer[name] for name in ("PATH", "MESHWRIGHT_CACHE")}
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
    named = [Path(w).resolve() for w in words[1:] if w != "--all"]
    for page in named or [*pages(), *other_pages()]:
        report = run_page(page, words[0] == "write", "--all" in words)
        wrong |= any(line.startswith("wrong:") for line in report)
        print("\n".join([f"{page.relative_to(ROOT)}:", *report] if report else [f"{page.relative_to(ROOT)}: as today"]), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:2] not in (["check"], ["write"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
