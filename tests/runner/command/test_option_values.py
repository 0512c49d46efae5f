"""What somebody chose: values, variables, and the warnings about what comes to nothing."""

from __future__ import annotations

from fusion_rt.runner.command.flags import choices_in, make_parser
from fusion_rt.runner.command.option_values import Choices


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
