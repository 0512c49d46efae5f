"""A quick, seeded round of the fuzzer over every target, and the fuzzer itself: what it must not overlook.

`python -m tests.fuzz --count 1000000` is the long one.
"""

from __future__ import annotations

import logging
import random
import time

import pytest

from tests.fuzz import __main__, engine
from tests.fuzz.engine import Outcome, Target, attempt, fuzz
from tests.fuzz.mutation import MAX_BYTES, mutated
from tests.fuzz.targets import all_targets

INPUTS = 15_000  # of all targets together
TARGETS = {target.name: target for target in all_targets(torch=False)}
SHARES = dict(zip(TARGETS, __main__.shares(list(TARGETS.values()), INPUTS), strict=True))


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_inputs_are_accepted_or_refused_as_documented(name: str) -> None:
    outcome = fuzz(TARGETS[name], SHARES[name] + len(TARGETS[name].seeds), seed=1)
    assert not outcome.crashes, f"{outcome.crashes[0].data!r}\n{outcome.crashes[0].why}"
    assert outcome.accepted, "not even its seeds are accepted"


def _refuse_all_but_x(data: bytes) -> bool:
    if b"x" not in data:
        raise ValueError
    return True


def test_the_same_seed_gives_the_same_inputs_and_another_one_others() -> None:
    seen: list[list[bytes]] = []
    for seed in (1, 1, 2):
        inputs: list[bytes] = []
        fuzz(Target("t", [b"abcx"], lambda data, to=inputs: bool(to.append(data)), ()), 200, seed)  # type: ignore[misc]
        seen.append(inputs)
    assert seen[0] == seen[1] != seen[2]
    assert seen[0][0] == b"abcx"


def test_documented_exceptions_are_refusals_and_all_others_crashes() -> None:
    outcome = fuzz(Target("t", [b"x", b"y"], _refuse_all_but_x, (ValueError,)), 500, 1)
    assert outcome.accepted
    assert outcome.rejected
    assert not outcome.crashed
    outcome = fuzz(Target("t", [b"x", b"y"], _refuse_all_but_x, (KeyError,)), 500, 1)
    assert outcome.crashed
    assert outcome.executions == 500
    assert "ValueError" in outcome.crashes[0].why


def test_memory_beyond_the_bound_is_a_crash() -> None:
    outcome = Outcome("t")
    attempt(Target("t", [], lambda data: bool(bytearray(1 << 20)), (), nbytes=1 << 19), b"", outcome)
    assert "are allowed" in outcome.crashes[0].why
    attempt(Target("t", [], lambda data: bool(bytearray(1 << 18)), (), nbytes=1 << 19), b"", outcome)
    assert outcome.accepted == 1


def test_time_beyond_the_bound_is_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SECONDS", 0.01)

    def slow(data: bytes) -> bool:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return True

    outcome = Outcome("t")
    attempt(Target("t", [], slow, ()), b"", outcome)
    assert "of processor time" in outcome.crashes[0].why


def test_inputs_stay_below_their_limit() -> None:
    rng = random.Random(1)
    pool = [bytes(MAX_BYTES)]
    assert all(len(mutated(pool, (), rng)) <= MAX_BYTES for _ in range(200))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m tests.fuzz` with two targets, and without a limit of addresses, which would stay."""
    made = [Target("good", [b"x"], _refuse_all_but_x, (ValueError,)), Target("bad", [b"y"], _refuse_all_but_x, ())]
    monkeypatch.setattr(__main__, "all_targets", lambda: made)
    monkeypatch.setattr(__main__, "_limit_address_space", lambda: None)
    monkeypatch.setattr(logging, "disable", lambda: None)


@pytest.mark.usefixtures("command")
def test_the_command_shows_a_table_and_fails_for_a_crash(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["--count", "100", "--target", "good"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "good" in line)
    assert row.split("│")[2].strip() == "100"
    assert __main__.main(["--count", "100", "--target", "bad"]) == 1
    assert "ValueError" in capsys.readouterr().out


@pytest.mark.usefixtures("command")
def test_the_command_knows_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["--target", "nothing like this"])
    assert "there is no such target" in capsys.readouterr().err
