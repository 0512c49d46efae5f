"""Docstrings as the site shows them: a block of code is introduced by `::` in the source, and by a colon on a page."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Colons(griffe.Extension):
    """Replaces `::` at the end of a docstring's line."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
