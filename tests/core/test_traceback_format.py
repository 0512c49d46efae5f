"""Errors that quote the traceback of another process."""

from __future__ import annotations

import pytest

from fusion_rt.core.traceback_format import TRACEBACK, in_short, quoted

DIRECT = f"""{TRACEBACK}
  File "train.py", line 3, in <module>
    step()
ValueError: boom
  of two lines
"""
CHAINED = f"""{TRACEBACK}
  File "train.py", line 1, in f
KeyError: 3

The above exception was the direct cause of the following exception:

{DIRECT}"""


@pytest.mark.parametrize("traceback", [DIRECT, CHAINED])
def test_in_short_a_quoted_traceback_is_its_last_exception(traceback: str) -> None:
    assert in_short(f"rank 2 (host a) failed: {quoted(traceback)}") == "rank 2 (host a) failed: ValueError: boom"


def test_in_short_a_message_without_a_traceback_stays_as_it_is() -> None:
    assert in_short("rank 2 (host a) ended\nwithout a word") == "rank 2 (host a) ended\nwithout a word"


def test_a_quote_within_a_quote_has_the_innermost_exception() -> None:
    echo = f"{TRACEBACK}\n  File 'b.py', line 1\nHorovodInternalError: rank 1 failed: {quoted(DIRECT)}\n"
    assert in_short(f"rank 2 failed: {quoted(echo)}").endswith("ValueError: boom")
