"""Jobs of so many hosts that the launcher reaches some of them through others."""

from __future__ import annotations

import os
import signal
import sys

import psutil

from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.places import fill
from fusion_rt.runner.launch.agents import Agents
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.settings import Settings
from tests.for_each import for_each

HOSTS = [f"h{number}" for number in range(9)]
TO = """#!/bin/sh
echo "$1 through ${VIA:-launcher}" >> reached
cd /
case "$BROKEN" in *" $1 "*) echo "no route to $1" >&2; exit 255;; esac
if [ -n "$VIA" ] && [ "$1" = "$FROM_HERE" ]; then echo "permission denied" >&2; exit 255; fi
export VIA="$1"
shift
exec "$@"
"""


def reach(fusionrun) -> tuple[str, ...]:
    """The flags of a job of one worker on each of nine hosts, of which the launcher reaches three, and these two more
    each."""
    fusionrun.file("to", TO.replace("reached", f"{fusionrun.directory}/reached"), executable=True)
    return (
        *("-np", "9", "-H", ",".join(HOSTS), "--network-interface", "lo"),
        *("--rsh-agent", f"{fusionrun.directory}/to {{host}}"),
    )


def reached(fusionrun) -> set[str]:
    return {*(fusionrun.directory / "reached").read_text().splitlines()}


THROUGH = {f"h{number} through h{number // 3 * 3}" for number in range(9) if number % 3} | {
    f"h{number} through launcher" for number in (0, 3, 6)
}


def test_hosts_are_reached_through_others_and_all_workers_are_heard(fusionrun) -> None:
    code = "import os, sys; print(os.environ['HOROVOD_HOSTNAME']); print('x' * 200000, file=sys.stderr)"
    result = fusionrun(*reach(fusionrun), sys.executable, "-c", code, TEST_WIDTH="3")
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(result.stdout.splitlines()) == [f"[{rank}]<stdout>:{name}" for rank, name in enumerate(HOSTS)]
    assert sum(len(line) >= 200000 for line in result.stderr.splitlines()) == 9
    assert reached(fusionrun) == THROUGH


def test_a_host_that_others_cannot_reach_is_reached_from_here(fusionrun) -> None:
    result = fusionrun(*reach(fusionrun), "true", TEST_WIDTH="3", FROM_HERE="h4")
    assert result.returncode == 0, result.stderr
    assert reached(fusionrun) == THROUGH | {"h4 through launcher"}


@for_each("broken", ["h3", "h4"])
def test_a_host_that_cannot_be_reached_is_named_and_no_other(fusionrun, broken: str) -> None:
    """Whether others were to be reached through it, or not."""
    result = fusionrun(*reach(fusionrun), "sleep", "600", TEST_WIDTH="3", BROKEN=f" {broken} ")
    assert result.returncode == 1
    assert [line for line in result.stderr.splitlines() if "<fusiond>" not in line] == [
        f"fusionrun: host {broken}: it cannot be reached with `{fusionrun.directory}/to {broken}`: no route to {broken}"
    ]


def test_a_worker_that_fails_behind_another_host_ends_the_job_in_its_own_words(fusionrun) -> None:
    code = "import os, sys, time; os.environ['HOROVOD_RANK'] == '5' and sys.exit('no more disk'); time.sleep(600)"
    result = fusionrun(*reach(fusionrun), sys.executable, "-c", code, TEST_WIDTH="3")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "fusionrun: rank 5 on host h5 failed first: no more disk"


def processes_of(fusionrun) -> list[psutil.Process]:
    """The agents, and all that they have started."""
    marker = os.fspath(fusionrun.directory)
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MARKED") == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def begun(fusionrun, until):
    """A job whose nine workers run."""
    marker = os.fspath(fusionrun.directory)
    worker = f"touch {marker}/up.$HOROVOD_RANK; exec sleep 600"
    process = fusionrun.start(*reach(fusionrun), "sh", "-c", worker, TEST_WIDTH="3", MARKED=marker)
    until(lambda: len([*fusionrun.directory.glob("up.*")]) == 9, "nine workers run")
    return process


def test_nothing_is_left_where_the_launcher_is_killed(fusionrun, until) -> None:
    process = begun(fusionrun, until)
    process.kill()
    process.wait()
    until(lambda: not processes_of(fusionrun), "all processes have ended")


def test_a_job_ends_where_a_host_is_gone_through_which_others_are_reached(fusionrun, until) -> None:
    process = begun(fusionrun, until)
    launcher = psutil.Process(process.pid)
    relays = [child for child in launcher.children() if child.environ().get("VIA") == "h3"]
    assert len(relays) == 1
    relays[0].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    told = [line for line in err.splitlines() if line.startswith("fusionrun:")]
    assert {line.split(":")[1] for line in told} == {" host h3", " host h4", " host h5"}
    assert "host h3, through which it is reached, is gone" in err
    until(lambda: not processes_of(fusionrun), "all processes have ended")


@for_each("count", [33, 64, 1000, 1024])
def test_no_host_starts_more_than_the_square_root_of_the_hosts(count: int) -> None:
    """So 1,024 hosts take twice the time of 32: these reach 31 others each, once they have been reached."""

    class Nothing:
        def __getattr__(self, name: str) -> None:
            return None

    hosts = tuple(Host(f"h{number}", 1) for number in range(count))
    plan = LaunchPlan("j", (b"true",), fill(hosts, count), {}, b"/", Settings(), rsh_agent="to {host}")
    ways = Agents(plan, 0.0, Nothing(), Nothing())._ways  # type: ignore[arg-type]
    assert set(ways) == {host.name for host in hosts}
    behind: dict[object, list[str]] = {}
    for name, way in ways.items():
        behind.setdefault(way.relay, []).append(name)
    assert max(len(behind), *map(len, behind.values())) ** 2 < count + 2 * count**0.5 + 1


@for_each("count", [1, 32])
def test_few_hosts_are_all_reached_from_here(count: int) -> None:
    hosts = tuple(Host(f"h{number}", 1) for number in range(count))
    plan = LaunchPlan("j", (b"true",), fill(hosts, count), {}, b"/", Settings(), rsh_agent="to {host}")
    assert Agents(plan, 0.0, None, None)._ways == {}  # type: ignore[arg-type]
