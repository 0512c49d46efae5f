"""What was found, kept for the next job."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fusion_rt import wire
from fusion_rt.torch.autotune import cache
from fusion_rt.torch.autotune.cache import Fingerprint
from tests.torch.autotune.fakes import DEFAULT, TENSORS

FOUND = replace(DEFAULT, threshold=1234567, exchange="ring")


def fingerprint(**changes: Any) -> Fingerprint:
    values: dict[str, Any] = {
        "slots": (2, 2), "seconds_per_byte": 8e-9, "tensors": TENSORS, "reduction": wire.Reduction(),
        "keep_order": False, **changes,
    }  # fmt: skip
    return Fingerprint.of(**values)


def test_what_is_kept_is_found_again(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    assert cache.load(folder, fingerprint()) is None
    path = cache.save(folder, fingerprint(), FOUND, 2.0, 1.0)
    assert cache.load(folder, fingerprint()) == (FOUND, path)
    assert [file.name for file in folder.iterdir()] == [Path(path).name], "nothing unfinished is left"


@pytest.mark.parametrize(
    "change",
    [
        {"slots": (2, 1)},
        {"slots": (4,)},
        {"seconds_per_byte": 8e-8},
        {"tensors": TENSORS[1:]},
        {"tensors": (wire.TensorSpec("w0", "float64", (512, 512)), *TENSORS[1:])},
        {"tensors": (wire.TensorSpec("w0", "float32", (1024, 256)), *TENSORS[1:])},
        {"reduction": wire.Reduction(codec="fp16")},
        {"keep_order": True},
    ],
    ids=str,
)
def test_other_hosts_links_and_gradients_are_others(change: dict[str, Any], tmp_path: Path) -> None:
    cache.save(tmp_path, fingerprint(), FOUND, 2.0, 1.0)
    assert cache.load(tmp_path, fingerprint(**change)) is None


def test_the_order_of_gradients_and_small_differences_of_links_do_not_matter() -> None:
    assert fingerprint(tensors=TENSORS[::-1]) == fingerprint()
    assert fingerprint(seconds_per_byte=8.3e-9) == fingerprint(seconds_per_byte=7.7e-9)
    assert fingerprint(seconds_per_byte=0.0).bandwidth == 0


def broken_files() -> dict[str, bytes]:
    good = {
        "version": 1,
        "fingerprint": {"slots": [2, 2], "bandwidth": 0, "gradients": fingerprint().gradients, "keep_order": False},
        "setting": {"threshold": 1, "chunk_bytes": 4096, "window_bytes": 4096, "threads": 1, "exchange": "auto"},
        "score": 1.0,
        "default_score": 1.0,
    }
    foreign = {**good, "fingerprint": {**good["fingerprint"], "slots": [3]}}  # type: ignore[dict-item]
    return {
        "empty": b"",
        "no JSON": b"{",
        "another kind": b"[1, 2]",
        "binary": bytes(range(256)),
        "deep": b"[" * 100_000,
        "huge": b" " * 100_000,
        "foreign": json.dumps(foreign).encode(),
        "another version": json.dumps({**good, "version": 2}).encode(),
        "a field more": json.dumps({**good, "x": 1}).encode(),
        "a chunk too small": json.dumps({**good, "setting": {**good["setting"], "chunk_bytes": 1}}).encode(),  # type: ignore[dict-item]
        "too many threads": json.dumps({**good, "setting": {**good["setting"], "threads": 10**6}}).encode(),  # type: ignore[dict-item]
        "no such route": json.dumps({**good, "setting": {**good["setting"], "exchange": "x"}}).encode(),  # type: ignore[dict-item]
    }


@pytest.mark.parametrize("name", broken_files())
def test_a_file_that_is_not_in_order_is_warned_of_and_left_out(name: str, tmp_path: Path) -> None:
    (tmp_path / fingerprint().file_name).write_bytes(broken_files()[name])
    with pytest.warns(UserWarning, match="is not used: .*; remove the file"):
        assert cache.load(tmp_path, fingerprint()) is None


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / fingerprint().file_name).mkdir()
    with pytest.warns(UserWarning, match="is not used"):
        assert cache.load(tmp_path, fingerprint()) is None


def test_a_folder_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="the tuning result cannot be kept in"):
        assert cache.save(tmp_path / "file", fingerprint(), FOUND, 2.0, 1.0) == ""


def test_the_directory_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache.directory("") == Path("/cache/fusion_rt/autotune")
    assert cache.directory("/there") == Path("/there")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.directory("") == Path(os.path.expanduser("~/.cache/fusion_rt/autotune"))
