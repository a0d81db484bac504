"""Makes the links of README.md absolute, and names the repository in the metadata.

    python installation/absolute_links.py URL REVISION

A package index shows the README without the files beside it, so its pictures and links
need the address of the repository. Only the workflow that publishes knows that: it
calls this in its own copy before it builds.
"""

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What comes before a target, and the target; pictures first, as their links are too.
_PICTURES = (r"(!\[[^\]]*\]\()([^)\s]+)", r"(src(?:set)?=\")([^\"\s]+)")
_LINKS = (r"(\]\()([^)\s]+)", r"(href=\")([^\"\s]+)")
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites README.md and pyproject.toml of this folder."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 2 or not given[0].startswith("https://"):
        print("usage: absolute_links.py https://HOST/OWNER/NAME REVISION")
        return 2
    url, revision = given[0].rstrip("/"), given[1]
    readme, project = ROOT / "README.md", ROOT / "pyproject.toml"
    readme.write_text(with_absolute_links(readme.read_text("utf-8"), url, revision))
    project.write_text(with_urls(project.read_text("utf-8"), url, revision))
    return 0


def with_absolute_links(text: str, url: str, revision: str) -> str:
    """A page whose links to files of the repository have its address.

    Args:
        text: page in Markdown, at the top of the repository.
        url: address of the repository.
        revision: tag or commit whose files are linked.
    """

    for kind, patterns in (("raw", _PICTURES), ("blob", _LINKS)):
        for pattern in patterns:
            text = re.sub(pattern, partial(_absolute, f"{url}/{kind}/{revision}"), text)
    return text


def _absolute(place: str, link: re.Match[str]) -> str:
    before, target = link.groups()
    is_elsewhere = _ELSEWHERE.match(target)
    return link.group() if is_elsewhere else f"{before}{place}/{target}"


def with_urls(text: str, url: str, revision: str) -> str:
    """A pyproject.toml whose metadata name the repository."""
    urls = (
        f'Source = "{url}"\n'
        f'Changelog = "{url}/blob/{revision}/CHANGELOG.md"\n'
        f'Issues = "{url}/issues"\n'
    )
    head = "[project.urls]\n"
    if head not in text:
        raise ValueError("pyproject.toml must have the table [project.urls]")
    return text.replace(head, head + urls, 1)


if __name__ == "__main__":
    sys.exit(main())
