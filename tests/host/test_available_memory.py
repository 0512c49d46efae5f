"""Memory that a host has, with and without limits of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.host.available_memory import available

GIB = 2**30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of which 64 GiB are available, without control groups."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {99 * 2**20} kB\nMemAvailable: {64 * 2**20} kB\n")
    return tmp_path


def group(root: Path, name: str, **files: object) -> None:
    place = root / "sys/fs/cgroup" / name
    place.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (place / file.replace("__", ".")).write_text(f"{content}\n")


def belongs(root: Path, line: str) -> None:
    (root / "proc/self/cgroup").write_text(line + "\n")


def test_this_host_has_memory() -> None:
    nbytes, _ = available()
    assert 2**20 < nbytes < 2**50


def test_without_groups_it_is_that_of_the_machine(root: Path) -> None:
    assert available(root) == (64 * GIB, "")


def test_a_limit_of_the_own_group_counts_without_what_can_be_taken_back(root: Path) -> None:
    belongs(root, "0::/job")
    group(root, "job", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=f"anon 7\ninactive_file {GIB}")
    assert available(root) == (6 * GIB, "/sys/fs/cgroup/job")


def test_a_limit_of_a_group_above_counts(root: Path) -> None:
    belongs(root, "0::/jobs/one")
    group(root, "jobs", memory__max=4 * GIB, memory__current=GIB, memory__stat="anon 7")
    group(root, "jobs/one", memory__max="max", memory__current=GIB, memory__stat="anon 7")
    assert available(root) == (3 * GIB, "/sys/fs/cgroup/jobs")


def test_in_a_container_the_own_group_may_be_at_the_top(root: Path) -> None:
    belongs(root, "0::/../kubepods/pod7")
    group(root, "", memory__max=2 * GIB, memory__current=3 * GIB, memory__stat="inactive_file 0")
    assert available(root) == (0, "/sys/fs/cgroup")


def test_groups_of_the_first_version_have_limits_as_well(root: Path) -> None:
    belongs(root, "3:cpu,cpuacct:/x\n2:memory:/docker/a")
    group(
        root,
        "memory/docker/a",
        memory__limit_in_bytes=5 * GIB,
        memory__usage_in_bytes=4 * GIB,
        memory__stat=f"total_inactive_file {GIB}",
    )
    assert available(root) == (2 * GIB, "/sys/fs/cgroup/memory/docker/a")


def test_a_limit_above_all_that_the_machine_has_does_not_count(root: Path) -> None:
    belongs(root, "2:memory:/")
    group(root, "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB, memory__stat="cache 0")
    assert available(root) == (64 * GIB, "")


def test_a_kernel_that_does_not_tell_is_an_error(root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(FusionError, match="no line MemAvailable"):
        available(root)
