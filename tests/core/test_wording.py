"""Words of messages."""

from __future__ import annotations

from fusion_rt.core.wording import counted
from tests.for_each import for_each


@for_each(("number", "words"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (11, "11 ranks")])
def test_one_is_singular(number: int, words: str) -> None:
    assert counted(number, "rank") == words
