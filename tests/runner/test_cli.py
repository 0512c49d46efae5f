"""Flags of `fusionrun`, and what becomes of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fusion_rt
from fusion_rt.runner.cli import main, make_parser, make_plan
from fusion_rt.runner.hosts import Host
from fusion_rt.runner.plan import LaunchPlan


def plan_of(*arguments: str) -> LaunchPlan:
    return make_plan(make_parser().parse_args(arguments))


def test_the_command_is_the_rest_of_the_line() -> None:
    plan = plan_of("-np", "2", "python", "train.py", "--lr", "0.1", "-np", "7", "--verbose")
    assert plan.command == (b"python", b"train.py", b"--lr", b"0.1", b"-np", b"7", b"--verbose")
    assert plan.topology.size == 2
    assert not plan.verbose
    assert plan_of("-np", "1", "--", "-odd-name").command == (b"-odd-name",)


def test_without_hosts_all_workers_are_here() -> None:
    plan = plan_of("-np", "3", "x")
    assert plan.hosts == (Host("localhost", 3),)
    assert plan.topology.ranks == ((0, 1, 2),)
    assert plan.directory == os.fsencode(os.getcwd())


def test_without_np_every_slot_is_used(tmp_path: Path) -> None:
    assert plan_of("-H", "a:2,b:3", "x").topology.ranks == ((0, 1), (2, 3, 4))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\n# none\n")
    assert plan_of("-hostfile", str(hostfile), "x").topology.size == 2


def test_flags_may_be_abbreviated() -> None:
    plan = plan_of("--num", "2", "--fusion", "4", "--verb", "--output", "d", "--hosts", "a:2", "x")
    assert plan.topology.hosts == ("a",)
    assert plan.settings.fusion_threshold == 4 * 2**20
    assert plan.verbose
    assert plan.output_directory == "d"


def test_all_flags_reach_the_plan(tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.write_text("")
    plan = plan_of(
        *("-np", "1", "-H", "h:1", "-p", "22", "-i", str(key), "--rsh-agent", "ssh -x {host}"),
        *("--network-interface", "eth0", "--network-interface", "ib0,ib1", "--prefix-output-with-timestamp", "x"),
    )
    assert (plan.ssh_port, plan.ssh_identity_file, plan.rsh_agent) == (22, str(key), "ssh -x {host}")
    assert plan.interfaces == ("eth0", "ib0", "ib1")
    assert plan.timestamps


def test_a_setting_given_as_a_flag_beats_the_environment_and_travels_as_a_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1MiB")
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "77")
    plan = plan_of("-np", "1", "--fusion-threshold-mb", "32", "--log-level", "DEBUG", "--encryption", "all", "x")
    assert plan.environment[b"HOROVOD_FUSION_THRESHOLD"] == b"33554432"
    assert plan.environment[b"HOROVOD_START_TIMEOUT"] == b"77"
    assert plan.settings.fusion_threshold == 32 * 2**20
    assert plan.settings.start_timeout == 77.0
    assert plan.settings.log_level == "debug"
    assert plan.settings.encryption == "all"


def test_a_size_may_have_a_unit() -> None:
    assert plan_of("-np", "1", "--fusion-threshold-mb", "512KiB", "x").settings.fusion_threshold == 512 * 1024


def test_unset_flags_leave_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_FUSION_THRESHOLD", raising=False)
    assert b"HOROVOD_FUSION_THRESHOLD" not in plan_of("-np", "1", "x").environment


def test_the_environment_is_forwarded_but_for_what_belongs_to_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"MY_WORD": "a b'c", "CUDA_HOME": "/cuda"}
    for name, value in {
        **kept,
        "BASH_FUNC_x%%": "() { :; }",
        "OLDPWD": "/",
        "CUDA_VISIBLE_DEVICES": "0",
        "NVIDIA_CUDA_VISIBLE_DEVICES": "0",
        "XDG_RUNTIME_DIR": "/run/user/0",
    }.items():
        monkeypatch.setenv(name, value)
    environment = plan_of("-np", "1", "x").environment
    assert {name: environment[name.encode()].decode() for name in kept} == kept
    names = b" ".join(environment)
    assert all(word not in names for word in (b"BASH_FUNC", b"OLDPWD", b"VISIBLE_DEVICES", b"XDG_RUNTIME_DIR"))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-np", "2"], "there is no command to run"),
        (["-np", "2", "--"], "there is no command to run"),
        (["x"], "-np, the number of workers, is missing"),
        (["-np", "0", "x"], "'0' is not a positive number"),
        (["-np", "two", "x"], "'two' is not a positive number"),
        (["-np", "3", "-H", "a:2", "x"], "more processes than the 2 slots"),
        (["-np", "5000", "x"], "'5000' slots of 'localhost:5000' is not a number from 1 to 4096"),
        (["--hosts=-oProxyCommand=x", "x"], "is not a host"),
        (["-H", "a:b", "x"], "'b' slots of 'a:b'"),
        (["-H", "a", "-hostfile", "f", "x"], "not allowed with argument"),
        (["-hostfile", "/no/such/file", "x"], "the hostfile cannot be read"),
        (["-np", "1", "--no-such-flag", "x"], "unrecognized arguments"),
        (["-np", "1", "--fusion-threshold-mb", "lots", "x"], "--fusion-threshold-mb lots: 'lots' is not a size"),
        (["-np", "1", "--log-level", "loud", "x"], "--log-level loud: "),
        (["-np", "1", "--start-timeout", "0", "x"], "--start-timeout 0: "),
        (["-np", "1", "--encryption", "some", "x"], "--encryption some: "),
        (["-np", "1", "--rsh-agent", "ssh", "x"], "--rsh-agent 'ssh' has no {host}"),
        (["-np", "1", "-i", "/no/such/key", "x"], "/no/such/key is not a file"),
    ],
)
def test_a_bad_flag_exits_with_2_and_a_sentence(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_bad_variable_exits_with_2_and_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(SystemExit) as caught:
        main(["-np", "1", "x"])
    assert caught.value.code == 2
    assert "HOROVOD_START_TIMEOUT='soon'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_the_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == fusion_rt.__version__


def test_the_help_names_flags_with_their_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--fusion-threshold-mb" in text
    assert "HOROVOD_FUSION_THRESHOLD" in text


def test_jobs_have_ids_of_their_own() -> None:
    assert plan_of("-np", "1", "x").job != plan_of("-np", "1", "x").job


def test_words_that_are_not_text_survive() -> None:
    odd = os.fsdecode(b"\xff\xfe")
    assert plan_of("-np", "1", "x", odd).command[1] == b"\xff\xfe"
