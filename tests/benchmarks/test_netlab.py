"""Labs of network namespaces: hosts reach each other and nothing else, rates hold, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.netlab import Netlab, NetlabError, preflight
from benchmarks.netlab.iproute import bits_per_second
from benchmarks.netlab.registry import STATE_DIR, clean, records
from tests.for_each import for_each

ROOT = Path(__file__).resolve().parents[2]
UNAVAILABLE = preflight()
TIMEOUT_S = 30

needs_root = [
    pytest.mark.root,
    pytest.mark.multiprocess,
    pytest.mark.skipif(UNAVAILABLE is not None, reason=UNAVAILABLE or ""),
]

# Both count what arrives from the first byte on, so that the time to connect and to start Python does not matter.
RECEIVE = """
import socket, time
with socket.create_server(("", 5001)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
with connection:
    size, buffer = 0, bytearray(1 << 20)
    while got := connection.recv_into(buffer):
        start = time.perf_counter() if size == 0 else start
        size += got
print(size, time.perf_counter() - start)
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5001), timeout=20) as connection:
    connection.sendall(bytes(int(sys.argv[2])))
"""
OWNER = """
import signal, sys
from benchmarks.netlab import Netlab
with Netlab(hosts=2, rate="100mbit") as lab:
    child = lab.run(1, ["sleep", "300"])
    print(lab.hosts[0].name, child.pid, flush=True)
    signal.pause()
"""


def transfer_rate(lab: Netlab, sender: int, receiver: int, size: int) -> float:
    """Payload bits per second of one TCP stream of `size` bytes."""
    server = lab.run(receiver, [sys.executable, "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    with server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        client = lab.run(sender, [sys.executable, "-c", SEND, lab.hosts[receiver].name, str(size)])
        assert client.wait(TIMEOUT_S) == 0
        received, seconds = server.stdout.read().split()
    assert int(received) == size
    return size * 8 / float(seconds)


def traces(lab: int) -> list[str]:
    """What there still is of a lab on this machine."""
    names = [f"nl{lab}br", *(f"nl{lab}h{index}" for index in range(9))]
    paths = [STATE_DIR / str(lab), *(Path(folder, name) for name in names for folder in ("/run/netns", "/etc/netns"))]
    return [str(path) for path in paths if path.exists()]


def lab_number(host_name: str) -> int:
    return int(host_name.removeprefix("nl").partition("h")[0])


@contextlib.contextmanager
def owner_process() -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Another process that owns a lab: the process, the lab's number, and the id of what it runs on host 1."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with owner:
        try:
            assert owner.stdout is not None
            name, child = owner.stdout.readline().split()
            deadline = time.monotonic() + TIMEOUT_S
            while not Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"):  # not in its namespace yet
                assert time.monotonic() < deadline
                os.sched_yield()
            yield owner, lab_number(name), int(child)
        finally:
            owner.kill()


def runs(pid: int) -> bool:
    """Whether a process is alive; a zombie that waits for init is not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


class TestWithNamespaces:
    pytestmark = needs_root

    def test_hosts_reach_each_other_by_name_and_nobody_else(self) -> None:
        with Netlab(hosts=3) as lab:
            assert len({host.address for host in lab.hosts}) == 3
            for sender, receiver in [(0, 1), (2, 0), (1, 1)]:
                assert transfer_rate(lab, sender, receiver, 1000) > 0
            routes = lab.run(0, ["ip", "route"], stdout=subprocess.PIPE, text=True).communicate()[0].splitlines()
            assert [route.split()[0] for route in routes] == [lab.hosts[0].address.rpartition(".")[0] + ".0/24"]

    def test_the_machines_own_network_does_not_change(self) -> None:
        before = os.listdir("/sys/class/net")
        with Netlab(hosts=2, rate="1gbit"):
            assert os.listdir("/sys/class/net") == before

    def test_the_machines_name_means_the_host_itself(self) -> None:
        code = "import socket; print(socket.gethostbyname(socket.gethostname()))"
        with Netlab(hosts=2) as lab:
            process = lab.run(1, [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            assert process.communicate(timeout=TIMEOUT_S)[0].strip() == lab.hosts[1].address

    def test_the_agent_runs_a_command_on_the_named_host(self) -> None:
        with Netlab(hosts=2) as lab:
            agent = lab.agent.format(host=lab.hosts[1].name).split()
            shown = subprocess.run([*agent, "ip", "address", "show", "eth0"], capture_output=True, text=True).stdout
            assert lab.hosts[1].address in shown

    def test_two_labs_live_side_by_side(self) -> None:
        with Netlab(hosts=2) as one, Netlab(hosts=2) as two:
            assert not {host.address for host in one.hosts} & {host.address for host in two.hosts}
            assert transfer_rate(one, 0, 1, 1000) > 0
            assert transfer_rate(two, 0, 1, 1000) > 0

    def test_a_rate_limits_both_directions_and_can_be_changed_live(self) -> None:
        with Netlab(hosts=3, rate="80mbit", rates={2: None}) as lab:
            # At most the rate, the free start of one burst aside; how much less depends on the machine.
            assert transfer_rate(lab, 0, 2, 2_000_000) < 95e6, "what host 0 sends is not limited"
            assert transfer_rate(lab, 2, 0, 2_000_000) < 95e6, "what host 0 receives is not limited"
            lab.set_rate(0, "20mbit")
            assert transfer_rate(lab, 0, 2, 1_000_000) < 24e6
            lab.set_rate(lab.hosts[0], None)
            lab.set_rate(lab.hosts[0].name, None)
            assert any(transfer_rate(lab, 0, 2, 8_000_000) > 95e6 for _ in range(20)), "on a busy machine, not always"

    def test_an_exception_removes_the_lab_and_what_runs_in_it(self) -> None:
        with contextlib.suppress(ZeroDivisionError), Netlab(hosts=2) as lab:
            number = lab_number(lab.hosts[0].name)
            child = lab.run(0, ["sleep", "300"])
            # An orphan with SIGTERM ignored, which says so once the signal is ignored.
            stubborn = "trap '' TERM; echo ready; sleep 300 & wait"
            orphan = lab.run(1, ["setsid", "sh", "-c", stubborn], stdout=subprocess.PIPE, text=True)
            assert orphan.stdout is not None
            with orphan.stdout as said:
                assert said.readline() == "ready\n"
            raise ZeroDivisionError
        assert traces(number) == []
        assert child.returncode == -signal.SIGTERM
        assert orphan.returncode == -signal.SIGKILL

    def test_a_failure_while_it_is_built_leaves_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        numbers: list[int] = []

        def fail(lab: Netlab, host: object, rate: str | None) -> None:
            numbers.append(lab_number(lab.hosts[0].name))
            raise NetlabError("no such qdisc")

        monkeypatch.setattr(Netlab, "set_rate", fail)
        with pytest.raises(NetlabError, match="no such qdisc"):
            Netlab(hosts=2, rate="1gbit").__enter__()
        assert traces(numbers[0]) == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
    def test_a_signal_to_the_owner_removes_the_lab(self, number: signal.Signals) -> None:
        with owner_process() as (owner, lab, child):
            assert traces(lab)
            owner.send_signal(number)
            assert owner.wait(TIMEOUT_S) == -number
        assert traces(lab) == []
        assert not runs(child)

    def test_the_next_lab_removes_that_of_a_killed_owner(self) -> None:
        with owner_process() as (owner, lab, child):
            owner.kill()
            owner.wait(TIMEOUT_S)
            assert traces(lab)
            with Netlab(hosts=1) as other:
                # The number is free again, so what there is of it can only be the new lab's single host.
                assert f"/run/netns/nl{lab}h1" not in traces(lab)
                assert not runs(child)
                assert [host.index for host in other.hosts] == [0]
        assert traces(lab) == []

    def test_clean_removes_dead_labs_and_spares_living_ones(self) -> None:
        with Netlab(hosts=1) as living, owner_process() as (owner, lab, _):
            assert lab not in [record.lab for record in clean()]
            owner.kill()
            owner.wait(TIMEOUT_S)
            assert lab in [record.lab for record in clean()]
            assert traces(lab) == []
            assert (os.getpid(), True, (living.hosts[0].name,)) in [(r.owner, r.alive, r.hosts) for r in records()]

    def test_a_forked_child_that_exits_leaves_its_parents_lab_alone(self) -> None:
        code = (
            "import os, sys\nfrom benchmarks.netlab import Netlab\n"
            "with Netlab(hosts=2) as lab:\n"
            "    pid = os.fork()\n"
            "    if pid == 0: sys.exit(0)\n"
            "    os.waitpid(pid, 0)\n"
            "    sys.exit(lab.run(0, ['true']).wait())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr

    def test_the_command_runs_another_with_the_lab_in_its_environment(self) -> None:
        agent = '$(echo "$NETLAB_AGENT" | sed "s/{host}/${NETLAB_HOSTS%%,*}/")'
        script = f"echo $NETLAB_HOSTS; {agent} ip -4 -br address; exit 7"
        done = command("--hosts", "2", "--rate", "1gbit", "--host-rate", "1=100mbit", "--", "sh", "-c", script)
        names, *addresses = done.stdout.splitlines()
        number = lab_number(names)
        assert names == f"nl{number}h0,nl{number}h1"
        assert any(f"10.77.{number}.1/24" in line for line in addresses)
        assert done.returncode == 7
        assert traces(number) == []

    def test_the_command_can_run_on_a_host(self) -> None:
        done = command("--hosts", "2", "--inside", "1", "--", "ip", "-4", "-br", "address", "show", "eth0")
        assert done.stdout.split()[2].endswith(".2/24")

    def test_sigterm_to_the_command_ends_what_it_runs(self) -> None:
        argv = [sys.executable, "-m", "benchmarks.netlab", "--", "sh", "-c", "echo $NETLAB_HOSTS $$; exec sleep 300"]
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
            assert owner.stdout is not None
            names, child = owner.stdout.readline().split()
            owner.terminate()
            assert owner.wait(TIMEOUT_S) == -signal.SIGTERM
        assert not runs(int(child))
        assert traces(lab_number(names)) == []

    def test_a_host_that_does_not_exist_is_named(self) -> None:
        with Netlab(hosts=1) as lab, pytest.raises(NetlabError, match=f"5 is not a host .* has {lab.hosts[0].name}"):
            lab.run(5, ["true"])


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.netlab", *argv], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@for_each(
    ("rate", "bits"), [("1gbit", 10**9), ("2.5Gbit", 25 * 10**8), ("100mbit", 10**8), ("8kbit", 8000), ("64bit", 64)]
)
def test_a_rate_is_read(rate: str, bits: int) -> None:
    assert bits_per_second(rate) == bits


@for_each("rate", ["", "1", "fast", "1gbps", "-1gbit", "0mbit", "1 gbit/s", "1e9bit"])
def test_what_is_no_rate_is_refused(rate: str) -> None:
    with pytest.raises(NetlabError, match="is not a rate: write a number"):
        bits_per_second(rate)


def test_impossible_labs_are_refused_before_anything_is_made() -> None:
    with pytest.raises(NetlabError, match="0 hosts cannot be made"):
        Netlab(hosts=0)
    with pytest.raises(NetlabError, match="there is no host 2 to limit"):
        Netlab(hosts=2, rates={2: "1gbit"})
    with pytest.raises(NetlabError, match="'quick' is not a rate"):
        Netlab(hosts=2, rate="quick")


def test_preflight_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert preflight() == "network namespaces need root: run this with sudo."
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert preflight() == "the command `ip` is missing: install iproute2 (Debian: apt-get install iproute2)."


@for_each("argv", [[], ["list", "--", "true"], ["--host-rate", "fast", "--", "true"], ["wipe"]])
def test_a_wrong_command_line_exits_with_2(argv: list[str]) -> None:
    assert command(*argv).returncode == 2
