"""The YAML file: Horovod's keys, typing mistakes, and what is no such file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusion_rt.core.errors import SettingError
from fusion_rt.runner.command.config_file import MAX_BYTES, read
from fusion_rt.runner.command.flags import Choices

HOROVODS = """
controller: gloo
params:
    fusion_threshold_mb: 32
    cycle_time_ms: 10
    cache_capacity: 2048
    hierarchical_allreduce: true
    hierarchical_allgather: false
    torus_allreduce: yes
autotune:
    enabled: true
    log_file: log.csv
    warmup_samples: 5
    steps_per_sample: 20
    bayes_opt_max_samples: 50
    gaussian_process_noise: 0.9
timeline:
    filename: t.json
    mark_cycles: true
stall_check:
    enabled: false
    warning_time_seconds: 120
    shutdown_time_seconds: 240
library_options:
    mpi_threads_disable: true
    num_nccl_streams: 2
    thread_affinity: 1
    gloo_timeout_seconds: 60
logging:
    level: INFO
    with_timestamp: false
"""
VARIABLES = {
    "HOROVOD_FUSION_THRESHOLD": "33554432",
    "HOROVOD_CYCLE_TIME": "10",
    "HOROVOD_CACHE_CAPACITY": "2048",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_TORUS_ALLREDUCE": "1",
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_LOG": "log.csv",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9",
    "HOROVOD_TIMELINE": "t.json",
    "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
    "HOROVOD_MPI_THREADS_DISABLE": "1",
    "HOROVOD_NUM_NCCL_STREAMS": "2",
    "HOROVOD_THREAD_AFFINITY": "1",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "60",
    "HOROVOD_LOG_LEVEL": "INFO",
    "HOROVOD_LOG_HIDE_TIME": "1",
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.yaml"


def variables(path: Path, text: str) -> tuple[dict[str, str], list[str]]:
    path.write_text(text)
    chosen, warnings = read(str(path))
    return {name.decode(): value.decode() for name, value in Choices(chosen).variables().items()}, warnings


def test_every_key_of_horovod_becomes_its_variable(path: Path) -> None:
    assert variables(path, HOROVODS) == (VARIABLES, [])


def test_units_specs_and_empty_values(path: Path) -> None:
    text = "params: {fusion_threshold_mb: 64KiB, compression: 'topk(density=0.01)', cycle_time_ms: }\nautotune:\n"
    assert variables(path, text) == (
        {"HOROVOD_FUSION_THRESHOLD": "65536", "FUSION_COMPRESSION": "topk(density=0.01)"},
        [],
    )
    for empty in ("", "# nothing\n", "{}"):
        assert variables(path, empty) == ({}, [])


def test_choices_know_where_they_stand(path: Path) -> None:
    path.write_text("controller: mpi\ntimeline: {filename: t}\n")
    choices = Choices(read(str(path))[0])
    assert choices.warnings({}) == [
        f"accepted as in horovodrun, but without effect here: controller in {path} (MPI is not used)",
    ]
    path.write_text("controller: gloo\n")
    assert Choices(read(str(path))[0]).warnings({}) == []


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("params: {fusion_treshold_mb: 1}", "params.fusion_treshold_mb", "params.fusion_threshold_mb"),
        ("parms: {fusion_threshold_mb: 1}", "parms", "params"),
        ("fusion_threshold_mb: 1", "fusion_threshold_mb", "params.fusion_threshold_mb"),
        ("stall-check: {enabled: no}", "stall-check", "stall_check"),
        ("logging: {1: 2, level: info}", "logging.1", "logging.level"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(path: Path, text: str, key: str, nearest: str) -> None:
    found, warnings = variables(path, text)
    assert warnings == [f"{path} has a key {key!r} that is not known and was left out; did you mean {nearest!r}?"]
    assert found in ({}, {"HOROVOD_LOG_LEVEL": "INFO"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- a\n- b", "has to be a mapping with keys such as 'params:', not a list"),
        ("just text", "has to be a mapping with keys such as 'params:', not text"),
        ("params: 5", "params in {path} has to be a mapping, such as 'params: {{"),
        ("params: {fusion_threshold_mb: [1]}", "has to be a number, or text with a unit, not a list"),
        ("params: {fusion_threshold_mb: true}", "has to be a number, or text with a unit, not yes or no"),
        ("params: {compression: 3}", "params.compression in {path} has to be text, not a number"),
        ("autotune: {enabled: {}}", "autotune.enabled in {path} has to be yes or no, not a mapping"),
        ("autotune: {enabled: maybe}", "autotune.enabled in {path}: 'maybe' is not a yes or no"),
        ("params: {cache_capacity: -5}", "params.cache_capacity in {path}: '-5' is below the least value allowed, 0"),
        ("params: {fusion_threshold_mb: lots}", "params.fusion_threshold_mb in {path}: 'lots' is not a size"),
        ("controller: smoke", "controller in {path}: 'smoke' is not one of gloo, mpi"),
        ("logging: {level: 2020-01-01}", "has to be text, not a date"),
        ("a: b: c", "is no YAML: mapping values are not allowed here"),
        ("!!python/object/apply:os.system ['true']", "is no YAML: could not determine a constructor"),
        ("at: 2020-99-99", "is no YAML: month must be in 1..12"),
        ("[" * 500, "is no YAML"),
        ("#" * (MAX_BYTES + 1), f"has more than {MAX_BYTES} bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused(path: Path, text: str, complaint: str) -> None:
    path.write_text(text)
    with pytest.raises(SettingError, match=re.escape(complaint.format(path=path))):
        read(str(path))


def test_a_file_that_cannot_be_read_is_refused(path: Path) -> None:
    with pytest.raises(SettingError, match=f"--config-file {path} cannot be read: No such file"):
        read(str(path))
    with pytest.raises(SettingError, match="cannot be read: Is a directory"):
        read(str(path.parent))
    path.write_bytes(b"params: \xff\xfe\0")
    with pytest.raises(SettingError, match="is no YAML"):
        read(str(path))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(text=st.text(alphabet="params:{}[]- \n\t'\"&*!|>#012ab_.,?%@`", max_size=60))
def test_any_text_is_choices_or_a_setting_error(path: Path, text: str) -> None:
    path.write_text(text)
    try:
        chosen, warnings = read(str(path))
    except SettingError:
        return
    assert chosen == {}
    assert all("is not known" in warning for warning in warnings)
