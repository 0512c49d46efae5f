"""Which failure is the cause, and what the last line says."""

from __future__ import annotations

from fusion_rt.core.errors import DIED
from fusion_rt.core.traceback_format import quoted
from fusion_rt.runner.decisions.outcome import (
    DaemonFailure,
    HostFailure,
    MembershipFailure,
    WorkerFailure,
    WorkerGaveUp,
    first_cause,
    in_short,
    tell,
)
from tests.for_each import for_each

TRACEBACK = """some warning
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
ValueError: boom
"""
ECHO = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    hvd.allreduce(x)
fusion_rt.core.errors.HorovodInternalError: rank 1 (host b) ended
"""


def worker(rank: int, status: int = 1, stderr: str = TRACEBACK) -> WorkerFailure:
    return WorkerFailure("b", rank, status, stderr)


def test_the_exception_of_the_last_traceback_is_the_last_line() -> None:
    lines = tell([worker(1)])
    assert lines[-1] == "fusionrun: rank 1 on host b failed first: ValueError: boom"
    assert lines[:3] == [
        "The end of the stderr of rank 1 on host b:",
        "  Traceback (most recent call last):",
        '    File "train.py", line 3, in <module>',
    ]


def test_an_error_that_several_have_printed_is_not_printed_again() -> None:
    assert tell([worker(1), worker(0)]) == ["fusionrun: rank 1 on host b failed first: ValueError: boom"]
    assert len(tell([worker(1), worker(0, stderr=ECHO)])) > 1, "of one it may be far above"


def test_a_long_traceback_is_cut_in_the_middle() -> None:
    frames = "".join(f'  File "deep.py", line {n}, in f\n' for n in range(500))
    lines = tell([worker(0, stderr=f"Traceback (most recent call last):\n{frames}RecursionError: too deep\n")])
    assert len(lines) < 40
    assert lines[2] == "    ..."
    assert lines[-1].endswith("failed first: RecursionError: too deep")


def test_the_first_failure_is_the_cause() -> None:
    assert first_cause([worker(2), worker(1)]).tell()[-1].startswith("fusionrun: rank 2 ")


@for_each(
    "real",
    [worker(3), worker(3, status=-9, stderr=""), HostFailure("c", ("gone",)), DaemonFailure("c", -9, "", "rank 3")],
)
def test_an_error_that_only_tells_of_another_one_never_hides_it(real: WorkerFailure) -> None:
    assert first_cause([worker(0, stderr=ECHO), worker(1, stderr=ECHO), real]) is real


def test_when_all_ranks_fail_together_the_first_speaks_for_them() -> None:
    failures = [worker(1, stderr=ECHO), worker(0, stderr=ECHO)]
    assert tell(failures)[-1] == (
        "fusionrun: rank 1 on host b failed first: fusion_rt.core.errors.HorovodInternalError: rank 1 (host b) ended"
    )


QUOTE = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    hvd.allreduce(x)
fusion_rt.core.errors.HorovodInternalError: rank 0 (host a) failed: Traceback (most recent call last):
      File "train.py", line 9, in <module>
        hvd.allreduce(x)
    fusion_rt.core.errors.HorovodInternalError: shapes differ

"""


def test_a_rank_that_quotes_another_ones_traceback_is_the_last_to_be_chosen() -> None:
    own = worker(0, stderr=ECHO)
    quote = worker(2, stderr=QUOTE)
    assert first_cause([quote, own]) is own
    assert tell([quote])[-1] == (
        "fusionrun: rank 2 on host b failed first: fusion_rt.core.errors.HorovodInternalError: rank 0 (host a) failed: "
        "fusion_rt.core.errors.HorovodInternalError: shapes differ"
    )


def test_a_rank_that_has_seen_another_one_die_does_not_hide_why_that_one_did() -> None:
    own = worker(1, stderr=ECHO.replace("rank 1 (host b) ended", "the ranks disagree about 'loss'"))
    witness = worker(2, stderr=ECHO.replace("ended", DIED))
    assert first_cause([witness, own]) is own
    assert first_cause([witness, worker(0, stderr=ECHO)]) is not witness


def test_a_worker_killed_while_it_reported_an_echo_is_no_echo() -> None:
    assert worker(0, stderr=ECHO).echo
    assert not worker(0, status=-9, stderr=ECHO).echo


@for_each(
    ("status", "code", "words"),
    [
        (3, 3, "ended with status 3 and printed nothing"),
        (-9, 137, "was killed by SIGKILL"),
        (-11, 139, "was killed by SIGSEGV"),
        (-40, 168, "was killed by signal 40"),
    ],
)
def test_a_silent_end_is_told_by_its_status(status: int, code: int, words: str) -> None:
    failure = worker(5, status=status, stderr="")
    assert failure.exit_line == f"Process 5 exit with status code {code}."
    assert words in failure.tell()[-1]


def test_a_worker_that_the_kernel_has_killed_is_told_so() -> None:
    failure = WorkerFailure("b", 5, -9, "", "by the kernel: the memory limit was met")
    assert failure.tell() == [
        "fusionrun: rank 5 on host b was killed by SIGKILL (by the kernel: the memory limit was met)"
    ]


def test_all_hosts_that_failed_at_the_start_are_told() -> None:
    failures = [worker(0, stderr=ECHO), HostFailure("a", ("no Python", "no disk")), HostFailure("b", ("no route",))]
    assert tell(failures) == [
        "fusionrun: host a: no Python",
        "fusionrun: host a: no disk",
        "fusionrun: host b: no route",
    ]


def test_a_daemons_end_names_its_host_and_signal() -> None:
    assert DaemonFailure("a", -6, "out of descriptors", "ranks 0-1 (host a)").tell() == [
        "fusionrun: the daemon of ranks 0-1 (host a) was killed by SIGABRT: out of descriptors"
    ]


def test_a_failure_in_short_is_for_jobs_that_go_on() -> None:
    assert in_short(worker(1)) == "rank 1 on host b failed: ValueError: boom"
    assert in_short(worker(1, status=-9)) == "rank 1 on host b was killed by SIGKILL"
    assert in_short(HostFailure("a", ("no disk", "no Python"))) == "host a: no disk; no Python"
    assert in_short(DaemonFailure("a", 1, "boom", "rank 0 (host a)")) == (
        "the daemon of rank 0 (host a) ended with status 1: boom"
    )
    assert in_short(WorkerGaveUp("a", 0, "rank 1 is gone\nTraceback")) == (
        "rank 0 on host a could not go on: rank 1 is gone"
    )
    assert in_short(WorkerGaveUp("a", 0, f"rank 1 (host b) failed: {quoted(TRACEBACK.partition(chr(10))[2])}")) == (
        "rank 0 on host a could not go on: rank 1 (host b) failed: ValueError: boom"
    )


def test_what_went_wrong_before_says_more_than_that_a_job_cannot_go_on() -> None:
    over = MembershipFailure("no worker is left")
    assert tell([over]) == ["fusionrun: no worker is left"]
    assert first_cause([over, WorkerGaveUp("a", 0, "x"), worker(1)]) == worker(1)
    assert first_cause([over, WorkerGaveUp("a", 0, "x")]) == WorkerGaveUp("a", 0, "x")


CHAIN = """Traceback (most recent call last):
  File "arena.py", line 61, in create
    os.ftruncate(fd, nbytes)
OSError: [Errno 27] File too large

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 7, in <module>
    hvd.allreduce(x)
  File "arena.py", line 67, in create
    raise ArenaError(
fusion_rt.core.errors.ArenaError: 4194304 bytes of memory cannot be allocated on this host ([Errno 27] File too large)
"""
ECHO_OF_CHAIN = f"""Traceback (most recent call last):
  File "train.py", line 7, in <module>
    hvd.allreduce(x)
  File "client.py", line 295, in wait
    raise HorovodInternalError(operation.error)
fusion_rt.core.errors.HorovodInternalError: rank 1 (host b) failed: {quoted(CHAIN)}
"""


def test_an_echo_of_an_error_that_had_a_cause_of_its_own_is_no_cause() -> None:
    echo, cause = worker(0, stderr=ECHO_OF_CHAIN), worker(1, stderr=CHAIN)
    assert first_cause([echo, cause]) is cause
    assert tell([echo, cause])[-1] == (
        "fusionrun: rank 1 on host b failed first: fusion_rt.core.errors.ArenaError: 4194304 bytes of memory cannot "
        "be allocated on this host ([Errno 27] File too large)"
    )
    assert tell([echo])[-1] == (
        "fusionrun: rank 0 on host b failed first: fusion_rt.core.errors.HorovodInternalError: rank 1 (host b) failed: "
        "fusion_rt.core.errors.ArenaError: 4194304 bytes of memory cannot be allocated on this host ([Errno 27] File "
        "too large)"
    )


def test_an_echo_is_known_as_one_even_where_too_long_to_be_shown() -> None:
    frames = "".join(f'  File "x.py", line {number}, in f\n    f()\n' for number in range(20))
    error = f"Traceback (most recent call last):\n{frames}ValueError: no such file\n"
    message = f"rank 1 (host a) failed: {quoted(error)}"
    stderr = f"Traceback (most recent call last):\n{frames}fusion_rt.core.errors.HorovodInternalError: {message}\n"
    echo = WorkerFailure("a", 0, 1, stderr)
    assert echo.echo == 2
    assert len(echo.tell()) < 40
    cause = WorkerFailure("a", 1, 1, error)
    assert first_cause([echo, cause]) is cause
