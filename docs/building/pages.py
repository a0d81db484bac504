"""Collects the pages of the documentation site: a hook of MkDocs, see mkdocs.yml.

A page of the site has the path that it has in the repository, so that every relative
link that works there works here. What a page links to comes along: notebooks, folders
and source files as pages of their own, anything else as it is.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command_pages import with_help
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_pages import page_of_notebook

ROOT = Path(__file__).parents[2]
FIRST = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
FIRST += ("notebooks/*.md", "notebooks/*.ipynb", "recipes/**/*.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")
# A browser shows these itself, or has to save them.
AS_IT_IS = (".svg", ".png", ".json", ".csv", ".html", ".css", ".js", ".wav")
ASSETS = ("docs/building/iframe-worker.js", "docs/building/site.css")
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


# --- events of MkDocs, in their order


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Writes out the lines of the navigation that stand for several pages."""
    named = set(_paths_of(config.nav))
    config.nav = _written_out(config.nav, named)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by all pages, and by what they link to."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    for path in [*ASSETS, *_with_what_they_link_to(_first_pages())]:
        files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fills in the help of programs, and mends links to what has a page of its own."""
    here = _path(page.file.src_uri)

    def target(link: re.Match[str]) -> str:
        path = _resolved(here, link[0])
        folder = posixpath.dirname(here)
        return posixpath.relpath(_source(path), folder) if path else link[0]

    return LINK.sub(target, with_help(markdown))


# --- the navigation


def _paths_of(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for item in nav.values() if isinstance(nav, dict) else nav:
        if not isinstance(nav, str):
            yield from _paths_of(item)


def _written_out(nav: Any, named: set[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _written_out(item, named) for title, item in nav.items()}
    if not isinstance(nav, list):
        return _source(nav)
    found: list[Any] = []
    for item in nav:
        is_pattern = isinstance(item, str) and "*" in item
        found += _unnamed(item, named) if is_pattern else [_written_out(item, named)]
    return found


def _unnamed(pattern: str, named: set[str]) -> list[str]:
    return [_source(path) for path in _found(pattern) if path not in named]


# --- the pages


def _first_pages() -> list[str]:
    return sorted({path for pattern in FIRST for path in _found(pattern)})


def _found(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def _with_what_they_link_to(paths: list[str]) -> list[str]:
    found, left = set(paths), list(paths)
    while left:
        path = left.pop()
        targets = {_resolved(path, link) for link in LINK.findall(_markdown(path))}
        fresh = {target for target in targets if target} - found
        found |= fresh
        left += fresh
    return sorted(found)


def _resolved(page: str, link: str) -> str | None:
    """The path in the repository to which a link leads; None if nothing is there."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    places = (path + "/README.md", path) if not path.startswith("..") else ()
    return next((place for place in places if (ROOT / place).exists()), None)


def _is_shown(path: str) -> bool:
    """Whether a path that is no page of Markdown is shown on a page of its own."""
    return not path.endswith((".md", *AS_IT_IS))


def _source(path: str) -> str:
    """The name under which MkDocs knows what lies at a path."""
    return path + ".md" if _is_shown(path) else path


def _path(source: str) -> str:
    """The path of what MkDocs knows under a name."""
    path = source.removesuffix(".md")
    return path if path != source and (ROOT / path).exists() else source


def _file(path: str, config: MkDocsConfig) -> File:
    if _is_shown(path):
        return File.generated(config, _source(path), content=_markdown(path))
    place = path.removeprefix("docs/")
    page = place.removesuffix("README.md") + "index.md" * place.endswith("README.md")
    file = File(path, str(ROOT), config.site_dir, config.use_directory_urls)
    file.dest_uri = re.sub(r"\.md$", ".html", page)
    return file


def _markdown(path: str) -> str:
    """The text of a page, of a notebook, a folder or a source file; else nothing."""
    place = ROOT / path
    if place.is_dir():
        return _page_of_folder(path)
    if path.endswith(AS_IT_IS):
        return ""
    text = place.read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return page_of_notebook(text)
    language = place.suffix.removeprefix(".") or "text"
    return f"{UNSEARCHED}# {path}\n\n````{language}\n{text}\n````\n"


def _page_of_folder(path: str) -> str:
    files = sorted(p.name for p in (ROOT / path).glob("[!_.]*.*") if p.is_file())
    lines = "\n".join(
        f"- [{name}]({posixpath.basename(path)}/{name})" for name in files
    )
    return f"{UNSEARCHED}# {path}\n\n{lines}\n"
