"""A hook of mkdocs: links of pages to files outside docs/ (a script, a result, a test) lead to a copy of the file in the site.

The repository names no host, so there is no address to link to. A text file becomes `files/PATH.txt`, which every browser shows; a page of the
root (CONTRIBUTING.md) likewise. A link to a file that is not there stays as it is, and mkdocs's own validation refuses it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))")
_copied: dict[str, Any] = {}


def on_files(files: Any, config: Any) -> Any:
    """Copies of what pages link to."""
    from mkdocs.structure.files import File

    _copied.clear()
    for file in [*files.documentation_pages()]:
        for target in outside(file.src_uri, Path(config["docs_dir"], file.src_uri).read_text(encoding="utf-8")):
            if target not in _copied:
                _copied[target] = File.generated(config, f"files/{target}.txt", content=(ROOT / target).read_bytes())
                files.append(_copied[target])
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The links rewritten, relative to the page; code blocks hold none of this form."""
    here = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = beyond(here, link[2])
        return f"{link[1]}{posixpath.relpath(f'files/{target}.txt', here or '.')})" if target in _copied else link[0]

    return LINK.sub(rewritten, markdown)


def outside(page: str, text: str) -> list[str]:
    """Files of the repository outside docs/ that the page links to, from the root."""
    found = [beyond(posixpath.dirname(page), link[2]) for link in LINK.finditer(text)]
    return [target for target in dict.fromkeys(found) if target and (ROOT / target).is_file()]


def beyond(here: str, link: str) -> str:
    """The path from the root of the repository of a link that leaves docs/; nothing for any other."""
    path = posixpath.normpath(posixpath.join("docs", here, link))
    return "" if path.startswith(("docs/", "..", "/")) else path
