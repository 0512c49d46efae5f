"""Units: what each accepts, and the sentence about what it does not."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import SettingError
from fusion_rt.units import (
    BYTES,
    COUNT,
    KIB,
    LIMIT,
    MIB,
    NUMBER,
    SECONDS,
    SWITCH,
    TEXT,
    Unit,
    parse_range,
    parse_seconds,
    parse_size,
)
from tests.for_each import for_each

SIZES = {
    "67108864": 64 * MIB,
    "64MiB": 64 * MIB,
    "64 mib": 64 * MIB,
    "0.5 GB": 500_000_000,
    " 1kb ": 1000,
    "1KiB": 1024,
    "2gib": 2048 * MIB,
    ".5KiB": 512,
    "1e3": 1000,
    "0": 0,
    "7b": 7,
}
DURATIONS = {"30": 30.0, "1ms": 1e-3, "2min": 120.0, "2m": 120.0, "0.5h": 1800.0, "250 us": 250e-6, "1.5s": 1.5}


@for_each(("text", "nbytes"), SIZES.items())
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@for_each(("text", "seconds"), DURATIONS.items())
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


RANGES = {"": (None, None), ":": (None, None), "10:20": (10, 20), "10:": (10, None), " :20": (None, 20), "4": (4, 5)}
OTHERS = {
    "10-20": "write 10:21",
    "10 - 20": "write 10:21",
    "10-": "write 10:",
    "7..9": "write 7:10",
    "1,2": "such as 10:20",
}


@for_each(("text", "limits"), RANGES.items())
def test_ranges(text: str, limits: tuple[int | None, int | None]) -> None:
    assert parse_range(text) == limits


@for_each(("text", "told"), [*OTHERS.items(), ("5:5", "an empty range"), (":0", "an empty range")])
def test_a_range_that_is_spelled_otherwise_is_refused_with_the_right_spelling(text: str, told: str) -> None:
    with pytest.raises(SettingError, match=told):
        parse_range(text)


def test_a_bare_number_counts_what_its_place_says() -> None:
    for parse in (parse_size, parse_seconds):
        with pytest.raises(SettingError, match="'5' has no unit: write a "):
            parse("5", None)
    assert parse_size("32", bare=MIB) == 32 * MIB
    assert parse_size("32KiB", bare=MIB) == 32 * KIB
    assert parse_seconds("5", bare=1e-3) == pytest.approx(0.005)
    assert parse_seconds("5s", bare=1e-3) == 5.0


@for_each("text", ["", "MiB", "-1", "1 2", "64XB", "1e", "nan", "inf", "1e999", "0x10", "1,5"])
def test_what_is_no_number_with_a_suffix_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="is not a size such as 64MiB"):
        parse_size(text)
    for parse in (parse_seconds, LIMIT.parse):
        with pytest.raises(SettingError, match="is not a duration such as 30s or 1ms"):
            parse(text, 1.0)


@for_each(
    ("unit", "text", "complaint"),
    [
        (SWITCH, "maybe", "is not a yes or no"),
        (SWITCH, "2", "is not a yes or no"),
        (COUNT, "two", "is not a whole number"),
        (COUNT, "1.5", "is not a whole number"),
        (COUNT, "٣", "is not a whole number"),
        (NUMBER, "nan", "is not a number"),
        (NUMBER, "much", "is not a number"),
    ],
)
def test_what_does_not_fit_a_unit_is_refused(unit: Unit, text: str, complaint: str) -> None:
    with pytest.raises(SettingError, match=f"'{text}' {complaint}"):
        unit.parse(text, 1.0)


def test_switches() -> None:
    assert all(SWITCH.parse(text, 1.0) for text in ("1", "true", "Yes", " on "))
    assert not any(SWITCH.parse(text, 1.0) for text in ("0", "False", "no", "off", ""))


def test_a_limit_of_zero_is_none() -> None:
    assert LIMIT.parse("0", 1.0) == math.inf
    assert LIMIT.parse("0ms", 1.0) == math.inf
    assert LIMIT.parse("2min", 1.0) == 120.0
    assert LIMIT.show(math.inf) == "never"


@for_each(
    ("unit", "value", "bare", "text"),
    [
        (BYTES, 32 * MIB, 1, "33554432"),
        (BYTES, 32 * MIB, MIB, "32"),
        (BYTES, 2**40 + 1, 1, "1099511627777"),
        (SECONDS, 0.0029, 1e-3, "2.9"),
        (SECONDS, 120.0, 1.0, "120"),
        (LIMIT, math.inf, 1.0, "0"),
        (SWITCH, True, 1.0, "1"),
        (COUNT, 7, 1.0, "7"),
        (NUMBER, 0.8, 1.0, "0.8"),
        (TEXT, "topk(density=0.01)", 1.0, "topk(density=0.01)"),
    ],
)
def test_what_is_written_has_no_suffix_and_is_read_back(unit: Unit, value: object, bare: float, text: str) -> None:
    assert unit.write(value, bare) == text
    assert unit.parse(text, bare) == pytest.approx(value)


def test_values_are_shown_with_their_units() -> None:
    assert [BYTES.show(n) for n in (0, 1000, 64 * KIB, 16 * MIB, 3 * 1024 * MIB)] == [
        "0 bytes",
        "1000 bytes",
        "64 KiB",
        "16 MiB",
        "3 GiB",
    ]
    assert SECONDS.show(0.5) == "0.5 s"
    assert SWITCH.show(True) == "on"


@given(text=st.text(max_size=12), unit=st.sampled_from([BYTES, SECONDS, LIMIT, SWITCH, COUNT, NUMBER]))
def test_any_text_is_a_value_or_a_setting_error(text: str, unit: Unit) -> None:
    with contextlib.suppress(SettingError):
        unit.parse(text, 1.0)


@given(nbytes=st.integers(0, 2**48))
def test_sizes_survive_being_written(nbytes: int) -> None:
    assert parse_size(BYTES.write(nbytes, 1)) == nbytes
