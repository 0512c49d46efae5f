"""What is read out of a worker's last words, which Python itself has written here."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from fusion_rt.core.errors import DIED, HorovodInternalError
from fusion_rt.core.traceback_format import quoted
from fusion_rt.runner.decisions.worker_errors import echo_of, in_a_line, last_error
from tests.for_each import for_each

TRACEBACK = """some warning
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: boom
"""
ECHO = "fusion_rt.core.errors.HorovodInternalError: "


def boom() -> None:
    raise ValueError("boom")


def wrapped() -> None:
    try:
        boom()
    except ValueError as error:
        raise RuntimeError("no batch") from error


def deep(depth: int = 120) -> None:
    boom() if not depth else deep(depth - 1) if depth % 2 else deeper(depth - 1)  # Python leaves out what repeats


def deeper(depth: int) -> None:
    deep(depth)


def printed(function: Callable[[], None]) -> str:
    """What Python prints when this ends a program."""
    try:
        function()
    except Exception:
        return traceback.format_exc()
    raise AssertionError


def echo(error: str) -> Callable[[], None]:
    """An operation that fails because rank 1 ended with this."""

    def wait() -> None:
        raise HorovodInternalError(f"rank 1 (host b) failed: {quoted(error)}")

    return wait


def caught(function: Callable[[], None]) -> Callable[[], None]:
    """A program that fails while it handles the failure of an operation."""

    def main() -> None:
        try:
            function()
        except HorovodInternalError:
            boom()

    return main


@for_each(
    ("stderr", "error"),
    [
        ("", ""),
        ("\n \n", ""),
        ("only words\n", "only words"),
        (TRACEBACK, "ValueError: boom"),
        (TRACEBACK + "exit hooks talk\n", "ValueError: boom"),
        (printed(wrapped), "RuntimeError: no batch"),
        (printed(caught(echo("why"))), "ValueError: boom"),
        ("Traceback (most recent call last):\n  File\n", "File"),
        ("10%\r20%\rfailed\r", "failed"),
    ],
)
def test_the_line_that_says_what_went_wrong_is_found(stderr: str, error: str) -> None:
    assert last_error(stderr) == error


@for_each("function", [boom, wrapped, deep])
def test_an_echo_of_any_traceback_is_told_from_a_cause(function: Callable[[], None]) -> None:
    cause = printed(function)
    assert echo_of(cause) == 0
    stderr = printed(echo(cause))
    assert echo_of(stderr) == 2
    assert last_error(stderr) == ECHO + "rank 1 (host b) failed: " + last_error(cause)
    assert last_error(stderr + "exit hooks talk\n") == last_error(stderr)


def test_an_echo_of_an_echo_is_one() -> None:
    stderr = printed(echo(printed(echo(printed(wrapped)))))
    assert echo_of(stderr) == 2
    assert last_error(stderr) == 2 * (ECHO + "rank 1 (host b) failed: ") + "RuntimeError: no batch"


def test_an_operation_that_fails_without_a_traceback_of_another_rank_may_be_the_cause() -> None:
    stderr = printed(echo("the shapes differ"))
    assert echo_of(stderr) == 1
    assert last_error(stderr) == ECHO + "rank 1 (host b) failed: the shapes differ"


def test_an_operation_that_fails_since_a_rank_has_died_tells_of_that_one_only() -> None:
    assert echo_of(printed(echo(f"rank 1 (host b, pid 7) {DIED}"))) == 2


def test_what_fails_because_of_an_echo_is_one() -> None:
    assert echo_of(printed(caught(echo(printed(wrapped))))) == 2
    assert echo_of(printed(caught(echo("it was killed")))) == 1
    assert echo_of(printed(echo("it was killed")) + printed(boom)) == 0  # that one was printed, and got over


def test_an_echo_is_known_where_its_own_traceback_is_too_long_to_be_kept() -> None:
    stderr = printed(echo(printed(deep)))
    kept = stderr[stderr.index(ECHO) - 40 :]
    assert not kept.startswith("Traceback")
    assert echo_of(kept) == 2
    assert last_error(kept) == ECHO + "rank 1 (host b) failed: ValueError: boom"


def test_the_first_line_of_a_message_says_what_went_wrong_elsewhere() -> None:
    assert in_a_line("") == ""
    assert in_a_line("rank 1 is gone\nit really is") == "rank 1 is gone"
    assert in_a_line(f"rank 1 failed: {quoted(printed(wrapped))}") == "rank 1 failed: RuntimeError: no batch"


def test_a_quote_keeps_the_ends_of_a_long_traceback() -> None:
    frames = [f'  File "x.py", line {number}, in f' for number in range(500)]
    lines = quoted("\n".join(["Traceback (most recent call last):", *frames, "ValueError: boom", ""])).splitlines()
    assert len(lines) < 100
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == "    " + frames[0]
    assert lines[-2:] == ["    " + frames[-1], "    ValueError: boom"]
    assert "      ... (422 lines)" in lines


def test_lines_that_torch_begins_with_the_rank_are_read_without_it() -> None:
    plain = (
        'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    step()\nValueError: no data\n'
    )
    marked = "".join(f"[rank12]: {line}\n" for line in plain.splitlines())
    assert last_error(f"a warning\n{marked}") == "ValueError: no data"
    echo = marked.replace("ValueError: no data", "fusion_rt.c10d.failing.CollectiveError: rank 1 (host b) ended")
    assert (echo_of(marked), echo_of(echo)) == (0, 1)
