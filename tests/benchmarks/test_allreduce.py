"""What the benchmark of all-reduce measures in which settings."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from benchmarks import allreduce
from benchmarks.common import tables


def test_ranks_are_on_as_many_hosts_as_share_them_evenly() -> None:
    def chosen(ranks: str | None, hosts: str) -> list[tuple[object, object]]:
        return [(each["hosts"], each["ranks"]) for each in allreduce.settings(ranks, hosts, None, "control")]

    assert chosen(None, "1") == [(1, 2)]
    assert chosen(None, "4") == [(4, 4)], "one on each"
    assert chosen("2,4", "1,2,4") == [(1, 2), (1, 4), (2, 2), (2, 4), (4, 4)]
    assert chosen("3", "2") == []


def test_the_limit_is_that_of_a_rings_bytes_in_full_frames() -> None:
    (setting,) = allreduce.settings("4", "4", "1gbit", "control")
    payload = 2 * 3 / 4 * 25_600_000  # bytes that each host sends
    packets = payload / 1448  # with 12 bytes of TCP timestamps in a packet of 1500
    assert allreduce.limit(setting, 25_600_000) == pytest.approx(packets * (1500 + 14) * 8 / 1e9)
    for ranks, hosts, rate in (("4", "4", None), ("4", "2", "1gbit"), ("4", "1", None)):
        (other,) = allreduce.settings(ranks, hosts, rate, "control")
        assert allreduce.limit(other, 1) is None


def test_sizes_without_room_in_memory_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4_000_000_000))
    assert allreduce.fitting([4, 25_600_000, 1 << 30], ranks=2) == [4, 25_600_000]
    assert "1 GiB are left out" in capsys.readouterr().err


def test_sizes_are_written_as_people_say_them() -> None:
    sizes = (4, 1024, 65_536, 1_048_576, 25_600_000, 102_400_000, 1 << 30, 1500)
    assert [tables.nbytes(size) for size in sizes] == [
        "4 B", "1 KiB", "64 KiB", "1 MiB", "25.6 MB", "102.4 MB", "1 GiB", "1.5 kB"
    ]  # fmt: skip
    assert [tables.number(value) for value in (0.0, 0.01234, 0.5, 1.0, 12.345, 1234.5)] == [
        "0", "0.0123", "0.500", "1.00", "12.3", "1,234"
    ]  # fmt: skip
