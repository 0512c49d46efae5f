"""Where a worker finds itself, for every way of starting it."""

from __future__ import annotations

import re

import pytest

from fusion_rt.environment import Environment, detect
from fusion_rt.errors import FusionError

FUSIONRUN = {
    "HOROVOD_RANK": "5",
    "HOROVOD_SIZE": "6",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "2",
    "HOROVOD_CROSS_SIZE": "3",
    "FUSION_NODE": "2",
    "FUSION_JOB_ID": "abc",
    "FUSION_SOCKET": "/run/abc.2/sock",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_fusionrun_says_everything() -> None:
    assert detect(FUSIONRUN) == Environment(5, 6, 1, 2, 2, 3, 2, "abc", "/run/abc.2/sock")


def test_fusionrun_comes_before_torchrun() -> None:
    assert detect({**TORCHRUN, **FUSIONRUN}).size == 6


@pytest.mark.parametrize("missing", FUSIONRUN)
def test_half_of_fusionruns_variables_are_an_error(missing: str) -> None:
    environ = {name: value for name, value in FUSIONRUN.items() if name != missing}
    with pytest.raises(FusionError, match=f"set, but not {missing}: start this script with fusionrun"):
        detect(environ)
    with pytest.raises(FusionError, match=f"not {missing}"):
        detect({**FUSIONRUN, missing: ""})


@pytest.mark.parametrize("missing", list(TORCHRUN)[:6])
def test_half_of_torchruns_variables_are_an_error(missing: str) -> None:
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(FusionError, match=f"set, but not {missing}"):
        detect(environ)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HOROVOD_RANK", "6", "rank 6 of size 6"),
        ("HOROVOD_RANK", "-1", "rank -1 of size 6"),
        ("HOROVOD_LOCAL_RANK", "2", "local_rank 2 of local_size 2"),
        ("HOROVOD_CROSS_RANK", "3", "cross_rank 3 of cross_size 3"),
        ("HOROVOD_SIZE", "six", "HOROVOD_SIZE='six' is not a number"),
    ],
)
def test_numbers_that_cannot_be_are_errors(name: str, value: str, text: str) -> None:
    with pytest.raises(FusionError, match=re.escape(text)):
        detect({**FUSIONRUN, name: value})


def test_settings_alone_are_no_launcher() -> None:
    found = detect({"HOROVOD_FUSION_THRESHOLD": "1", "MASTER_ADDR": "somewhere", "FUSION_RUNTIME_DIR": "/x"})
    assert (found.rank, found.size, found.socket) == (0, 1, "")


def test_jobs_of_one_worker_have_different_ids() -> None:
    assert detect({}).job != detect({}).job


def test_torchrun_on_one_host() -> None:
    found = detect(TORCHRUN)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (1, 2, 1, 2)
    assert (found.cross_rank, found.cross_size, found.node, found.socket) == (0, 1, 0, "")


def test_workers_of_one_torchrun_share_an_id_that_no_other_has() -> None:
    files = [f"/tmp/torchelastic_x/attempt_0/{rank}/error.json" for rank in range(2)]
    first = detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[0], "RANK": "0", "LOCAL_RANK": "0"}).job
    assert first == detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[1]}).job
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,32}", first)
    others = [
        detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_y/attempt_0/0/error.json"}).job,
        detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[0], "TORCHELASTIC_RESTART_COUNT": "1"}).job,
        detect({**TORCHRUN, "TORCHELASTIC_ERROR_FILE": files[0], "MASTER_PORT": "29501"}).job,
        detect(TORCHRUN).job,
    ]
    assert len({first, *others}) == 5


def test_torchrun_on_several_hosts_is_refused() -> None:
    with pytest.raises(FusionError, match=r"several hosts.*fusionrun -H"):
        detect({**TORCHRUN, "WORLD_SIZE": "4"})
    with pytest.raises(FusionError, match="RANK=0 and LOCAL_RANK=1 differ"):
        detect({**TORCHRUN, "RANK": "0"})
