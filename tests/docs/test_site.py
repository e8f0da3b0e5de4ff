"""The documentation builds as a site with warnings as errors, without a network, and loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILDER = "the extra `docs` is not installed: pip install '.[docs]'"


def build(folder: Path, *more: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *more]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip(BUILDER)
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_page_is_built_and_can_be_searched(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert {p for p in pages if not (site / p).exists()} == set()
    assert pages - {"index.html"} <= found


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'> ]+|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\"'> ]+")
    found = {f"{p.name}: {m[0]}" for p in site.rglob("*.html") for m in loads.finditer(p.read_text(encoding="utf-8")) if "canonical" not in m[0]}
    assert found == set()


def test_links_out_of_the_pages_lead_to_copies(site: Path) -> None:
    linked = re.findall(r"href=\"((?:\.\./)*files/[^\"#]+)", (site / "design.html").read_text())
    assert linked and all((site / target).is_file() for target in linked)


def test_a_dead_link_is_an_error(tmp_path: Path) -> None:
    """Of a page and of a heading."""
    if importlib.util.find_spec("material") is None:
        pytest.skip(BUILDER)
    (tmp_path / "docs").mkdir()
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0].replace("tools/site_links.py", str(ROOT / "tools" / "site_links.py"))
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "docs" / "index.md").write_text("# A\n\n[a](b.md) [c](#nowhere) [d](../benchmarks/none.py)\n")
    done = build(tmp_path / "site", cwd=tmp_path)
    assert done.returncode != 0
    for target in ("b.md", "#nowhere", "../benchmarks/none.py"):
        assert target in done.stderr
