"""The commands of the start page and of the how-to pages, run as they stand, print what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "page_commands.py"
sys.path.insert(0, str(TOOL.parent))
import page_commands  # noqa: E402

METHODS = [page for page in page_commands.pages() if page.parent.name == "methods"]
PAGES = [page for page in page_commands.pages() if page not in METHODS]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.real
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page: Path) -> None:
    if "console" not in page.read_text(encoding="utf-8"):
        return
    done = run("check", str(page))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.real
def test_the_pages_of_methods_print_what_they_say() -> None:
    """In one process: their commands are short."""
    done = run("check", *(str(page) for page in METHODS if "```console" in page.read_text(encoding="utf-8")))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.real
def test_the_commands_of_other_pages_print_what_they_say() -> None:
    """In one process; `tools/page_commands.py check --all` runs those too that are dear."""
    done = run("check", *(str(page) for page in page_commands.other_pages() if runs_something(page)))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert done.stdout.count("as today") >= 2  # not all is left out


def commands(page: Path) -> list[str]:
    """What a page shows to be run; "python" for its Python."""
    blocks = list(page_commands.BLOCK.finditer(page.read_text(encoding="utf-8")))
    bodies = [re.sub(f"^{block['indent']}", "", block["body"], flags=re.MULTILINE) for block in blocks if block["head"].startswith("console")]
    shown = [command for body in bodies for command, _ in page_commands.shown_commands(body)]
    return shown + ["python"] * any(block["head"] == "python" for block in blocks)


def runs_something(page: Path) -> bool:
    return any(not command.startswith(page_commands.how(page, everything=False).apart or "\n") for command in commands(page))


def test_every_command_block_is_run_or_has_a_reason() -> None:
    """No entry of the list is without a command that it leaves out, none is left out without a reason, and no command stands in a block of another
    kind."""
    said = tomllib.loads((page_commands.INPUTS / "pages.toml").read_text(encoding="utf-8"))
    pages = {page.stem: page for page in page_commands.other_pages()}
    assert said.keys() <= pages.keys()
    for name, inputs in said.items():
        shown = [*commands(pages[name]), *(["before"] if inputs.get("before") else [])]
        for start, reason in [*inputs.get("dear", {}).items(), *inputs.get("elsewhere", {}).items()]:
            assert any(command.startswith(start) for command in shown) and reason, (name, start)
    for page in page_commands.other_pages():
        text = page.read_text(encoding="utf-8")
        other = [b["body"] for b in page_commands.BLOCK.finditer(text) if b["head"].split()[:1] in ([], ["text"], ["bash"], ["sh"])]
        assert not [body for body in other if re.match(r" *(\$ )?meshwright ", body)], page


def test_every_method_page_says_what_a_reader_asks() -> None:
    index = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    assert {p.name for p in METHODS} - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))
    for page in METHODS:
        if page.name != "index.md":
            text = page.read_text(encoding="utf-8")
            assert all(f"## {head}\n" in text for head in ("When it wins here", "What we changed", "Cite")), page
            assert all((page.parent / name).is_file() for name in re.findall(r"\]\((\w+\.svg)\)", text)), page


def test_every_job_has_a_page() -> None:
    index = (ROOT / "docs" / "howto" / "index.md").read_text(encoding="utf-8")
    assert {p.name for p in PAGES if p.parent.name == "howto"} - {"index.md"} == set(re.findall(r"\]\((\w+\.md)\)", index))
    for page in PAGES[1:]:
        if page.name != "index.md":
            text = page.read_text(encoding="utf-8")
            assert "**Question.**" in text and "## What to look at" in text and "## What can go wrong" in text, page


def test_a_page_that_says_something_else_is_found(tmp_path: Path) -> None:
    """A wrong line, a wrong exit code, a command that is not ours; and `write` mends the first."""
    good = "```console\n$ meshwright --version\nmeshwright 0.1.0\n```\n"
    reported: list[str] = []
    assert page_commands.page_today(good, reported) == good and reported == []
    wrong = good.replace("0.1.0", "9.9")
    assert page_commands.page_today(wrong, reported) == good and reported == []
    assert "meshwright 0.1.0" in page_commands.page_today("<!-- exit 2 -->\n" + wrong, reported) and "wrong: exit code 0, not 2" in reported[0]
    with pytest.raises(ValueError, match="not run"):
        page_commands.page_today("```console\n$ rm x\n```\n", reported)


def test_python_of_a_page_is_run_in_turn_and_its_faults_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reported: list[str] = []
    text = "```python\na = b + 1\n```\n```python\nassert a == 2\n```\n"
    Path("before.py").write_text("b = 1\n", encoding="utf-8")
    assert page_commands.page_today(text, reported, page_commands.Page(strict=False)) == text and reported == []
    Path("before.py").write_text("b = 2\n", encoding="utf-8")
    page_commands.page_today(text, reported, page_commands.Page(strict=False))
    assert reported == ["wrong: Python block 2, line 1: AssertionError: "]


def test_a_command_may_stand_alone_on_other_pages_and_still_has_to_end_well() -> None:
    reported: list[str] = []
    text = "   ```console\n   $ meshwright --version\n   ```\n"
    assert page_commands.page_today(text, reported, page_commands.Page(strict=False)) == text and reported == []
    assert page_commands.page_today(text, reported, page_commands.Page()) != text
    page_commands.page_today(text.replace("--version", "none"), reported, page_commands.Page(strict=False))
    assert len(reported) == 1 and "exit code 2" in reported[0]
    page_commands.page_today(text.replace("--version", "none"), reported, page_commands.Page(strict=False, apart=("meshwright none",)))
    assert reported[1:] == ["left out: meshwright none"]


def test_a_page_has_its_own_programs_and_keeps_plans_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    places = "(shutil.which('torchrun'), 'bin/torchrun'), (os.environ['MESHWRIGHT_CACHE'], '.plans')"
    asked = f"import os, shutil; print(*(x == os.path.join(os.getcwd(), y) for x, y in ({places})))"
    page = tmp_path / "own.md"
    page.write_text(f'```console\n$ python -c "{asked}"\nTrue True\n```\n', encoding="utf-8")
    assert page_commands.run_page(page, write=False) == []
    assert os.environ["PATH"] == "/usr/bin:/bin" and os.environ["MESHWRIGHT_CACHE"] == "0"


def test_measured_numbers_are_not_compared_and_words_are() -> None:
    said = page_commands.Said("x", ["took 3.1 ms, 2 ranks"], ["took 412 us, 2 ranks"], 0, 0.0)
    assert page_commands.as_shown(said, measured=True) == said.shown
    assert page_commands.as_shown(said, measured=False) == said.printed
    busy = page_commands.Said("x", said.shown, [*said.printed, "note: other programs used 22 % of the machine; times are disturbed"], 0, 0.0)
    assert page_commands.as_shown(busy, measured=True) == busy.shown
    other = page_commands.Said("x", ["took 3.1 ms, 2 ranks"], ["took 3.1 ms, 2 hosts"], 0, 0.0)
    assert page_commands.as_shown(other, measured=True) == other.printed
    cut = page_commands.Said("x", ["...", "b 2", "...", "d"], ["a", "b 3", "c", "d"], 0, 0.0)
    assert page_commands.as_shown(cut, measured=True) == cut.shown
    assert page_commands.as_shown(cut, measured=False) == ["...", "b 3", "...", "d"]
    cut = page_commands.Said("x", ["e", "...", "d"], cut.printed, 0, 0.0)
    assert page_commands.as_shown(cut, measured=False) == cut.printed
    cut = page_commands.Said("x", ["one", "..."], ["one", "two", "three"], 0, 0.0)
    assert page_commands.as_shown(cut, measured=False) == ["one", "..."]
