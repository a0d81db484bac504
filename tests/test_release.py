"""What a release consists of: archives, metadata, workflows, and the pages beside."""

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_adpsgd
from installation import absolute_links, licences
from tests.helpers import PROGRAM_S
from tests.matrix import CELLS, summary_of

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
URL, TAG = "https://host.example/owner/name", "v9.9.9"


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def values_of(tree: Any, key: str) -> Iterator[Any]:
    """Everything that stands behind a key, wherever it is."""
    if isinstance(tree, dict):
        yield from ([tree[key]] if key in tree else [])
        tree = list(tree.values())
    if isinstance(tree, list):
        for branch in tree:
            yield from values_of(branch, key)


# --- the archives


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], str]:
    """Names in the source archive, and its metadata."""
    folder = tmp_path_factory.mktemp("sdist")
    build = (
        "import sys; sys.path.insert(0, 'installation'); import backend;"
        f"print(backend.build_sdist({str(folder)!r}))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", build],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=True,
    )
    with tarfile.open(folder / printed.stdout.split()[-1]) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        (info,) = (n for n in packed.getnames() if n.count("/") == 1 and "PKG" in n)
        file = packed.extractfile(info)
        assert file is not None
        return names, file.read().decode()


def test_the_source_archive_builds_the_wheel_and_holds_no_half_of_the_tests(
    archive: tuple[set[str], str],
) -> None:
    names, _ = archive
    needed = {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md"}
    needed |= {"installation/backend.py", "installation/lightning_adpsgd_names.py"}
    needed |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "lightning_adpsgd").rglob("*.py")
    }
    assert needed <= names
    apart = ("tests", "recipes", "benchmarks", "docs", "notebooks", "examples")
    assert not [name for name in names if name.partition("/")[0] in apart]


def test_the_metadata_name_version_authors_and_licence(
    archive: tuple[set[str], str],
) -> None:
    _, metadata = archive
    for line in (
        f"Version: {lightning_adpsgd.__version__}",
        "Author: The lightning-adpsgd maintainers",
        "License-Expression: Apache-2.0",
        "Project-URL: AD-PSGD, https://arxiv.org/abs/1710.06952",
        "Requires-Python: >=3.11",
    ):
        assert line in metadata.splitlines()


# --- what the workflow that publishes adds


def test_links_of_the_long_description_are_absolute_and_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(
        r"\]\(([^)\s]+)\)", absolute_links.with_absolute_links(text, URL, TAG)
    )
    here = [link for link in links if link.startswith(URL)]
    assert here
    for link in links:
        assert re.match(r"https?://|mailto:|#", link), link
    for link in here:
        path = re.sub(rf"{URL}/(raw|blob)/{TAG}/", "", link).partition("#")[0]
        assert (ROOT / path).exists(), link


def test_pictures_are_raw_files_and_pages_are_shown() -> None:
    place, text = "docs/a.svg", '<img src="{a}"> ![a]({a}) [b]({b}#c) [![a]({a})]({b})'
    text += " [f](https://x/y) [g](#h)"
    raw, blob = f"{URL}/raw/{TAG}", f"{URL}/blob/{TAG}"
    made = absolute_links.with_absolute_links(text.format(a=place, b="e.md"), URL, TAG)
    assert made == text.format(a=f"{raw}/{place}", b=f"{blob}/e.md")


def test_the_metadata_of_a_release_name_its_repository() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    urls = licences.tomllib.loads(absolute_links.with_urls(text, URL, TAG))
    assert urls["project"]["urls"]["Source"] == URL
    assert urls["project"]["urls"]["Changelog"] == f"{URL}/blob/{TAG}/CHANGELOG.md"
    with pytest.raises(ValueError, match=r"must have the table \[project.urls\]"):
        absolute_links.with_urls("", URL, TAG)


def test_the_extra_for_speech_bounds_torch_as_it_bounds_torchaudio() -> None:
    """Only equal versions import together, and torchaudio itself asks for none."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    needs = licences.tomllib.loads(text)["project"]["optional-dependencies"]["asr"]
    bounds = {re.split("[<>]", need)[0]: need.rpartition("<")[2] for need in needs}
    assert bounds["torch"] == bounds["torchaudio"] == "2.12"


@pytest.mark.parametrize("arguments", [[], ["name", TAG], [URL]])
def test_without_an_address_nothing_is_rewritten(arguments: list[str]) -> None:
    assert absolute_links.main(arguments) == 2


# --- workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_there_are(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = "\n".join(values_of(read(path), "run"))
    called = set(re.findall(r"\bmake ([a-z-]+)", commands))
    assert called <= set(targets)
    assert all(values_of(read(path), "timeout-minutes"))


def test_the_cells_of_a_pull_request_are_of_the_matrix() -> None:
    (line,) = re.findall(
        r'names="([^"]*)"\n', (GITHUB / "workflows/tests.yml").read_text()
    )
    assert set(line.split()) <= set(CELLS)


def test_a_cell_tells_pytests_last_line_and_not_what_libraries_say_behind_it() -> None:
    output = "....\n=== 3 passed, 1 skipped in 60.75s (0:01:00) ===\nleaks: see docs\n"
    assert summary_of(output) == "3 passed, 1 skipped in 60.75s (0:01:00)"
    assert summary_of("collected\nINTERNALERROR> x\n") == "INTERNALERROR> x"
    assert summary_of("") == "said nothing"


def test_only_a_tag_publishes_and_no_secret_is_read() -> None:
    path = GITHUB / "workflows" / "publish.yml"
    workflow = read(path)
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # `on` is a boolean of YAML's
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in path.read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_named_by_its_commit(path: Path) -> None:
    for action in values_of(read(path), "uses"):
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), action


def test_every_workflow_says_what_it_may_do() -> None:
    assert len(WORKFLOWS) == 3
    for path in WORKFLOWS:
        assert read(path)["permissions"] == {"contents": "read"}


# --- the pages beside it


def test_the_citation_is_of_this_version() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == lightning_adpsgd.__version__
    assert citation["license"] == "Apache-2.0"
    assert [paper["authors"] for paper in citation["references"]]


def test_the_version_that_gets_corrections_is_this_one() -> None:
    minor = lightning_adpsgd.__version__.rpartition(".")[0]
    assert f"gets corrections: {minor} at present" in (ROOT / "SECURITY.md").read_text()


def test_the_page_of_licences_has_every_direct_need_of_users() -> None:
    page = licences.PAGE.read_text("utf-8")
    for name in set().union(*licences.groups().values()):
        assert re.search(rf"^\| {name} \| [\w, ]+ \| \S", page, re.MULTILINE), name


def test_a_licence_is_an_expression_or_a_short_text_or_a_class() -> None:
    stated = [licences.licence_of(name) for name in ("torch", "lightning", "xxhash")]
    assert stated == ["BSD-3-Clause", "Apache-2.0", "BSD-2-Clause"]
    assert licences.licence_of("no-such-package") == "not installed here"


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_of_an_issue_is_one(path: Path) -> None:
    form = read(path)
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert {"name", "description", "body"} <= form.keys()
    ids = [item["id"] for item in form["body"] if item["type"] != "markdown"]
    assert len(ids) == len(set(ids)) > 0
