"""Horovod's contract for the command line: every flag, what becomes of it, and its abbreviations."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest

from fusion_rt.core.errors import SettingError
from fusion_rt.knobs import GROUPS
from fusion_rt.runner.command.flags import Choices, choices_in, make_parser
from fusion_rt.settings import KNOBS
from tests.for_each import for_each


def parsed(line: str) -> Choices:
    return Choices(choices_in(make_parser().parse_args(shlex.split(line))))


# Horovod's flags, an option of the launcher that takes the value, and the value.
OPTIONS = [
    ("-np 4", "num_proc", 4),
    ("--num-proc 4", "num_proc", 4),
    ("-cb", "check_build", True),
    ("--check-build", "check_build", True),
    ("--disable-cache", "disable_cache", True),
    ("--network-interfaces eth0,ib0", "network_interfaces", "eth0,ib0"),
    ("--network-interface eth0 --network-interface ib0", "network_interfaces", "eth0,ib0"),
    ("--output-filename logs", "output_filename", "logs"),
    ("--verbose", "verbose", True),
    ("--advise 100 250", "advise", "100 250"),
    ("--config-file c.yaml", "config_file", "c.yaml"),
    ("-p 22", "ssh_port", 22),
    ("--ssh-port 22", "ssh_port", 22),
    ("-i id", "ssh_identity_file", "id"),
    ("--ssh-identity-file id", "ssh_identity_file", "id"),
    ("--min-np 2", "min_num_proc", 2),
    ("--min-num-proc 2", "min_num_proc", 2),
    ("--max-np 8", "max_num_proc", 8),
    ("--max-num-proc 8", "max_num_proc", 8),
    ("--slots-per-host 4", "slots_per_host", 4),
    ("--reset-limit 3", "reset_limit", 3),
    ("--restart-limit 9", "restart_limit", 9),
    ("--leave-timeout 2min", "leave_timeout", 120.0),
    ("--newcomer-timeout 90s", "newcomer_timeout", 90.0),
    ("--blacklist-cooldown-range 60 300", "blacklist_cooldown_range", "60 300"),
    ("--mpi-args='--map-by ppr:6:node'", "mpi_args", "--map-by ppr:6:node"),
    ("--binding-args='--rankfile f'", "binding_args", "--rankfile f"),
    ("-prefix-timestamp", "prefix_output_with_timestamp", True),
    ("--prefix-output-with-timestamp", "prefix_output_with_timestamp", True),
    ("-H a:1,b:2", "hosts", "a:1,b:2"),
    ("--hosts a:1,b:2", "hosts", "a:1,b:2"),
    ("-hostfile f", "hostfile", "f"),
    ("--hostfile f", "hostfile", "f"),
    ("--host-discovery-script ./d.sh", "host_discovery_script", "./d.sh"),
    ("--gloo", "use_gloo", True),
    ("--mpi", "use_mpi", True),
    ("--jsrun", "use_jsrun", True),
]

# Horovod's flags that become variables.
VARIABLES = [
    ("--start-timeout 60", "HOROVOD_START_TIMEOUT", "60"),
    ("--fusion-threshold-mb 32", "HOROVOD_FUSION_THRESHOLD", "33554432"),
    ("--fusion-threshold-mb 512KiB", "HOROVOD_FUSION_THRESHOLD", "524288"),
    ("--cycle-time-ms 3.5", "HOROVOD_CYCLE_TIME", "3.5"),
    ("--cycle-time-ms 1s", "HOROVOD_CYCLE_TIME", "1000"),
    ("--metrics-port 9464", "FUSION_METRICS_PORT", "9464"),
    ("--ports 20000-20100", "FUSION_PORTS", "20000-20100"),
    ("--metrics-token-file /token", "FUSION_METRICS_TOKEN_FILE", "/token"),
    ("--insecure-rendezvous", "FUSION_INSECURE_RENDEZVOUS", "1"),
    ("--cache-capacity 2048", "HOROVOD_CACHE_CAPACITY", "2048"),
    ("--hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    ("--no-hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
    ("--hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
    ("--no-hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER", "0"),
    ("--torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", "1"),
    ("--no-torus-allreduce", "HOROVOD_TORUS_ALLREDUCE", "0"),
    ("--trace", "FUSION_TRACE", "1"),
    ("--no-trace", "FUSION_TRACE", "0"),
    ("--trace-dir t", "FUSION_TRACE_DIR", "t"),
    ("--trace-buffer 4MiB", "FUSION_TRACE_BUFFER", "4194304"),
    ("--autotune", "HOROVOD_AUTOTUNE", "1"),
    ("--no-autotune", "HOROVOD_AUTOTUNE", "0"),
    ("--autotune-log-file a.csv", "HOROVOD_AUTOTUNE_LOG", "a.csv"),
    ("--autotune-warmup-samples 3", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "3"),
    ("--autotune-steps-per-sample 10", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "10"),
    ("--autotune-bayes-opt-max-samples 20", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "20"),
    ("--autotune-gaussian-process-noise 0.8", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.8"),
    ("--autotune-directory d", "FUSION_AUTOTUNE_DIRECTORY", "d"),
    ("--autotune-keep-order", "FUSION_AUTOTUNE_KEEP_ORDER", "1"),
    ("--auto lossy", "FUSION_AUTO", "lossy"),
    ("--auto=Lossless", "FUSION_AUTO", "lossless"),
    ("--auto-every 100", "FUSION_AUTO_EVERY", "100"),
    ("--elastic-timeout 600", "HOROVOD_ELASTIC_TIMEOUT", "600"),
    ("--timeline-filename t.json", "HOROVOD_TIMELINE", "t.json"),
    ("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    ("--timeline-all-ranks", "FUSION_TIMELINE_ALL_RANKS", "1"),
    ("--timeline-steps 10:21", "FUSION_TIMELINE_STEPS", "10:21"),
    ("--timeline-max-bytes 64MiB", "FUSION_TIMELINE_MAX_BYTES", "67108864"),
    ("--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0"),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1"),
    ("--stall-check-warning-time-seconds 60", "HOROVOD_STALL_CHECK_TIME_SECONDS", "60"),
    ("--stall-check-shutdown-time-seconds 0", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0"),
    ("--stall-check-shutdown-time-seconds 2min", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "120"),
    ("--mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", "1"),
    ("--no-mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE", "0"),
    ("--tcp", "NCCL_IB_DISABLE", "1"),
    ("--num-nccl-streams 2", "HOROVOD_NUM_NCCL_STREAMS", "2"),
    ("--thread-affinity 1", "HOROVOD_THREAD_AFFINITY", "1"),
    ("--gloo-timeout-seconds 30", "HOROVOD_GLOO_TIMEOUT_SECONDS", "30"),
    *((f"--log-level {level}", "HOROVOD_LOG_LEVEL", level)
      for level in ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")),
    ("--log-with-timestamp", "HOROVOD_LOG_HIDE_TIME", "0"),
    ("--log-without-timestamp", "HOROVOD_LOG_HIDE_TIME", "1"),
    ("--log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", "1"),
    ("--no-log-hide-timestamp", "HOROVOD_LOG_HIDE_TIME", "0"),
    ("--compression 'topk(density=0.01)'", "FUSION_COMPRESSION", "topk(density=0.01)"),
    ("--algorithm 'ssp(staleness=2)'", "FUSION_ALGORITHM", "ssp(staleness=2)"),
    ("--overlap forward", "FUSION_OVERLAP", "forward"),
    ("--shard-hosts a,b", "FUSION_SHARD_HOSTS", "a,b"),
    ("--tolerate-losses", "FUSION_TOLERATE_LOSSES", "1"),
    ("--snapshot-every 2min", "FUSION_SNAPSHOT_EVERY", "120"),
    ("--snapshot-directory d", "FUSION_SNAPSHOT_DIRECTORY", "d"),
    ("--snapshot-restore", "FUSION_SNAPSHOT_RESTORE", "1"),
    ("--encryption control", "FUSION_ENCRYPTION", "control"),
]  # fmt: skip


@for_each(("line", "name", "value"), OPTIONS)
def test_flags_that_are_for_the_launcher(line: str, name: str, value: object) -> None:
    assert parsed(f"{line} python x.py")[name] == value


@for_each(("line", "variable", "value"), VARIABLES)
def test_flags_that_become_variables(line: str, variable: str, value: str) -> None:
    assert parsed(f"{line} python x.py").variables() == {variable.encode(): value.encode()}


def test_every_flag_of_the_table_is_tested_here() -> None:
    tested = {word.partition("=")[0] for line, _, _ in OPTIONS + VARIABLES for word in line.split()}
    ours = {"--as-horovod", "--rsh-agent"}
    assert {flag for knob in KNOBS for flag in knob.flags + knob.off} - ours <= tested


@for_each(
    ("short", "name", "value"),
    [
        ("--slots 2", "slots_per_host", 2),
        ("--num-p 2", "num_proc", 2),
        ("--min-nu 2", "min_num_proc", 2),
        ("--fusion 1", "fusion_threshold", 2**20),
        ("--cycle 1", "cycle_time_ms", 0.001),
        ("--timeline-f t", "timeline_filename", "t"),
        ("--no-stall", "stall_check", False),
        ("--stall-check-w 3", "stall_warning_time", 3.0),
        ("--output d", "output_filename", "d"),
        ("--config c", "config_file", "c"),
        ("--host-d d", "host_discovery_script", "d"),
        ("--verb", "verbose", True),
        ("--prefix", "prefix_output_with_timestamp", True),
    ],
)
def test_flags_may_be_abbreviated(short: str, name: str, value: object) -> None:
    assert parsed(f"{short} python x.py")[name] == value


@for_each(
    "line",
    [
        "-np 2 python x.py --log FILE -n 3 --verbose",
        "-np=2 python x.py --log FILE -n 3 --verbose",
        "--num-proc 2 -- python x.py --log FILE -n 3 --verbose",
        "--num-p 2 --blacklist-cooldown-range 1 2 python x.py --log FILE -n 3 --verbose",
    ],
)
def test_flags_of_the_command_are_its_own(line: str) -> None:
    arguments = make_parser().parse_args(shlex.split(line))
    assert [word for word in arguments.command if word != "--"] == shlex.split("python x.py --log FILE -n 3 --verbose")
    choices = Choices(choices_in(arguments))
    assert choices["num_proc"] == 2
    assert not choices["verbose"]


def test_what_is_not_given_has_its_default() -> None:
    choices = parsed("python x.py")
    assert choices.variables() == {}
    assert (choices["slots_per_host"], choices["num_proc"], choices["hosts"]) == (1, None, None)


@for_each(
    ("line", "complaint"),
    [
        ("-H a --hostfile f", "-H and -hostfile cannot be given together: each says where the workers run"),
        ("-H a --host-discovery-script s", "-H and --host-discovery-script cannot be given together"),
        ("--gloo --mpi", "--gloo and --mpi cannot be given together: each names a controller"),
        ("--gloo --mpi --jsrun", "--gloo and --mpi and --jsrun cannot"),
        ("--min-np 0", "--min-np: '0' is below the least value allowed, 1"),
        ("--cache-capacity -1", "--cache-capacity: '-1' is below the least value allowed, 0"),
        ("--autotune-gaussian-process-noise 2", "'2' is above the largest value allowed, 1"),
        ("--ssh-port 70000", "-p: '70000' is above the largest value allowed, 65535"),
        ("--elastic-timeout never", "--elastic-timeout: 'never' is not a duration"),
        ("--log-level loud", "--log-level: 'loud' is not one of TRACE, DEBUG, INFO"),
    ],
)
def test_what_cannot_be_used_is_refused(line: str, complaint: str) -> None:
    with pytest.raises(SettingError, match=re.escape(complaint)):
        parsed(f"{line} python x.py")


@for_each("pair", ["autotune", "stall-check", "hierarchical-allreduce", "log-hide-timestamp"])
def test_a_switch_cannot_be_on_and_off(pair: str) -> None:
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as caught:
        parsed(f"--{pair} --no-{pair} python x.py")
    assert caught.value.code == 2
    assert "it is switched on and off; give one of them" in stderr.getvalue()
    parsed(f"--{pair} --{pair} python x.py")


def test_the_help_has_every_flag_under_its_heading() -> None:
    text = make_parser().format_help()
    headings = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert headings == sorted(headings)
    for knob in KNOBS:
        start = text.index(f"\n{knob.group}:\n")
        end = min([place for place in headings if place > start], default=len(text))
        assert all(f"{flag}" in text[start:end] for flag in knob.flags + knob.off)


def test_the_help_has_variables_and_defaults() -> None:
    text = " ".join(make_parser().format_help().split())
    assert "(no timeline until the script calls start_timeline). (HOROVOD_TIMELINE)" in text
    assert "have not submitted an operation (0: never). (HOROVOD_STALL_CHECK_TIME_SECONDS; default: 60 s)" in text


def warnings(*arguments: str, **environ: str) -> list[str]:
    return Choices(choices_in(make_parser().parse_args([*arguments, "x"]))).warnings(environ)


def test_what_has_no_effect_is_told_in_one_sentence_with_the_reasons() -> None:
    told = warnings("--mpi-args=-x A", "--jsrun", "--cycle-time-ms", "5", "--cache-capacity", "9", "--num-nccl", "2")
    assert told == [
        "accepted as in horovodrun, but without effect here: --jsrun, --mpi-args (MPI is not used); "
        "--cycle-time-ms, --cache-capacity (buckets start when they are full, by a plan that is agreed once: there is "
        "neither a cycle nor a cache); --num-nccl-streams (Horovod's NCCL streams are not used)"
    ]


def test_what_does_something_is_not_warned_about() -> None:
    told = warnings("--timeline-filename", "t", "--min-np", "1", "--autotune", "--tcp")  # all but one
    assert told == ["accepted as in horovodrun, but without effect here: --tcp (MPI is not used)"]


def test_to_ask_for_what_happens_anyway_is_nothing_to_warn_about() -> None:
    told = warnings("--gloo", "--no-autotune", "--no-torus-allreduce", "--no-mpi-threads-disable", "--stall-check")
    assert told == []
    assert len(warnings("--cache-capacity", "0")) == 1


def test_variables_that_horovod_would_act_on_are_told_too() -> None:
    told = warnings(
        HOROVOD_TIMELINE="t.json", HOROVOD_CACHE_CAPACITY="9", HOROVOD_LOG_LEVEL="info", NCCL_IB_DISABLE="1"
    )
    assert told == [
        "accepted as in horovodrun, but without effect here: HOROVOD_CACHE_CAPACITY (buckets start when they are full, "
        "by a plan that is agreed once: there is neither a cycle nor a cache)"
    ]
    assert warnings("--no-torus-allreduce", HOROVOD_TORUS_ALLREDUCE="1") == []
