"""One sentence for each thing that can be wrong with a host."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from fusion_rt.core.errors import FusionError
from fusion_rt.runner.agent import preflight
from fusion_rt.runner.agent.preflight import available_memory
from fusion_rt.runner.protocol.agent_messages import Job, Versions

GIB = 2**30


@dataclass
class Host:
    """The arguments of a check that passes, to be spoilt."""

    job: Job
    root: str

    def problems(self, **changes: object) -> list[str]:
        return preflight.check(msgspec.structs.replace(self.job, **changes), self.root)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.chdir(tmp_path)  # the check changes it
    own = preflight.versions()
    job = Job(own.python, own.package, "j", 1, (b"true",), (), os.fsencode(tmp_path))
    return Host(job, str(tmp_path / "run" / "f"))


def test_a_good_host_has_no_problem_and_is_in_its_directory(host: Host, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    assert host.problems(directory=os.fsencode(work)) == []
    assert Path.cwd() == work
    assert os.stat(host.root).st_mode & 0o777 == 0o700


def test_versions_have_to_be_those_of_the_launcher() -> None:
    own = preflight.versions()
    assert preflight.check_versions(own) == []
    python, package = preflight.check_versions(Versions("2.7", "0.0.0"))
    assert python.startswith(f"Python is {own.python} there (")
    assert "but 2.7 where fusionrun was started" in python
    assert package.startswith(f"fusion_rt is version {own.package} there (")
    assert "but 0.0.0 where" in package


def test_a_missing_working_directory_is_told(host: Host, tmp_path: Path) -> None:
    (problem,) = host.problems(directory=os.fsencode(tmp_path / "gone"))
    assert problem == f"the working directory {tmp_path}/gone cannot be entered there: No such file or directory"


@pytest.mark.parametrize("command", [b"no-such-command-anywhere", b"./train.sh"])
def test_a_missing_command_is_told(host: Host, command: bytes) -> None:
    (problem,) = host.problems(command=(command, b"x"))
    assert problem.startswith(f"the command {command.decode()!r} is not there, or not executable (PATH=")


def test_a_script_for_a_command_is_told_with_what_to_write(host: Host, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").write_text("pass")
    (problem,) = host.problems(directory=os.fsencode(work), command=(b"train.py",))
    assert problem == "the command 'train.py' is a script that is not executable; write: python train.py"


def test_a_command_is_looked_for_in_the_working_directory(host: Host, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "run.sh").write_text("#!/bin/sh\n")
    (work / "run.sh").chmod(0o755)
    assert host.problems(directory=os.fsencode(work), command=(b"./run.sh",)) == []


def test_a_runtime_directory_that_others_may_enter_is_told(host: Host) -> None:
    os.makedirs(host.root, mode=0o755)
    (problem,) = host.problems()
    assert "is not a directory that only user" in problem


def test_a_runtime_directory_that_cannot_be_made_is_told(host: Host, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file is in the way")
    (problem,) = host.problems()
    assert problem.startswith(f"the directory {host.root} cannot be made: ")
    assert problem.endswith("; set FUSION_RUNTIME_DIR to a directory that this user may make")


def test_a_full_disk_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preflight, "open_private", full)
    (problem,) = host.problems()
    assert "cannot be used: No space left on device" in problem


def test_too_little_memory_is_told_in_numbers(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: (100 * 2**20, ""))
    assert host.problems(slots=3) == []
    (problem,) = host.problems(slots=4)
    assert problem.startswith("only 100 MiB of memory are available, and buckets of 4 workers need at least 128 MiB")


def test_a_limit_of_a_control_group_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "available_memory", lambda: (2**20, "/sys/fs/cgroup/job"))
    (problem,) = host.problems(slots=1)
    assert problem.startswith(
        "only 1 MiB of memory are available within the limit of the control group /sys/fs/cgroup/job, and buckets"
    )


def test_shared_memory_that_cannot_be_had_is_told(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(preflight.os, "posix_fallocate", refuse)
    assert host.problems() == ["no shared memory can be made (memfd): Cannot allocate memory"]


def test_all_problems_are_told_at_once(host: Host, tmp_path: Path) -> None:
    assert len(host.problems(command=(b"no-such-command",), directory=b"/no/such/directory")) == 2


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
    nbytes, _ = available_memory()
    assert 2**20 < nbytes < 2**50


def test_without_groups_it_is_that_of_the_machine(root: Path) -> None:
    assert available_memory(root) == (64 * GIB, "")


def test_a_limit_of_the_own_group_counts_without_what_can_be_taken_back(root: Path) -> None:
    belongs(root, "0::/job")
    group(root, "job", memory__max=8 * GIB, memory__current=3 * GIB, memory__stat=f"anon 7\ninactive_file {GIB}")
    assert available_memory(root) == (6 * GIB, "/sys/fs/cgroup/job")


def test_a_limit_of_a_group_above_counts(root: Path) -> None:
    belongs(root, "0::/jobs/one")
    group(root, "jobs", memory__max=4 * GIB, memory__current=GIB, memory__stat="anon 7")
    group(root, "jobs/one", memory__max="max", memory__current=GIB, memory__stat="anon 7")
    assert available_memory(root) == (3 * GIB, "/sys/fs/cgroup/jobs")


def test_in_a_container_the_own_group_may_be_at_the_top(root: Path) -> None:
    belongs(root, "0::/../kubepods/pod7")
    group(root, "", memory__max=2 * GIB, memory__current=3 * GIB, memory__stat="inactive_file 0")
    assert available_memory(root) == (0, "/sys/fs/cgroup")


def test_groups_of_the_first_version_have_limits_as_well(root: Path) -> None:
    belongs(root, "3:cpu,cpuacct:/x\n2:memory:/docker/a")
    group(
        root,
        "memory/docker/a",
        memory__limit_in_bytes=5 * GIB,
        memory__usage_in_bytes=4 * GIB,
        memory__stat=f"total_inactive_file {GIB}",
    )
    assert available_memory(root) == (2 * GIB, "/sys/fs/cgroup/memory/docker/a")


def test_a_limit_above_all_that_the_machine_has_does_not_count(root: Path) -> None:
    belongs(root, "2:memory:/")
    group(root, "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=GIB, memory__stat="cache 0")
    assert available_memory(root) == (64 * GIB, "")


def test_a_kernel_that_does_not_tell_is_an_error(root: Path) -> None:
    (root / "proc/meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(FusionError, match="no line MemAvailable"):
        available_memory(root)
