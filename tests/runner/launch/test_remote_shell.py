"""How hosts are reached: the words of the command, and the sentence when it fails."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from fusion_rt.core.errors import SettingError
from fusion_rt.runner.decisions.host_list import Host, parse_hosts
from fusion_rt.runner.decisions.places import fill
from fusion_rt.runner.launch.launch_plan import LaunchPlan
from fusion_rt.runner.launch.remote_shell import agent_argv, agent_environment, check_template, explain, is_remote
from fusion_rt.settings import Settings
from tests.for_each import for_each

AGENT = [sys.executable, "-m", "fusion_rt.runner.agent"]


def make_plan(hosts: str = "a,b", **changes: object) -> LaunchPlan:
    wanted = parse_hosts(hosts)
    places = fill(wanted, sum(host.slots for host in wanted))
    plan = LaunchPlan("j", (b"true",), places, {}, b"/home/ann", Settings())
    return replace(plan, **changes)  # type: ignore[arg-type]


def test_this_machine_is_reached_without_a_shell() -> None:
    plan = make_plan("localhost:2")
    assert agent_argv(plan, plan.places.hosts[0]) == AGENT
    assert not is_remote(plan, plan.places.hosts[0])


def test_ssh_gets_horovods_options_and_no_secrets() -> None:
    plan = make_plan("ann@b", ssh_port=2222, ssh_identity_file="/keys/id", environment={b"TOKEN": b"secret"})
    words = agent_argv(plan, plan.places.hosts[0])
    text = " ".join(words)
    assert words[0] == "ssh"
    for option in ("PasswordAuthentication=no", "StrictHostKeyChecking=accept-new", "BatchMode=yes"):
        assert f"-o {option}" in text
    assert "-p 2222 -i /keys/id ann@b env PYTHONSAFEPATH=1" in text
    assert words[-3:] == AGENT
    assert "secret" not in text


def test_words_are_quoted_for_the_shell_behind_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my py/bin/python")
    plan = make_plan(environment={b"PYTHONPATH": b"/it's:rel::"})
    words = agent_argv(plan, plan.places.hosts[0])
    behind = shlex.split(" ".join(words[words.index("a") + 1 :]))
    assert behind == [
        "env",
        "PYTHONSAFEPATH=1",
        "PYTHONPATH=/it's:/home/ann/rel",
        "/opt/my py/bin/python",
        *AGENT[1:],
    ]


def test_words_are_not_quoted_for_an_agent_without_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my py/bin/python")
    plan = make_plan(rsh_agent="ip netns exec {host}")
    assert agent_argv(plan, plan.places.hosts[1]) == [
        *("ip", "netns", "exec", "b", "env", "PYTHONSAFEPATH=1"),
        *("/opt/my py/bin/python", *AGENT[1:]),
    ]


@pytest.mark.parametrize(
    ("template", "quoted"),
    [
        ("ssh -x {host}", True),
        ("/usr/bin/ssh {host}", True),
        ("sudo -u ann ssh {host}", True),
        ("env A=B rsh {host}", True),
        ("docker exec -i {host}", False),
        ("nsenter --target={host} --net", False),
        ("./to.sh {host} ssh", False),
    ],
)
def test_a_remote_shell_is_known_by_a_word_before_the_host(
    template: str, quoted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/python")
    plan = make_plan(rsh_agent=template)
    assert ("'/a b/python'" in agent_argv(plan, plan.places.hosts[0])) is quoted


def test_an_agent_behind_a_shell_and_one_without_understand_the_same_words() -> None:
    plan = make_plan(environment={b"PYTHONPATH": b"/x"}, rsh_agent="{host} {host}".replace("{host}", "echo", 1))
    words = agent_argv(plan, plan.places.hosts[0])
    direct = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    shell = subprocess.run(["sh", "-c", " ".join(words)], capture_output=True, text=True, check=True).stdout
    assert direct == shell == f"a env PYTHONSAFEPATH=1 PYTHONPATH=/x {' '.join(AGENT)}\n"


def test_an_rsh_agent_reaches_even_this_machine() -> None:
    plan = make_plan("localhost", rsh_agent="my {host}")
    assert is_remote(plan, plan.places.hosts[0])
    assert agent_argv(plan, plan.places.hosts[0])[:2] == ["my", "localhost"]


@for_each("template", ["ssh", "{host}", "ssh 'oops {host}"])
def test_a_template_without_a_place_for_the_host_is_refused(template: str) -> None:
    with pytest.raises(SettingError, match="--rsh-agent"):
        check_template(template)


def test_a_local_agent_keeps_out_of_the_working_directory_but_finds_relative_paths() -> None:
    plan = make_plan("localhost", environment={b"PYTHONPATH": b"src:/lib"})
    environ = agent_environment(plan)
    assert environ[b"PYTHONPATH"] == b"/home/ann/src:/lib"
    assert environ[b"PYTHONSAFEPATH"] == b"1"
    assert environ[b"PATH"] == os.environb[b"PATH"]


@for_each(
    ("status", "words", "sentence"),
    [
        (255, "x\nssh: Could not resolve hostname a.\n", "with `ssh a`: ssh: Could not resolve hostname a"),
        (255, "", "said nothing"),
        (1, "/x/python: No module named fusion_rt", "the package fusion_rt is missing there"),
        (1, "x\nModuleNotFoundError: No module named 'msgspec'", "the package msgspec is missing there"),
        (127, f"env: '{sys.executable}': No such file or directory", f"no Python at {sys.executable}"),
    ],
)
def test_each_way_to_miss_a_host_has_its_sentence(status: int, words: str, sentence: str) -> None:
    plan = make_plan()
    assert sentence in explain(plan, plan.places.hosts[0], status, words)


def test_the_sentence_names_the_command_but_not_what_is_behind_it() -> None:
    plan = make_plan(rsh_agent="ip netns exec {host}", environment={b"PYTHONPATH": b"/x"})
    assert explain(plan, plan.places.hosts[0], 1, 'Cannot open network namespace "a": No such file') == (
        'it cannot be reached with `ip netns exec a`: Cannot open network namespace "a": No such file'
    )


def loopback(hosts: str, rsh_agent: str = "") -> bool:
    plan = make_plan(hosts, rsh_agent=rsh_agent)
    return plan.are_loopback(plan.places.hosts)


def test_loopback_is_for_jobs_that_are_all_here() -> None:
    assert loopback("127.0.0.1,localhost")
    assert not loopback("127.0.0.1,b")
    assert not loopback("a", rsh_agent="x {host}")
    assert loopback("localhost", rsh_agent="x {host}")
    assert Host("localhost").is_loopback
