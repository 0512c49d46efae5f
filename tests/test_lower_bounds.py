"""The lower bounds in setup.cfg are the versions that were tried."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from tests.for_each import for_each

ROOT = Path(__file__).resolve().parent.parent
NOT_LOWERED = {"torch"}  # see constraints-lowest.txt


def bounds() -> dict[str, str]:
    """The least version of each package that an installation needs."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = parser["options"]["install_requires"].split()
    return dict(line.split(">=") for line in lines)


@for_each("package", sorted(bounds().keys() - NOT_LOWERED))
def test_the_least_version_that_setup_cfg_allows_is_the_one_that_was_tried(package: str) -> None:
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    tried = dict(re.findall(r"^(\w+)==(\S+)$", text, re.MULTILINE))
    asked, found = (tuple(map(int, version.split("."))) for version in (bounds()[package], tried[package]))
    assert found[: len(asked)] == asked
    assert not any(found[len(asked) :])
