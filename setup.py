"""Makes the README fit for a package index, where its links to files of this repository would lead nowhere."""

import configparser
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent


def description(readme: str, source: str) -> str:
    """Returns the README with links that work anywhere.

    Args:
        readme: Markdown, with links relative to the repository.
        source: address of the repository; a link is `source/blob/main/path`. Without one, a link becomes its words.
    """

    def link(match: re.Match[str]) -> str:
        image, words, path = match.groups()
        if not source:
            return words
        return f"{image}[{words}]({source}/{'raw' if image else 'blob'}/main/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)\s]+)\)", link, readme)


def source_address() -> str:
    """Returns the line `Source = …` of project_urls in setup.cfg, or nothing."""
    parser = configparser.ConfigParser()
    parser.read(HERE / "setup.cfg", encoding="utf-8")
    lines = parser["metadata"].get("project_urls", "").splitlines()
    return next((line.partition("=")[2].strip().rstrip("/") for line in lines if line.strip().startswith("Source")), "")


setup(
    long_description=description((HERE / "README.md").read_text(encoding="utf-8"), source_address()),
    long_description_content_type="text/markdown",
)
