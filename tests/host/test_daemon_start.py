"""The environment of a daemon that this process starts; the start itself is tested with its users."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_rt.host.daemon_start import _environment


def test_paths_are_meant_from_the_directory_of_whoever_starts_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    given = {
        "FUSION_SNAPSHOT_DIRECTORY": "snapshots", "FUSION_METRICS_TOKEN_FILE": "~/token", "FUSION_TRACE_DIR": "/traces",
        "PYTHONPATH": "src:/lib", "OTHER": "left",
    }  # fmt: skip
    assert _environment(given, "/run/root") == {
        "FUSION_SNAPSHOT_DIRECTORY": f"{tmp_path}/snapshots", "FUSION_METRICS_TOKEN_FILE": "/home/me/token",
        "FUSION_TRACE_DIR": "/traces", "FUSION_RUNTIME_DIR": "/run/root", "PYTHONPATH": f"{tmp_path}/src:/lib",
        "PYTHONSAFEPATH": "1", "OTHER": "left",
    }  # fmt: skip
