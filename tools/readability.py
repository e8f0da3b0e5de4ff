"""How hard pages are to read: `python tools/readability.py [--json] FOLDER|PAGE...` (default: this repository's pages), one line a page.

Code, tables, headings, links' addresses and front matter are left out; a list item or table cell is no sentence unless it ends like one.
    sentences, mean, p90   words a sentence, mean and 90th percentile
    passive                share of sentences with a form of "be" (or "get") and a past participle after it, up to three words later
    unexplained            share of words that are jargon and are neither linked or defined on the page nor in the folder's glossary.md.
                           Jargon: words of four letters or more that are rare in general English (not in this file's small list of endings and
                           stems of common words) and stand on at most a tenth of all pages measured together.
The passive is found by pattern: some adjectives ("is connected") count too, for all pages alike. Markdown (.md) and reStructuredText (.rst).
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
IRREGULAR = (
    "been|begun|bound|broken|brought|built|bought|chosen|cut|done|drawn|driven|fed|found|frozen|given|gone|grown|held|hidden|kept|known|laid|led|left|"
    "lost|made|meant|met|paid|proven|put|read|run|said|seen|sent|set|shown|shut|split|spread|taken|taught|thought|thrown|told|understood|won|written"
)
PASSIVE = re.compile(rf"\b(?:is|are|was|were|be|been|being|gets?|got)\b(?:\s+\w+){{0,2}}?\s+(?:\w{{2,}}ed|{IRREGULAR})\b", re.IGNORECASE)


@dataclass(frozen=True)
class Figures:
    page: str
    sentences: int
    words: int
    mean: float
    p90: int
    passive: float
    unexplained: float


def prose(text: str, rst: bool = False) -> str:
    """What is read as sentences."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^([ ]*)(```+|~~~+).*?^\1\2\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    if rst:
        text = re.sub(r"^\.\. .*(?:\n(?:[ \t]+.*)?)*", "", text, flags=re.MULTILINE)
        text = re.sub(r"::\n\n(?:[ \t]+.*\n|\n)+", ".\n\n", text)
        text = re.sub(r"^.*\n([=\-~^\"'#*+])\1{2,}$", "", text, flags=re.MULTILINE)
        text = re.sub(r":\w+:`([^`<]*?)\s*(?:<[^>]*>)?`", r"\1", text)
    text = re.sub(r"^\s*\|.*$|^#.*$|^!!!.*$|^:::.*$|^=== .*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|<[^>]+>", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`+", "CODE", text)
    text = re.sub(r"^\s*(?:[-*+]|\d+[.)])\s+", "\n\n", text, flags=re.MULTILINE)
    return re.sub(r"[*_]{1,2}(\S(?:.*?\S)?)[*_]{1,2}", r"\1", text)


def sentences(text: str) -> list[str]:
    """Of prose: paragraphs cut at the end of sentences. A colon ends one where a new line of thought or a list follows."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"'(])|(?<=:)\s*$", flat):
            if len(WORD.findall(part)) >= 3:
                found.append(part)
    return found


def stem(word: str) -> str:
    word = word.lower().removesuffix("'s")
    for end in ("ations", "ation", "ings", "ing", "ies", "ed", "es", "s"):
        if word.endswith(end) and len(word) - len(end) >= 4:
            return word[: -len(end)]
    return word


def explained(text: str) -> set[str]:
    """Stems of words that the page links, sets bold or italic, puts in a heading, or explains in brackets right after."""
    marked = re.findall(r"\[([^\]]+)\]\([^)]*\)|\*\*([^*]+)\*\*|\*([^*\n]+)\*|^#+ (.+)$|(\w+) \([a-z][^)]{15,}\)", text, re.MULTILINE)
    return {stem(w) for groups in marked for g in groups for w in WORD.findall(g)}


def pages_of(place: Path) -> list[Path]:
    return sorted(p for p in place.rglob("*") if p.suffix in (".md", ".rst")) if place.is_dir() else [place]


def measured(pages: list[Path], common: Counter[str], total: int, glossary: set[str], root: Path) -> list[Figures]:
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8", errors="replace")
        said = sentences(prose(text, page.suffix == ".rst"))
        if len(said) < 5:
            continue
        lengths = sorted(len(WORD.findall(s)) for s in said)
        words = [w for s in said for w in WORD.findall(s) if w != "CODE" and len(w) >= 4]
        known = explained(text) | glossary
        jargon = [w for w in words if common[stem(w)] <= total // 10 and stem(w) not in known]
        found.append(
            Figures(
                page=page.relative_to(root).as_posix() if page.is_relative_to(root) else page.name, sentences=len(said), words=sum(lengths),
                mean=round(sum(lengths) / len(said), 1), p90=lengths[int(0.9 * (len(said) - 1))],
                passive=round(sum(bool(PASSIVE.search(s)) for s in said) / len(said), 3), unexplained=round(len(jargon) / max(1, len(words)), 3),
            )
        )  # fmt: skip
    return found


def together(name: str, figures: list[Figures]) -> Figures:
    """Of a set: weighted by sentences; p90 is the median of the pages'."""
    total = sum(f.sentences for f in figures)

    def weighted(field: str) -> float:
        return sum(getattr(f, field) * f.sentences for f in figures) / max(1, total)

    p90 = sorted(f.p90 for f in figures)[len(figures) // 2]
    words = sum(f.words for f in figures)
    return Figures(name, total, words, round(words / max(1, total), 1), p90, round(weighted("passive"), 3), round(weighted("unexplained"), 3))


def compared(sets: dict[str, list[Path]]) -> dict[str, list[Figures]]:
    """Figures of every set of pages; which words are rare is found over all of them together, every set with the same weight."""
    texts = {name: {p: p.read_text(encoding="utf-8", errors="replace") for p in pages} for name, pages in sets.items()}
    common: Counter[str] = Counter()
    for pages in texts.values():
        for path, text in pages.items():
            common.update({stem(w) for w in WORD.findall(prose(text, path.suffix == ".rst"))})
    total = sum(map(len, texts.values()))
    found = {}
    for name, pages in sets.items():
        root = Path(name) if Path(name).is_dir() else ROOT
        terms = [term for p in pages if p.name == "glossary.md" for term in re.findall(r"^#+ (.+)$", texts[name][p], re.MULTILINE)]
        glossary = {stem(w) for term in terms for w in WORD.findall(term)}
        found[name] = measured(pages, common, total, glossary, root)
    return found


def table(found: dict[str, list[Figures]]) -> str:
    lines = [f"{'page':<34}{'sentences':>10}{'mean':>7}{'p90':>5}{'passive':>9}{'unexplained':>13}"]
    for name, figures in found.items():
        rows = sorted(figures, key=lambda f: -f.mean)
        if figures:
            rows = [*rows, together(f"= {Path(name).name}", figures)]
        lines += [f"{f.page[-33:]:<34}{f.sentences:>10}{f.mean:>7}{f.p90:>5}{f.passive:>9.1%}{f.unexplained:>13.1%}" for f in rows]
    return "\n".join(lines)


def main(words: list[str]) -> int:
    places = [w for w in words if w != "--json"]
    own = [ROOT / "README.md", *(p for p in pages_of(ROOT / "docs") if p.parent.name != "reference")]
    sets = {place.rstrip("/"): pages_of(Path(place)) for place in places} or {"meshwright": own}
    if "." in sets:
        sets = {"meshwright": own} | {name: pages for name, pages in sets.items() if name != "."}
    found = compared(sets)
    if "--json" in words:
        print(json.dumps({n: {"together": asdict(together(n, f)), "pages": [asdict(x) for x in f]} for n, f in found.items()}, indent=1))
    else:
        print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
