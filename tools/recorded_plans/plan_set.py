"""The plans that are recorded: `cases.txt`, and every plan that README.md and docs/*.md show with its command.

A case is a chain of commands that run in one folder; the last one makes the plan. Of a page's command the chain holds the earlier commands of that
page that write the files it reads. `cases.txt` names by section what each kind has, what pages take for granted (`before`) and which of their
commands are left out, with the reason.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KINDS = ("collective", "pipeline", "layout", "memory", "traffic")
PAGES = "pages"
NO_CLOCK = ("--time-limit", "100000")  # a search that stops by the clock makes other plans on a busy machine

# The commands that make plans: where each writes when it is not told; "": nowhere, so it is told to; None: only what it prints can be recorded.
PLANS: dict[tuple[str, str], str | None] = {
    ("collective", "plan"): "", ("collective", "groups"): "", ("collective", "replan"): None, ("collective", "sparse"): "",
    ("pipeline", "plan"): "pipeline.json", ("pipeline", "fill"): "filled.json", ("layout", "plan"): "layout.json", ("layout", "search"): None,
    ("memory", "plan"): None, ("memory", "pack"): None, ("traffic", "plan"): "", ("train", "plan"): "plan.json", ("train", "replan"): "plan.json",
    ("profile", "plan"): None,
}  # fmt: skip
MAKERS = {("train", "capture"): "graph.json", ("fabric", "import"): "", ("fabric", "subset"): ""}  # of files that plans are made from
BY_CLOCK = {("pipeline", "plan"), ("layout", "plan"), ("train", "plan"), ("train", "replan")}  # others count work, unless told a time limit
OUT = ("--out", "-o", "--output")
BESIDE = {"--measure"}  # measures on this machine, beside the plan


class SetError(Exception):
    """The list of plans does not fit the pages."""


@dataclass(frozen=True)
class Command:
    """Words behind `meshwright`; `out`: the file it writes, "" where what it prints is recorded."""

    words: tuple[str, ...]
    out: str

    @property
    def verb(self) -> tuple[str, str]:
        return self.words[0], self.words[1]

    @property
    def torch(self) -> bool:
        return "--model" in self.words or "-m" in self.words or self.verb == ("layout", "plan")

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Case:
    kind: str
    chain: tuple[Command, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.chain))


def command(line: str) -> Command | None:
    """As it is run for the record; None when it makes neither a plan nor what plans are made from."""
    words = [w for w in shlex.split(line, comments=True) if w not in BESIDE]
    verb = (words[0], words[1]) if len(words) > 1 else ("", "")
    if verb not in PLANS and verb not in MAKERS:
        return None
    given = [words[i + 1] for i, w in enumerate(words[:-1]) if w in OUT]
    if given:
        out = given[-1]
    else:
        default = (MAKERS | PLANS)[verb]
        if verb == ("memory", "plan") and "--model" in words:
            default = ""
        out = default or ""
        if default == "":
            out = "out.json"
            words += ["--out", out]
        elif default is None:
            words.append("--json")
    if verb in BY_CLOCK and "--time-limit" not in words:
        words += NO_CLOCK
    return Command(tuple(words), out)


def listed() -> tuple[dict[str, list[str]], dict[str, list[tuple[str, str]]]]:
    """The sections of cases.txt: lines of commands by kind; by `before` and `left out`, (page, text) pairs."""
    commands: dict[str, list[str]] = {kind: [] for kind in KINDS}
    pages: dict[str, list[tuple[str, str]]] = {"before": [], "left out": []}
    section = ""
    for line in (HERE / "cases.txt").read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            if section in commands:
                commands[section].append(line)
            else:
                page, _, text = line.partition(": ")
                pages[section].append((page, text))
    return commands, pages


def case(kind: str, lines: list[str]) -> Case:
    chain = [command(line) for line in lines]
    if None in chain:
        raise SetError(f"makes no plan: {'; '.join(lines)}")
    return Case(kind, tuple(c for c in chain if c is not None))


def shown(page: Path) -> list[str]:
    """The commands behind `$ meshwright` on a page, lines that go on with a backslash joined."""
    text = re.sub(r"\\\n\s*", " ", page.read_text(encoding="utf-8"))
    return re.findall(r"^ *\$ meshwright (.*)$", text, re.MULTILINE)


def of_page(name: str, lines: list[str], before: list[str], left_out: list[str]) -> list[Case]:
    """The plans of one page, each with what makes the files that it reads."""
    made: dict[str, tuple[Command, ...]] = {}  # file -> the chain that ends with what wrote it last
    found = []

    def chain_of(line: str) -> tuple[Command, ...]:
        c = command(line)
        if c is None:
            return ()
        needs = [made[w] for w in c.words if w in made and w != c.out]
        chain = (*dict.fromkeys(x for need in needs for x in need), c)
        made[c.out] = chain
        return chain

    for line in before:
        chain_of(line)
    for line in lines:
        if any(line.startswith(x) for x in left_out):
            continue
        chain = chain_of(line)
        if chain and chain[-1].verb in PLANS:
            found.append(Case(PAGES, chain))
    stale = [x for x in left_out if not any(line.startswith(x) for line in lines)]
    if stale:
        raise SetError(f"{name} no longer shows what cases.txt leaves out: {stale[0]}")
    return found


def plan_set() -> list[Case]:
    """All cases, each once. Raises: SetError when cases.txt and the pages do not fit."""
    commands, texts = listed()
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    names = {p.relative_to(ROOT).as_posix(): p for p in pages}
    unknown = [page for section in texts.values() for page, _ in section if page not in names]
    if unknown:
        raise SetError(f"cases.txt names {unknown[0]}, which is no page")
    found = [
        c
        for name, path in names.items()
        for c in of_page(
            name, shown(path), [t for p, t in texts["before"] if p == name], [t.split(" | ")[0] for p, t in texts["left out"] if p == name]
        )
    ]
    found += [case(kind, line.split("; ")) for kind in KINDS for line in commands[kind]]
    return list({alike(c): c for c in reversed(found)}.values())[::-1]


def alike(case: Case) -> tuple[tuple[str, ...], ...]:
    """The same for cases that differ in names of files only that they write."""
    names = {c.out: f"#{i}" for i, c in enumerate(case.chain)}
    return tuple(tuple(names.get(w, w) for w in c.words) for c in case.chain)
