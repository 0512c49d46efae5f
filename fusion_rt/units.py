"""Units of settings: sizes, durations and other values are parsed, written and shown here.

Sizes and durations accept suffixes everywhere (`64MiB`, `1ms`). The unit of a bare number depends on where it is given,
as in Horovod: bytes in `HOROVOD_FUSION_THRESHOLD`, MiB after `--fusion-threshold-mb`; so each function takes `bare`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fusion_rt.core.errors import SettingError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE_SUFFIXES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": KIB, "mib": MIB, "gib": GIB}
_TIME_SUFFIXES = {"s": 1.0, "us": 1e-6, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Unit:
    """A kind of value. Sizes are held in bytes, durations in seconds.

    Attributes:
        name: placeholder of a value in the help, such as `SECONDS`; empty when there is nothing to write (a switch).
        parse: parses a text; its second argument is the unit of a bare number, in bytes or seconds. Raises
            `SettingError`.
        write: formats a value for a reader whose bare numbers have that unit.
        show: formats a value for people.
    """

    name: str
    parse: Callable[[str, float], Any]
    write: Callable[[Any, float], str]
    show: Callable[[Any], str]


def parse_size(text: str, bare: float | None = 1) -> int:
    """Parses a size such as `67108864`, `64MiB` or `0.5 GB`, in bytes; the unit of a bare number is `bare` bytes, and
    None refuses it.

    Raises:
        SettingError: the text is not a size.
    """
    return round(_scaled(text, _SIZE_SUFFIXES, bare, "a size such as 64MiB"))


def parse_seconds(text: str, bare: float | None = 1.0) -> float:
    """Parses a duration such as `30`, `1ms` or `2min`, in seconds; the unit of a bare number is `bare` seconds, and
    None refuses it.

    Raises:
        SettingError: the text is not a duration.
    """
    return _scaled(text, _TIME_SUFFIXES, bare, "a duration such as 30s or 1ms")


def parse_range(text: str) -> tuple[int | None, int | None]:
    """Parses a range of steps or ranks as Python writes it: `10:20` is from 10 up to, but without, 20. `10:`, `:20` and
    `10`, one number alone, are ranges too; an empty text is all of them.

    Returns: the first number, and the one that ends it; None: no limit on that side.

    Raises:
        SettingError: the text is no range, or an empty one; the sentence has the right spelling.
    """
    match = re.fullmatch(r"([0-9]{0,18})(?:\s*(:)\s*([0-9]{0,18}))?", text.strip(), re.ASCII)
    if match is None:
        raise SettingError(f"{text!r} is not a range such as 10:20 (from 10 up to, but without, 20){_meant(text)}")
    first = int(match[1]) if match[1] else None
    stop = int(match[3]) if match[3] else None
    if first is not None and not match[2]:
        stop = first + 1
    if stop is not None and stop <= (first or 0):
        raise SettingError(f"{text!r} is an empty range: 10:20 is from 10 up to, but without, 20")
    return first, stop


def _meant(text: str) -> str:
    """Says how a range is written here whose last number is in it, as in 10-19 and 10..19."""
    match = re.fullmatch(r"([0-9]{1,18})\s*(?:-|\.\.)\s*([0-9]{0,18})", text.strip(), re.ASCII)
    return f"; write {match[1]}:{int(match[2]) + 1 if match[2] else ''}" if match else ""


def _scaled(text: str, suffixes: Mapping[str, float], bare: float | None, what: str) -> float:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*([a-zA-Z]*)\s*", text)
    suffix = match[2].lower() if match else ""
    if match is None or (suffix and suffix not in suffixes):
        raise SettingError(f"{text!r} is not {what}")
    unit = suffixes[suffix] if suffix else bare
    if unit is None:
        raise SettingError(f"{text!r} has no unit: write {what}")
    value = float(match[1]) * unit
    if not math.isfinite(value):
        raise SettingError(f"{text!r} is not {what}: there is no number that large")
    return value


def _parse_limit(text: str, bare: float) -> float:
    """Parses a duration of which 0 is no limit, held as infinity."""
    return parse_seconds(text, bare) or math.inf


def _write_limit(value: float, bare: float) -> str:
    return "0" if math.isinf(value) else _write_number(value, bare)


def _show_limit(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:g} s"


def _show_switch(value: bool) -> str:
    return "on" if value else "off"


def _parse_switch(text: str, bare: float) -> bool:
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return True
    if text.strip().lower() in ("0", "false", "no", "off", ""):
        return False
    raise SettingError(f"{text!r} is not a yes or no (1 or 0)")


def _parse_count(text: str, bare: float) -> int:
    if not re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text, re.ASCII):
        raise SettingError(f"{text!r} is not a whole number")
    return int(text)


def _parse_number(text: str, bare: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SettingError(f"{text!r} is not a number")
    return value


def _write_number(value: float, bare: float) -> str:
    """Formats a number without a suffix, since other readers of Horovod's variables know none."""
    return f"{value / bare:.15g}"


def _write_count(value: int, bare: float) -> str:
    return str(int(value))


def _write_short(value: float, bare: float) -> str:
    return f"{value:g}"


def _show_size(value: int) -> str:
    for size, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if value and value % size == 0:
            return f"{value // size} {name}"
    return f"{value} bytes"


def _parse_ports(text: str, bare: float) -> range:
    match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5}))?\s*", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise SettingError(f"{text!r} is not a range of ports such as 20000-20100")
    return range(first, last + 1)


def _write_ports(value: range, bare: float = 1) -> str:
    return f"{value[0]}-{value[-1]}" if value else ""


def _parse_codec(text: str, bare: float) -> str:
    from fusion_rt import codecs  # brings numpy along, which hardly any process that reads settings needs

    try:
        codecs.parse(text)
    except codecs.CodecError as error:
        raise SettingError(str(error)) from None
    return text


def _parse_algorithm(text: str, bare: float) -> str:
    from fusion_rt import algorithms  # numpy again

    try:
        algorithms.parse(text)
    except algorithms.AlgorithmError as error:
        raise SettingError(str(error)) from None
    return text


def _same(text: str, bare: float = 1) -> str:
    return text


BYTES = Unit("SIZE", parse_size, _write_number, _show_size)
SECONDS = Unit("SECONDS", parse_seconds, _write_number, "{:g} s".format)
LIMIT = Unit("SECONDS", _parse_limit, _write_limit, _show_limit)
SWITCH = Unit("", _parse_switch, _write_count, _show_switch)
COUNT = Unit("N", _parse_count, _write_count, str)
NUMBER = Unit("NUMBER", _parse_number, _write_short, "{:g}".format)
PORTS = Unit("FIRST-LAST", _parse_ports, _write_ports, _write_ports)
TEXT = Unit("TEXT", _same, _same, str)
CODEC = Unit("CODEC", _parse_codec, _same, str)
ALGORITHM = Unit("ALGORITHM", _parse_algorithm, _same, str)
