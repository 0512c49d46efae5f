"""Flags of `fusionrun`, and what becomes of them."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

import fusion_rt
from fusion_rt.core.errors import SettingError
from fusion_rt.runner.command.cli import main, make_parser, make_plan
from fusion_rt.runner.decisions.host_list import Host
from fusion_rt.runner.decisions.limits import ElasticLimits
from fusion_rt.runner.launch.launch_plan import ElasticPlan, LaunchPlan
from fusion_rt.units import MIB
from tests.for_each import for_each


def plan_of(*arguments: str) -> LaunchPlan:
    return make_plan(make_parser().parse_args(arguments))


def test_the_command_is_the_rest_of_the_line() -> None:
    plan = plan_of("-np", "2", "python", "train.py", "--lr", "0.1", "-np", "7", "--verbose")
    assert plan.command == (b"python", b"train.py", b"--lr", b"0.1", b"-np", b"7", b"--verbose")
    assert plan.places.topology.size == 2
    assert not plan.verbose
    assert plan_of("-np", "1", "--", "-odd-name").command == (b"-odd-name",)


def test_without_hosts_all_workers_are_here() -> None:
    plan = plan_of("-np", "3", "x")
    assert plan.places.hosts == (Host("localhost", 3),)
    assert plan.places.topology.ranks == ((0, 1, 2),)
    assert plan.directory == os.fsencode(os.getcwd())


def test_without_np_every_slot_is_used(tmp_path: Path) -> None:
    assert plan_of("-H", "a:2,b:3", "x").places.topology.ranks == ((0, 1), (2, 3, 4))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=2\n# none\n")
    assert plan_of("-hostfile", str(hostfile), "x").places.topology.size == 2


@for_each(
    ("line", "number"),
    [("", 6), ("-np 3", 3), ("--max-np 4", 4), ("--max-np 9", 6), ("-np 3 --max-np 4", 3)],
)
def test_the_number_of_workers(line: str, number: int) -> None:
    assert plan_of("-H", "a:4,b:2", *line.split(), "x").places.size == number


@for_each(
    ("line", "complaint"),
    [
        ("--min-np 4 --max-np 3", "--min-np 4 is above --max-np 3"),
        ("--min-np 4 -np 3", "--min-np 4 is above -np 3"),
        ("-np 4 --max-np 3", "-np 4 is above --max-np 3"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(line: str, complaint: str) -> None:
    with pytest.raises(SettingError, match=complaint):
        plan_of("-H", "a:4,b:2", *line.split(), "x")


def test_flags_may_be_abbreviated() -> None:
    plan = plan_of("--num-p", "2", "--fusion", "4", "--verb", "--output", "d", "--hosts", "a:2", "x")
    assert plan.places.topology.hosts == ("a",)
    assert plan.settings.fusion_threshold == 4 * 2**20
    assert plan.verbose
    assert plan.output_directory == "d"


def test_all_flags_reach_the_plan(tmp_path: Path) -> None:
    key = tmp_path / "id"
    key.write_text("")
    plan = plan_of(
        *("-np", "1", "-H", "h:1", "-p", "22", "-i", str(key), "--rsh-agent", "ssh -x {host}"),
        *("--network-interface", "eth0", "--network-interfaces", "ib0,ib1", "--prefix-output-with-timestamp"),
        *("--as-horovod", "x"),
    )
    assert (plan.ssh_port, plan.ssh_identity_file, plan.rsh_agent) == (22, str(key), "ssh -x {host}")
    assert plan.interfaces == ("eth0", "ib0", "ib1")
    assert plan.timestamps
    assert plan.as_horovod


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
    assert plan.settings.log_level == "DEBUG"
    assert plan.settings.encryption == "all"


def test_shard_hosts_come_from_flag_file_or_environment_and_travel_as_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("params: {shard_hosts: d}\n")
    monkeypatch.setenv("FUSION_SHARD_HOSTS", "e")
    job = ("-np", "2", "-H", "a:1,b:1")
    for flags, names in (
        (("--shard-hosts", "ann@c,a", "--config-file", str(file)), "c,a"),
        (("--config-file", str(file)), "d"),
        ((), "e"),
    ):
        plan = plan_of(*job, *flags, "x")
        assert plan.settings.shard_hosts == names
        assert plan.environment[b"FUSION_SHARD_HOSTS"] == names.encode()
        assert plan.places.topology.hosts == ("a", "b", names[0])
        assert plan.places.topology.ranks == ((0,), (1,), ())
        assert plan.places.topology.homes(plan.settings.shard_hosts)[-1] == 2
    monkeypatch.delenv("FUSION_SHARD_HOSTS")
    plan = plan_of(*job, "x")
    assert plan.places.topology.hosts == ("a", "b")
    assert b"FUSION_SHARD_HOSTS" not in plan.environment


def test_a_size_may_have_a_unit() -> None:
    assert plan_of("-np", "1", "--fusion-threshold-mb", "512KiB", "x").settings.fusion_threshold == 512 * 1024


def test_a_flag_beats_the_file_which_beats_the_environment_which_beats_the_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "1MiB")
    file = tmp_path / "c.yaml"
    file.write_text("params: {fusion_threshold_mb: 2}\nstall_check: {enabled: false}\n")
    plan = plan_of("-np", "1", "x")
    assert (plan.settings.fusion_threshold, plan.settings.stall_check) == (MIB, True)
    plan = plan_of("-np", "1", "--config-file", str(file), "x")
    assert (plan.settings.fusion_threshold, plan.settings.stall_check) == (2 * MIB, False)
    assert plan.settings.operation_timeout == math.inf
    plan = plan_of("-np", "1", "--fusion-threshold-mb", "3", "--stall-check", "--config-file", str(file), "x")
    assert (plan.settings.fusion_threshold, plan.settings.stall_check) == (3 * MIB, True)
    assert plan.environment[b"HOROVOD_FUSION_THRESHOLD"] == b"3145728"
    assert plan.warnings == ()


def test_a_plan_has_the_warnings_of_flags_file_and_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("parms: {}\n")
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    told = plan_of("-np", "1", "--mpi", "--config-file", str(file), "x").warnings
    assert [re.split(": | that is", sentence)[0] for sentence in told] == [
        f"{file} has a key 'parms'",
        "accepted as in horovodrun, but without effect here",
    ]


def test_hosts_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho a:2\necho b\n")
    script.chmod(0o755)
    plan = plan_of("--host-discovery-script", str(script), "--slots", "3", "--max-np", "4", "x")
    assert plan.places.hosts == (Host("a", 2), Host("b", 3))
    assert plan.environment[b"HOROVOD_ELASTIC"] == b"1"
    assert plan.elastic is not None
    assert plan.elastic.limits == ElasticLimits(1, 1, 4, 600.0, 100, 60.0, 30.0)
    assert plan.elastic.cooldown == (10.0, 300.0)
    assert plan.elastic.script is not None
    assert not plan.warnings


def test_how_membership_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of("-np", "2", "--max-np", "4", "x").elastic is None
    flags = ("--reset-limit", "3", "--blacklist-cooldown-range", "5", "1min", "--elastic-timeout", "2min")
    flags += ("--newcomer-timeout", "40s", "--restart-limit", "7", "--leave-timeout", "3min")
    plan = plan_of("-np", "3", "--min-np", "2", "-H", "a:2,b:2", *flags, "x")
    silence = plan.settings.heartbeat_timeout
    limits = ElasticLimits(3, 2, None, 120.0, 3, 180.0, 30.0, probe=silence, begin=40.0, failures=7)
    assert plan.elastic == ElasticPlan(limits, (5.0, 60.0))
    plan = plan_of("-np", "3", "--min-np", "2", "-H", "a:2,b:2", *flags, "--restart-limit", "0", "x")
    assert plan.elastic == ElasticPlan(replace(limits, restarts=False, failures=0), (5.0, 60.0))
    monkeypatch.setenv("HOROVOD_ELASTIC_TIMEOUT", "7")
    plan = plan_of("--min-np", "2", "-H", "a:2", "x")
    assert plan.elastic is not None
    assert (plan.elastic.limits.timeout, plan.elastic.limits.wanted) == (7.0, 2)


@for_each(
    ("flags", "complaint"),
    [
        ("--blacklist-cooldown-range 5 x", "--blacklist-cooldown-range: '5 x' is not two durations"),
        ("--blacklist-cooldown-range 9 5", "'9 5' is not a range: MIN is above 0 and not above MAX"),
        ("--shard-hosts a", "--shard-hosts (FUSION_SHARD_HOSTS) names hosts that have to stay"),
        ("--max-np 1", "--min-np 2 is above --max-np 1"),
    ],
)
def test_what_an_elastic_job_cannot_have_is_refused(flags: str, complaint: str) -> None:
    with pytest.raises(SettingError, match=re.escape(complaint)):
        plan_of("--min-np", "2", "-H", "a:2", *flags.split(), "x")


def test_the_slots_of_hosts_for_which_none_are_given(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a\nb slots=1\n")
    assert plan_of("-H", "a,b:1", "--slots-per-host", "2", "x").places.topology.ranks == ((0, 1), (2,))
    plan = plan_of("-hostfile", str(hostfile), "--slots-per-host", "2", "x")
    assert plan.places.topology.ranks == ((0, 1), (2,))
    assert b"HOROVOD_ELASTIC" not in plan.environment


def test_hosts_that_cannot_be_found_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho the grid is down >&2\nexit 4\n")
    script.chmod(0o755)
    assert main(["--host-discovery-script", str(script), "x"]) == 1
    said = f"fusionrun: the host discovery script '{script}' failed with status 4; it said:\n  the grid is down\n"
    assert capsys.readouterr().err == said


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
        (["-np", "0", "x"], "-np: '0' is below the least value allowed, 1"),
        (["-np", "two", "x"], "-np: 'two' is not a whole number"),
        (["-np", "3", "-H", "a:2", "x"], "more processes than the 2 slots"),
        (["-np", "5000", "x"], "'5000' slots of 'localhost:5000' is not a number from 1 to 4096"),
        (["--hosts=-oProxyCommand=x", "x"], "is not a host"),
        (["-H", "a:b", "x"], "'b' slots of 'a:b'"),
        (["-H", "a", "-hostfile", "f", "x"], "-H and -hostfile cannot be given together"),
        (
            ["-np", "1", "--config-file", "/no/such/file", "x"],
            "--config-file /no/such/file cannot be read: No such file",
        ),
        (["-np", "1", "--autotune", "--no-autotune", "x"], "it is switched on and off; give one of them"),
        (["-np", "3", "--min-np", "4", "x"], "--min-np 4 is above -np 3"),
        (["-hostfile", "/no/such/file", "x"], "the hostfile cannot be read"),
        (["-np", "1", "--no-such-flag", "x"], "unrecognized arguments"),
        (["-np", "1", "--fusion-threshold-mb", "lots", "x"], "--fusion-threshold-mb: 'lots' is not a size"),
        (["-np", "1", "--log-level", "loud", "x"], "--log-level: 'loud' is not one of TRACE, DEBUG"),
        (["-np", "1", "--start-timeout", "0", "x"], "--start-timeout: '0' is below the least value allowed, 0.001"),
        (["-np", "1", "--encryption", "some", "x"], "--encryption: 'some' is not one of auto"),
        (["-np", "1", "--compression", "topk(density=2)", "x"], "--compression: the density is the share of elements"),
        (["-np", "1", "--compression", "topkk", "x"], "there is no codec 'topkk'; did you mean 'topk'?"),
        (["-np", "1", "--rsh-agent", "ssh", "x"], "--rsh-agent 'ssh' has no {host}"),
        (["-np", "1", "-i", "/no/such/key", "x"], "/no/such/key is not a file"),
        (["-np", "1", "--shard-hosts", "c,c", "x"], "host c is named twice"),
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
    assert "HOROVOD_START_TIMEOUT: 'soon' is not a duration such as 30s" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_the_version_is_printed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out.strip() == fusion_rt.__version__


def test_jobs_have_ids_of_their_own() -> None:
    assert plan_of("-np", "1", "x").job != plan_of("-np", "1", "x").job


def test_words_that_are_not_text_survive() -> None:
    odd = os.fsdecode(b"\xff\xfe")
    assert plan_of("-np", "1", "x", odd).command[1] == b"\xff\xfe"
