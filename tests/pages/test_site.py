"""`make docs` builds a site without a warning, whose links all lead somewhere."""

import os
import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests import warm
from tests.helpers import PROGRAM_S

pytest.importorskip("mkdocs")

ROOT = Path(__file__).parents[2]


class Links(HTMLParser):
    """The anchors of a page, and what it points to.

    Attributes:
        anchors: What a link into the page can name.
        targets: What the page links to.
        loads: What a browser loads with the page.
    """

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        elif tag in ("script", "img", "link", "iframe"):
            self.loads += [found[name] for name in ("src", "href") if name in found]


@cache
def links_of(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site that was built without a warning."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    words = [warm.python(), "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(
        [*words, "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * PROGRAM_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said
    return folder


def pages(site: Path) -> list[Path]:
    # The page of errors has links of the server's root.
    return [page for page in site.rglob("*.html") if page.name != "404.html"]


def complaint(page: Path, target: str) -> str | None:
    """What is wrong with a link of a page; none if it leads somewhere."""
    parts = urlsplit(target)
    if parts.scheme:
        return None
    place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if place.is_dir():
        place /= "index.html"
    if not place.exists():
        return f"{page}: nothing is at {target}"
    known = links_of(place).anchors if place.suffix == ".html" else {""}
    if parts.fragment and unquote(parts.fragment) not in known:
        return f"{page}: {target} has no such anchor"
    return None


def test_every_link_and_anchor_of_the_site_leads_somewhere(site: Path) -> None:
    assert len(pages(site)) > 60
    for page in pages(site):
        links = links_of(page)
        for target in (*links.targets, *links.loads):
            assert complaint(page, target) is None


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    for page in pages(site):
        elsewhere = [load for load in links_of(page).loads if urlsplit(load).netloc]
        assert elsewhere == [], page


def test_every_page_of_the_docs_is_in_the_navigation(site: Path) -> None:
    start = site / "index.html"
    places = {(site / urlsplit(t).path).resolve() for t in links_of(start).targets}
    for page in ROOT.glob("docs/**/*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / name).resolve() in places, name


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs a browser")
def test_a_page_that_is_opened_as_a_file_can_be_searched(
    site: Path, tmp_path: Path
) -> None:
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    words += ["--disable-background-networking", "--disable-sync", "--no-first-run"]
    # Time that stands still while anything loads, however slow the machine is.
    words += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000"]
    done = subprocess.run(
        [*words, f"{(site / 'index.html').as_uri()}?q=staleness"],
        capture_output=True,
        text=True,
        timeout=1.5 * PROGRAM_S,
    )
    (found,) = re.findall(r"(\d+) matching documents", done.stdout)
    assert int(found) > 5


def test_tables_of_the_pages_are_tables(site: Path) -> None:
    """A row that is not one of a table stays a line of text with bars."""
    for page in pages(site):
        assert not re.findall(r"^\|[^<]*\|(?:</p>)?$", _prose(page), re.M), page


def _prose(page: Path) -> str:
    return re.sub(r"<pre.*?</pre>", "", page.read_text(encoding="utf-8"), flags=re.S)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("reference/strategy.html", ("gossip_every", "max_staleness", "HADPSGDFabric")),
        ("reference/commands.html", ("--weight-mb", "credentials", "call.wav")),
        ("notebooks/03-stragglers.ipynb.html", ("data:image/png", "<td>")),
        ("lightning_adpsgd/reference.py.html", ("highlight", "asynchronous")),
        ("benchmarks/results/index.html", ("straggler-time-of-an-epoch.svg",)),
    ],
)
def test_pages_are_made_of_what_is_no_page(
    site: Path, page: str, words: tuple[str, ...]
) -> None:
    text = (site / page).read_text(encoding="utf-8")
    assert [word for word in words if word not in text] == []
