"""Cutting, marking and storing what the workers print."""

from __future__ import annotations

import io
import re
import sys
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import FusionError, HorovodInternalError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.runner.launch.worker_output import TAIL, Lines, RepeatedTracebacks, WorkerOutput

FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 10, in <module>\n    hvd.allreduce(x)\n'
LOST = "fusion_rt.core.errors.HorovodInternalError: rank 2 (host b) was killed by SIGKILL\n"


class Sink:
    """Keeps what is written to each descriptor, and each write."""

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []

    def write(self, fd: int, data: bytes) -> None:
        self.writes.append((fd, data))

    def text(self, fd: int) -> str:
        return b"".join(data for to, data in self.writes if to == fd).decode()


def test_lines_are_marked_as_horovod_does() -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=12)
    output.feed(("a", 3), 3, "stdout", b"one\ntwo\n")
    output.feed(("a", 11), 11, "stderr", b"oh\n")
    assert sink.text(1) == "[3]<stdout>:one\n[3]<stdout>:two\n"
    assert sink.text(2) == "[11]<stderr>:oh\n"


def test_a_line_is_written_in_one_piece_and_never_torn_by_another_rank() -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=2)
    output.feed(("a", 0), 0, "stdout", b"first ")
    output.feed(("a", 1), 1, "stdout", b"other ")
    output.feed(("a", 0), 0, "stdout", b"half\n")
    output.feed(("a", 1), 1, "stdout", b"too\n")
    assert sink.writes == [(1, b"[0]<stdout>:first half\n"), (1, b"[1]<stdout>:other too\n")]


def test_a_progress_bar_is_passed_on_at_each_carriage_return() -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=1)
    output.feed(("a", 0), 0, "stderr", b" 10%\r 20%\r 3")
    assert sink.text(2) == "[0]<stderr>: 10%\r[0]<stderr>: 20%\r"
    output.feed(("a", 0), 0, "stderr", b"0%\r\n")
    assert sink.text(2).endswith("\r[0]<stderr>: 30%\r\n")


def test_a_last_line_without_an_end_is_flushed_with_one() -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=1)
    output.feed(("a", 0), 0, "stdout", b"no end")
    assert not sink.writes
    output.flush()
    output.flush()
    assert sink.writes == [(1, b"[0]<stdout>:no end\n")]


def test_a_line_beyond_the_limit_is_broken_and_not_kept_in_memory() -> None:
    lines = Lines(limit=10)
    assert lines.feed(b"x" * 25) == [b"x" * 10 + b"\n", b"x" * 10 + b"\n"]
    assert lines.feed(b"\ny\n") == [b"xxxxx\n", b"y\n"]


@given(st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\0", b"\n").replace(b"\1", b"\r")), max_size=10))
def test_nothing_is_lost_however_the_stream_is_cut(pieces: list[bytes]) -> None:
    lines = Lines()
    out = [line for piece in pieces for line in lines.feed(piece)] + lines.flush()
    assert all(re.fullmatch(rb"[^\r\n]*(\r\n|\r|\n)", line) for line in out)
    whole = b"".join(pieces)
    assert b"".join(out) in (whole, whole + b"\n")


def test_each_rank_and_stream_has_a_file_with_the_rank_padded_to_sort(tmp_path: Path) -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=11, directory=str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"rank.{n:02d}" for n in range(11)]
    output.feed(("a", 7), 7, "stderr", b"seven\n")
    (fd,) = {fd for fd, _ in sink.writes} - {1, 2}
    assert Path(f"/proc/self/fd/{fd}").resolve() == tmp_path / "out" / "rank.07" / "stderr"
    assert sink.text(fd) == sink.text(2) == "[7]<stderr>:seven\n"
    output.close()


def test_one_rank_has_files_too(tmp_path: Path) -> None:
    output = WorkerOutput(Sink(), size=1, directory=str(tmp_path))
    output.close()
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("std*")) == [
        "rank.0/stderr",
        "rank.0/stdout",
    ]


def test_a_time_stands_in_front_when_asked_for() -> None:
    sink = Sink()
    WorkerOutput(sink, size=1, timestamps=True).feed(("a", 0), 0, "stdout", b"x\n")
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:x\n", sink.text(1))


def test_the_end_of_stderr_is_kept_within_bounds() -> None:
    output = WorkerOutput(Sink(), size=2)
    assert output.tail(("a", 0)) == ""
    for number in range(20_000):
        output.feed(("a", 0), 0, "stderr", b"line %d\n" % number)
    assert output.tail(("a", 0)).endswith("line 19999\n")
    assert len(output.tail(("a", 0))) == TAIL
    output.feed(("a", 1), 1, "stderr", b"\xff broken text\n")
    assert output.tail(("a", 1)) == "\ufffd broken text\n"


def test_files_that_cannot_be_made_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        WorkerOutput(Sink(), size=1, directory=str(tmp_path / "file"))


def test_ranks_may_become_other_workers_and_more(tmp_path: Path) -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=1, directory=str(tmp_path))
    output.feed(("a", 0), 0, "stderr", b"half a li")
    output.change(2)
    assert sink.text(2) == "[0]<stderr>:half a li\n"
    assert output.tail(("a", 0)) == "", "what the worker printed that was rank 0 says nothing about the new one"
    output.feed(("a", 0), 0, "stderr", b"new\n")
    output.feed(("a", 1), 1, "stderr", b"other\n")
    assert sink.text(2) == "[0]<stderr>:half a li\n[0]<stderr>:new\n[1]<stderr>:other\n"
    output.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.0", "rank.1"]


ERROR = b"Traceback (most recent call last):\n  File\nfusion_rt.core.errors.HorovodInternalError: rank 2 is gone\n"


def test_a_traceback_of_two_ranks_is_shown_once_and_is_whole_in_the_files_of_both(tmp_path: Path) -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=2, directory=str(tmp_path))
    for rank in range(2):
        output.feed(("a", rank), rank, "stderr", ERROR)
    assert output.holds
    output.release()
    first = "".join(f"[0]<stderr>:{line}\n" for line in ERROR.decode().splitlines())
    last = ERROR.decode().splitlines()[-1]
    assert sink.text(2) == f"{first}[1]<stderr>:Traceback as of rank 0: {last}\n"
    files = sorted({fd for fd, _ in sink.writes} - {2})
    assert [sink.text(fd) for fd in files] == [first, first.replace("[0]", "[1]")]
    assert output.tail(("a", 1)) == ERROR.decode(), "what ended the rank is known, however it is shown"
    output.close()


def test_a_traceback_that_has_no_end_is_written_at_the_end_or_when_it_is_released() -> None:
    sink = Sink()
    output = WorkerOutput(sink, size=2)
    output.feed(("a", 0), 0, "stderr", b"Traceback (most recent call last):\n  Fi")
    assert output.holds
    assert not sink.writes
    output.release()
    assert not output.holds
    assert sink.text(2) == "[0]<stderr>:Traceback (most recent call last):\n"
    output.feed(("a", 1), 1, "stderr", b"Traceback (most recent call last):\n  Fi")
    output.flush()
    assert sink.text(2).endswith("[0]<stderr>:  Fi\n[1]<stderr>:Traceback (most recent call last):\n[1]<stderr>:  Fi\n")


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
