"""One traceback for all ranks that raise the same error, and nothing lost of any other output."""

from __future__ import annotations

import io
import sys
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.runner.launch.repeated_tracebacks import RepeatedTracebacks

FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 10, in <module>\n    hvd.allreduce(x)\n'
LOST = "fusion_rt.core.errors.HorovodInternalError: rank 2 (host b) was killed by SIGKILL\n"


def lines_of(text: str) -> list[bytes]:
    return text.encode("utf-8", "surrogateescape").splitlines(keepends=True)


def shown(tracebacks: RepeatedTracebacks, rank: int, text: str) -> str:
    """Returns the lines that are printed of a text that comes line by line."""
    return b"".join(out for line in lines_of(text) for out in tracebacks.take(rank, [line])).decode() + rest(tracebacks)


def rest(tracebacks: RepeatedTracebacks) -> str:
    return b"".join(line for _, lines in tracebacks.release() for line in lines).decode()


def printed(error: BaseException) -> str:
    """Returns the traceback that Python prints when a script ends with this error."""
    out = io.StringIO()
    try:
        raise error
    except BaseException:
        traceback.print_exception(*sys.exc_info(), file=out)
    return out.getvalue()


def test_the_first_traceback_is_printed_and_the_same_one_of_another_rank_is_a_line() -> None:
    tracebacks = RepeatedTracebacks()
    assert shown(tracebacks, 3, FRAMES + LOST) == FRAMES + LOST
    assert shown(tracebacks, 0, FRAMES + LOST) == f"Traceback as of rank 3: {LOST}"
    assert shown(tracebacks, 1, FRAMES + LOST) == f"Traceback as of rank 3: {LOST}"


def test_a_rank_that_prints_its_own_traceback_again_prints_it_whole() -> None:
    tracebacks = RepeatedTracebacks()
    assert [shown(tracebacks, 0, FRAMES + LOST) for _ in range(2)] == [FRAMES + LOST] * 2


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(FRAMES.replace("line 10", "line 11") + LOST, id="another line of the script"),
        pytest.param(FRAMES + LOST.replace("rank 2", "rank 1"), id="another message"),
        pytest.param(FRAMES + "    x = 1\n" + LOST, id="another frame"),
    ],
)
def test_a_traceback_that_differs_is_printed(other: str) -> None:
    tracebacks = RepeatedTracebacks()
    shown(tracebacks, 0, FRAMES + LOST)
    assert shown(tracebacks, 1, other) == other


def test_errors_of_scripts_are_printed_by_all_ranks() -> None:
    tracebacks = RepeatedTracebacks()
    own = FRAMES + "ValueError: no such file\n"
    assert [shown(tracebacks, rank, own) for rank in range(3)] == [own] * 3


@pytest.mark.parametrize("error", [HorovodInternalError("shapes differ"), FusionError("rank 2 did not come")])
def test_tracebacks_as_python_prints_them_are_recognised(error: Exception) -> None:
    tracebacks = RepeatedTracebacks()
    text = printed(error)
    assert shown(tracebacks, 0, text) == text
    assert shown(tracebacks, 1, text) == f"Traceback as of rank 0: {text.splitlines()[-1]}\n"


def test_a_traceback_that_quotes_another_ranks_one_ends_with_it() -> None:
    tracebacks = RepeatedTracebacks()
    text = printed(HorovodInternalError(f"rank 2 (host b) failed: {quoted(printed(ValueError('bad data')))}"))
    assert shown(tracebacks, 0, text) == text
    line = "Traceback as of rank 0: fusion_rt.core.errors.HorovodInternalError: rank 2 (host b) failed: "
    assert shown(tracebacks, 1, text) == f"{line}ValueError: bad data\n"


def test_a_quoted_error_ends_with_the_last_one_of_its_chain() -> None:
    tracebacks = RepeatedTracebacks()
    try:
        try:
            raise KeyError("x")
        except KeyError as cause:
            raise ValueError("bad data") from cause
    except ValueError as error:
        message = f"rank 2 (host b) failed: {quoted(printed(error))}"
    text = printed(HorovodInternalError(message)) + "over\n"
    assert shown(tracebacks, 0, text) == text
    line = "Traceback as of rank 0: fusion_rt.core.errors.HorovodInternalError: rank 2 (host b) failed: "
    assert shown(tracebacks, 1, text) == f"{line}ValueError: bad data\nover\n"


def test_the_stack_of_a_rank_that_hangs_is_told_once_with_the_error() -> None:
    tracebacks = RepeatedTracebacks()
    stack = "rank 2 (host b, pid 7, sleeping (S)), most recent call first:\n    train.py:8 in <module>: wait()\n"
    text = f"{FRAMES}{LOST}{stack}"
    assert shown(tracebacks, 0, text + "over\n") == text + "over\n"
    assert shown(tracebacks, 1, text + "over\n") == f"Traceback as of rank 0: {LOST}over\n"
    other = text.replace("train.py:8", "train.py:9")
    assert shown(tracebacks, 3, other) == other


def test_lines_behind_an_error_are_printed_even_where_ranks_print_the_same() -> None:
    tracebacks = RepeatedTracebacks()
    behind = "cleaning up\n  a file\n    another one\n"
    assert shown(tracebacks, 0, FRAMES + LOST + behind).endswith(behind)
    assert shown(tracebacks, 1, FRAMES + LOST + behind) == f"Traceback as of rank 0: {LOST}{behind}"


def test_the_rank_that_torch_puts_in_front_makes_no_difference() -> None:
    tracebacks = RepeatedTracebacks()
    first, second = ("".join(f"[rank{n}]: {each}\n" for each in (FRAMES + LOST).splitlines()) for n in range(2))
    assert shown(tracebacks, 0, first) == first
    assert shown(tracebacks, 1, second) == f"Traceback as of rank 0: {LOST}"


def test_ranks_that_print_at_the_same_time_are_told_apart() -> None:
    tracebacks = RepeatedTracebacks()
    out = [b"".join(tracebacks.take(rank, [line])) for line in lines_of(FRAMES + LOST) for rank in range(2)]
    assert b"".join(out) == b""
    assert rest(tracebacks) == f"{FRAMES}{LOST}Traceback as of rank 0: {LOST}"


def test_an_error_of_fusion_rt_is_held_until_another_line_comes_or_it_is_released() -> None:
    tracebacks = RepeatedTracebacks()
    assert not tracebacks
    assert tracebacks.take(1, lines_of(FRAMES + LOST)) == []
    assert tracebacks
    assert tracebacks.take(1, [b"on\n"]) == lines_of(FRAMES + LOST + "on\n")
    assert not tracebacks
    tracebacks.take(2, lines_of(FRAMES))
    assert tracebacks.release() == [(2, lines_of(FRAMES))]
    assert not tracebacks
    assert tracebacks.take(2, lines_of(LOST)) == lines_of(LOST)


def test_an_error_of_a_script_is_held_until_it_has_come() -> None:
    tracebacks = RepeatedTracebacks()
    assert tracebacks.take(1, lines_of(FRAMES)) == []
    assert tracebacks.take(1, [b"ValueError: x\n"]) == lines_of(FRAMES + "ValueError: x\n")
    assert not tracebacks


def test_one_traceback_that_begins_in_another_does_not_hide_it() -> None:
    tracebacks = RepeatedTracebacks()
    assert shown(tracebacks, 0, FRAMES + FRAMES + LOST) == FRAMES + FRAMES + LOST


def test_only_the_newest_tracebacks_are_remembered() -> None:
    tracebacks = RepeatedTracebacks()
    many = [FRAMES + LOST.replace("rank 2", f"rank {number}") for number in range(100)]
    for text in many:
        shown(tracebacks, 0, text)
    assert shown(tracebacks, 1, many[0]) == many[0]
    assert shown(tracebacks, 1, many[99]).startswith("Traceback as of rank 0: ")


PARTS = [
    *FRAMES.splitlines(keepends=True),
    LOST,
    "    quoted\n",
    "Y: Traceback (most recent call last):\n",
    "out\n",
    "\n",
]


@given(st.lists(st.sampled_from(PARTS), max_size=40))
def test_one_rank_loses_nothing_whatever_it_prints(parts: list[str]) -> None:
    assert shown(RepeatedTracebacks(), 0, "".join(parts)) == "".join(parts)


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(PARTS)), max_size=60))
def test_every_line_of_several_ranks_is_printed_by_one_of_them(parts: list[tuple[int, str]]) -> None:
    tracebacks = RepeatedTracebacks()
    out = b"".join(line for rank, text in parts for line in tracebacks.take(rank, lines_of(text))).decode()
    out += rest(tracebacks)
    for _, text in parts:
        assert text in out
    assert out.count("out\n") == sum(text == "out\n" for _, text in parts)
