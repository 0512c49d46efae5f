"""What the kernel's counters say about a process that was killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fusion_rt.runner.agent.oom import UNKNOWN, OomKills

VMSTAT = "nr_free_pages 17\noom_kill {}\nnuma_hit 3\n"
KILLED = -int(signal.SIGKILL)


class Kernel:
    """Its files, in a directory; a count of None takes a file away."""

    def __init__(self, directory: Path, version: int) -> None:
        self.proc, self.groups = directory / "proc", directory / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        if version == 2:
            self.group, lines, self.text = self.groups / "job/memory.events", "0::/job\n", "low 0\noom 3\noom_kill {}\n"
        else:
            self.group = self.groups / "memory/job/memory.oom_control"
            lines, self.text = "9:cpu:/job\n4:memory:/job\n0::/\n", "under_oom 0\noom_kill {}\n"
        (self.proc / "self/cgroup").write_text(lines)
        self.group.parent.mkdir(parents=True)

    def count(self, machine: int | None, group: int | None) -> None:
        for path, text, number in (self.proc / "vmstat", VMSTAT, machine), (self.group, self.text, group):
            if number is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(text.format(number))

    def kills(self) -> OomKills:
        return OomKills(str(self.proc), str(self.groups))


@pytest.fixture(params=[1, 2])
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Kernel:
    return Kernel(tmp_path, request.param)


def test_a_count_of_the_control_group_names_its_limit(kernel: Kernel) -> None:
    kernel.count(5, 2)
    kills = kernel.kills()
    kernel.count(6, 3)
    assert kills.explain(KILLED) == (
        f"by the kernel: the memory limit of its control group was met (oom_kill in {kernel.group})"
    )


def test_a_count_of_the_machine_alone_names_the_host(kernel: Kernel) -> None:
    kernel.count(5, 2)
    kills = kernel.kills()
    kernel.count(6, 2)
    assert "the host was out of memory" in kills.explain(KILLED)


def test_counts_that_stay_rule_it_out(kernel: Kernel) -> None:
    kernel.count(5, 2)
    assert kernel.kills().explain(KILLED) == ""
    kernel.count(5, None)
    assert kernel.kills().explain(KILLED) == ""


def test_without_counters_it_is_a_guess(kernel: Kernel) -> None:
    kernel.count(None, None)
    assert kernel.kills().explain(KILLED) == UNKNOWN


@pytest.mark.parametrize("status", [0, 1, -int(signal.SIGTERM), -int(signal.SIGSEGV)])
def test_another_end_has_nothing_to_do_with_memory(kernel: Kernel, status: int) -> None:
    kernel.count(5, 2)
    kills = kernel.kills()
    kernel.count(6, 3)
    assert kills.explain(status) == ""


def test_this_kernel_can_be_asked() -> None:
    assert OomKills().explain(KILLED) in ("", UNKNOWN)
