"""How hard our pages are to read, before issue 28, today, and beside other projects' docs: `python benchmarks/readability.py NAME=FOLDER ...`.

NAME=FOLDER: a checkout's README and docs (`before=...`, `torchtitan=...`, `vllm=...`). Figures: `tools/readability.py`, over all sets together.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import readability

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "readability.json"


def figures(found: readability.Figures) -> dict[str, Any]:
    return {
        "sentences": found.sentences, "mean_words": found.mean, "p90_words": found.p90, "passive": found.passive, "unexplained": found.unexplained,
    }  # fmt: skip


def own(root: Path) -> list[Path]:
    return [root / "README.md", *(p for p in readability.pages_of(root / "docs") if p.parent.name not in ("reference", "schemas"))]


def main(words: list[str]) -> int:
    folders = {name: Path(folder).resolve() for name, _, folder in (word.partition("=") for word in words)}
    sets = {str(ROOT): own(ROOT)} | {str(f): own(f) if name == "before" else readability.pages_of(f) for name, f in folders.items()}
    found = readability.compared(sets)
    names = {"after": ROOT, **folders}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    together = {name: figures(readability.together(name, found[str(folder)])) for name, folder in names.items()}
    kept = json.loads(RESULT.read_text(encoding="utf-8"))
    document = {
        "tool": "tools/readability.py, by benchmarks/readability.py", "sets": kept["sets"] | {"after": f"commit {commit}, README.md and docs/"},
        "together": together, "pages": {f.page: figures(f) for f in sorted(found[str(ROOT)], key=lambda f: f.page)},
    }  # fmt: skip
    if "before" in folders:
        document["pages_before"] = {f.page: figures(f) for f in sorted(found[str(folders["before"])], key=lambda f: f.page)}
    RESULT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, row in together.items():
        print(f"{name:<12}" + "  ".join(f"{k} {v}" for k, v in row.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
