"""The processors of a process, and how many threads a daemon has with them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from fusion_rt.host import cores
from tests.for_each import for_each

MIB = 1 << 20


def test_threads_follow_from_processors() -> None:
    assert [cores.kernel_threads(n) for n in (1, 2, 4, 8, 16, 64)] == [2, 2, 2, 4, 8, 8]
    assert [cores.io_threads(n) for n in (1, 2, 4, 8, 16, 64)] == [1, 1, 1, 2, 4, 4]
    for rule in (cores.kernel_threads, cores.io_threads):
        assert all(few <= more for few, more in pairwise(rule(n) for n in range(1, 130)))


def test_more_threads_never_make_a_smaller_tensor_slower() -> None:
    """A bucket up to 12 MiB has the two threads with which it was fastest, whatever there are; a larger one never fewer
    than a smaller one."""
    for threads in range(1, 65):
        found = [cores.threads_for(nbytes * MIB, threads) for nbytes in range(300)]
        assert found[:12] == [min(threads, 2)] * 12
        assert found == sorted(found)
        assert found[-1] == threads
    assert cores.threads_for(8 * MIB, 8) == 2
    assert cores.threads_for(8 * 102_400_000, 8) == 8


def test_a_quota_counts_as_well_as_the_affinity() -> None:
    assert cores.usable(16, math.inf) == 16
    assert cores.usable(16, 3.5) == 4
    assert cores.usable(2, 8.0) == 2
    assert cores.usable(16, 0.1) == 1
    assert cores.cores() >= 1


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@for_each(
    ("contents", "expected"),
    [
        ({}, math.inf),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, math.inf),
        ({"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "sys/fs/cgroup/pod/job/cpu.max": "800000 100000\n",
                "sys/fs/cgroup/pod/cpu.max": "400000 100000\n",
            },
            4.0,
        ),
        ({"proc/self/cgroup": "0::/../job\n", "sys/fs/cgroup/cpu.max": "nonsense"}, math.inf),
        (
            {
                "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "150000\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1.5,
        ),
    ],
)
def test_the_least_quota_of_a_group_and_those_around_it_counts(
    contents: dict[str, str], expected: float, tmp_path_factory: object
) -> None:
    root = tmp_path_factory.mktemp("root")  # type: ignore[attr-defined]
    assert cores.quota(files(root, contents)) == expected
