"""Settings: what each knob accepts, and the sentence about what it does not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.errors import SettingError
from fusion_rt.settings import KIB, MIB, Settings, parse_seconds, parse_size

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
SECONDS = {"30": 30.0, "1ms": 1e-3, "2min": 120.0, "2m": 120.0, "0.5h": 1800.0, "250 us": 250e-6, "1.5s": 1.5}


@pytest.mark.parametrize(("text", "nbytes"), SIZES.items())
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(("text", "seconds"), SECONDS.items())
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


def test_a_bare_number_has_the_unit_of_its_flag() -> None:
    assert parse_size("32", bare_unit=MIB) == 32 * MIB
    assert parse_size("32KiB", bare_unit=MIB) == 32 * KIB
    assert parse_seconds("5", bare_unit=1e-3) == pytest.approx(0.005)
    assert parse_seconds("5s", bare_unit=1e-3) == 5.0


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 2", "64XB", "1e", "nan", "inf", "1e999", "0x10", "1,5"])
def test_what_is_no_number_with_a_suffix_is_refused(text: str) -> None:
    with pytest.raises(SettingError, match="is not a size such as 64MiB"):
        parse_size(text)
    with pytest.raises(SettingError, match="is not a duration such as 30s or 1ms"):
        parse_seconds(text)


@given(text=st.text(max_size=12))
def test_any_text_is_a_size_or_a_setting_error(text: str) -> None:
    with contextlib.suppress(SettingError):
        assert parse_size(text) >= 0


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
            "FUSION_RUNTIME_DIR": "/run/x",
            "SOMETHING_ELSE": "1",
        }
    )
    assert settings.fusion_threshold == 32 * MIB
    assert settings.start_timeout == 120.0
    assert settings.heartbeat_interval == pytest.approx(0.1)
    assert settings.kernel_threads == 4
    assert settings.log_level == "debug"
    assert settings.runtime_dir == "/run/x"


REFUSED = [
    ("HOROVOD_FUSION_THRESHOLD", "lots", "'lots' is not a size"),
    ("HOROVOD_FUSION_THRESHOLD", "-1", "'-1' is not a size"),
    ("HOROVOD_START_TIMEOUT", "0", "below the least value allowed"),
    ("FUSION_OPERATION_TIMEOUT", "forever", "'forever' is not a duration"),
    ("FUSION_KERNEL_THREADS", "two", "invalid literal"),
    ("FUSION_KERNEL_THREADS", "0", "below the least value allowed, 1"),
    ("FUSION_CHUNK_BYTES", "1", "below the least value allowed, 4096"),
    ("HOROVOD_LOG_LEVEL", "loud", "is not one of trace, debug, info"),
    ("FUSION_ENCRYPTION", "none", "is not one of auto, all, control"),
]


@pytest.mark.parametrize(("name", "text", "why"), REFUSED)
def test_a_value_that_cannot_be_used_is_refused_by_the_name_of_its_variable(name: str, text: str, why: str) -> None:
    with pytest.raises(SettingError, match=f"^{name}='{text}'.*{why}"):
        Settings.from_env({name: text})


def test_every_knob_has_a_variable_of_its_own_and_a_unit_that_its_default_fits() -> None:
    knobs = dataclasses.fields(Settings)
    variables = [knob.metadata["env"] for knob in knobs]
    assert len(set(variables)) == len(variables)
    for knob in knobs:
        text = str(knob.default)
        if text:
            assert getattr(Settings.from_env({knob.metadata["env"]: text}), knob.name) == knob.default


def test_the_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Settings().runtime_root() == f"/tmp/fusion_rt-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Settings().runtime_root() == f"{tmp_path}/fusion_rt-{os.getuid()}"
    assert Settings(runtime_dir="/run/x").runtime_root() == "/run/x"
