"""The table of settings, what a process reads from its environment, and the page of the documentation."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from fusion_rt import settings_page
from fusion_rt.core.errors import SettingError
from fusion_rt.knobs import GROUPS, Knob
from fusion_rt.settings import KNOBS, OF_SETTINGS, Settings
from fusion_rt.units import MIB, SECONDS, SWITCH
from tests.for_each import for_each


def test_without_variables_every_setting_has_its_default() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"HOROVOD_FUSION_THRESHOLD": ""}) == Settings()


def test_variables_are_read_in_their_units() -> None:
    settings = Settings.from_env(
        {
            "HOROVOD_FUSION_THRESHOLD": "32MiB",
            "HOROVOD_START_TIMEOUT": "2min",
            "FUSION_HEARTBEAT_INTERVAL": "100ms",
            "FUSION_KERNEL_THREADS": "4",
            "HOROVOD_LOG_LEVEL": "DEBUG",
            "HOROVOD_LOG_HIDE_TIME": "1",
            "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
            "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1h",
            "FUSION_COMPRESSION": "topk(density=0.01)",
            "FUSION_RUNTIME_DIR": "/run/x",
            "SOMETHING_ELSE": "1",
        }
    )
    assert settings == Settings(
        fusion_threshold=32 * MIB,
        start_timeout=120.0,
        heartbeat_interval=pytest.approx(0.1),
        kernel_threads=4,
        log_level="DEBUG",
        log_timestamp=False,
        stall_warning_time=5.0,
        operation_timeout=3600.0,
        compression="topk(density=0.01)",
        runtime_dir="/run/x",
    )


def test_waiting_is_limited_unless_somebody_says_never() -> None:
    assert math.isfinite(Settings().operation_timeout)
    assert Settings.from_env({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}).operation_timeout == math.inf
    assert Settings.from_env({"HOROVOD_STALL_CHECK_TIME_SECONDS": "0"}).stall_warning_time == math.inf
    off = Settings.from_env({"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5"})
    assert (off.stall_check, off.stall_warning_time, off.operation_timeout) == (False, math.inf, math.inf)
    assert Settings.from_env({"HOROVOD_STALL_CHECK_DISABLE": "0"}) == Settings()


REFUSED = [
    ("HOROVOD_FUSION_THRESHOLD", "lots", "'lots' is not a size"),
    ("HOROVOD_FUSION_THRESHOLD", "-1", "'-1' is not a size"),
    ("HOROVOD_START_TIMEOUT", "0", "below the least value allowed, 0.001"),
    ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "forever", "'forever' is not a duration"),
    ("HOROVOD_STALL_CHECK_DISABLE", "maybe", "'maybe' is not a yes or no"),
    ("FUSION_KERNEL_THREADS", "two", "'two' is not a whole number"),
    ("FUSION_KERNEL_THREADS", "-1", "below the least value allowed, 0"),
    ("FUSION_CHUNK_BYTES", "1", "below the least value allowed, 4096"),
    ("HOROVOD_LOG_LEVEL", "loud", "is not one of TRACE, DEBUG, INFO"),
    ("FUSION_ENCRYPTION", "none", "is not one of auto, all, control"),
]


@for_each(("name", "text", "why"), REFUSED)
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_variable(name: str, text: str, why: str) -> None:
    with pytest.raises(SettingError, match=f"^{name}: .*{why}"):
        Settings.from_env({name: text})


def test_a_value_above_the_largest_is_refused() -> None:
    knob = Knob("noise", "autotuning", "", SECONDS, most=1)
    assert knob.parse("1", "--noise") == 1.0
    with pytest.raises(SettingError, match=r"^--noise: '1\.5' is above the largest value allowed, 1$"):
        knob.parse("1.5", "--noise")


def test_no_name_flag_variable_or_key_is_there_twice() -> None:
    names = [knob.name for knob in KNOBS]
    flags = [flag for knob in KNOBS for flag in knob.flags + knob.off]
    variables = [knob.variable for knob in KNOBS if knob.variable]
    keys = [knob.yaml for knob in KNOBS if knob.yaml]
    for column in (names, flags, variables, keys):
        assert sorted(set(column)) == sorted(column)


@for_each("knob", KNOBS)
def test_every_row_makes_sense(knob: Knob) -> None:
    assert knob.group in GROUPS
    assert knob.help[0].isupper()
    assert knob.help.endswith(".")
    assert knob.flags or knob.variable or knob.yaml, "nobody can set it"
    assert not knob.off or knob.unit is SWITCH
    assert not knob.inverse or knob.unit is SWITCH


@for_each("knob", OF_SETTINGS)
def test_every_default_can_be_written_and_read_back(knob: Knob) -> None:
    assert knob.variable
    text = knob.write(knob.default)
    if text:
        assert getattr(Settings.from_env({knob.variable: text}), knob.name) == knob.default


def test_the_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Settings().runtime_root() == f"/tmp/fusion_rt-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Settings().runtime_root() == f"{tmp_path}/fusion_rt-{os.getuid()}"
    assert Settings(runtime_dir="/run/x").runtime_root() == "/run/x"


def test_records_lie_in_the_same_directory_whoever_says_where_sockets_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Settings().trace_root() == f"/tmp/fusion_rt-traces-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Settings(runtime_dir=Settings().runtime_root()).trace_root() == f"/tmp/fusion_rt-traces-{os.getuid()}"
    assert Settings(trace_dir="/run/x").trace_root() == "/run/x"


def test_the_page_of_the_documentation_is_up_to_date() -> None:
    text = settings_page.PAGE.read_text(encoding="utf-8")
    assert text == settings_page.page(), "run `python -m fusion_rt.settings_page`"


def test_the_page_says_what_a_bare_number_counts_and_what_has_no_effect() -> None:
    rows = {line.split("`")[1]: line for line in settings_page.page().splitlines() if line.startswith("| `")}
    fusion = rows["--fusion-threshold-mb SIZE"]
    assert "SIZE`<br>`HOROVOD_FUSION_THRESHOLD`<br>`params.fusion_threshold_mb` | 16 MiB |" in fusion
    assert "A bare number is in MiB, but in bytes in the variable." in fusion
    assert "A bare number is in milliseconds. No effect: " in rows["--cycle-time-ms SECONDS"]
    assert rows["--encryption auto\\|all\\|control"].count(" | ") == 2
    assert "`--stall-check`<br>`--no-stall-check`" in rows["--stall-check"]
    assert "The variable means the opposite." in rows["--stall-check"]


def test_the_page_links_the_pages_that_a_setting_names() -> None:
    assert "(docs/" not in settings_page.page()
    assert "([start/two-machines.md](start/two-machines.md))" in settings_page.page()


def test_steps_of_a_timeline_are_a_range_as_everywhere() -> None:
    ranges = {"": (0, -1), "10:20": (10, 19), "10:": (10, -1), ":3": (0, 2)}
    assert {text: Settings(timeline_steps=text).timeline_range() for text in ranges} == ranges
    with pytest.raises(SettingError, match=r"--timeline-steps: '10-20' is not a range .*; write 10:21"):
        Settings(timeline_steps="10-20").timeline_range()
