"""Torch's own tests with the backend fusion: some on each change, all of them with `-m long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upstream import __main__, running, table
from tests.upstream.exceptions import EXCEPTIONS
from tests.upstream.results import Results, behind
from tests.upstream.running import Outcome, Place

# One of each kind of operation, on 3 ranks: a number that is neither a pair nor a power of two, and has groups of two.
SELECTED = {
    "DistributedTest": [
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_all_reduce_coalesced_group_sum",
        "test_all_to_all_single_unequal_split_group",
        "test_barrier_timeout_full_group",
        "test_gather_group",
        "test_scatter_complex",
        "test_send_recv_any_source_torch_profiler",
        "test_sparse_all_reduce_sum",
    ],
    "Sharded": ["test_fully_shard_trains_as_one_process"],
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("suite", list(SELECTED))
def test_fusion_passes_what_gloo_passes(suite: str) -> None:
    outcomes = dict(running.run_all(suite, SELECTED[suite], "fusion", Place((3,))))
    assert {test: outcome for test, outcome in outcomes.items() if outcome.kind != "pass"} == {}


@pytest.mark.long
@pytest.mark.root
@pytest.mark.multiprocess
def test_fusion_passes_all_that_gloo_passes_in_the_same_run() -> None:
    assert __main__.main(["--show"]) == 0


@pytest.mark.multiprocess
def test_a_test_passes_or_is_skipped_with_a_reason_or_fails_with_what_it_said() -> None:
    tests = ["test_all_reduce_sum", "test_all_reduce_sum_cuda", "test_all_to_all"]
    passed, skipped, failed = dict(running.run_all("DistributedTest", tests, "gloo", Place((2,)))).values()
    assert passed == Outcome("pass")
    assert skipped.kind == "skip"
    assert "CUDA" in skipped.said
    assert failed.kind == "fail"
    assert "invalid tensor size" in failed.said  # gloo exchanges lists of equal tensors only


@pytest.mark.multiprocess
def test_a_test_that_takes_too_long_is_ended() -> None:
    ((_, outcome),) = running.run_all("DistributedTest", ["test_all_reduce_sum"], "gloo", Place((2,)), limit_s=0.0)
    assert outcome.kind == "fail"
    assert "timed out" in outcome.said


def test_what_passes_with_gloo_only_is_found() -> None:
    gloo = {"a": Outcome("pass"), "b": Outcome("pass"), "c": Outcome("fail", "no"), "d": Outcome("pass")}
    other = {"a": Outcome("pass"), "b": Outcome("skip", "cannot"), "c": Outcome("fail", "no"), "e": Outcome("fail")}
    assert behind(gloo, other) == {"b": Outcome("skip", "cannot")}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    outcomes = {"a": Outcome("pass"), "b": Outcome("skip", "no GPU"), "c": Outcome("fail", "one\ntwo")}
    results = Results("2.13.0")
    results.put("Sharded", "2x2", "gloo", outcomes)
    results.write(tmp_path / "results.json")
    read = Results.read(tmp_path / "results.json")
    assert read.of("Sharded", "2x2", "gloo") == outcomes
    assert list(read.runs()) == [("Sharded", "2x2", "gloo")]
    assert read.torch == "2.13.0"


@pytest.mark.parametrize(("text", "nodes"), [("3", (3,)), ("2x2", (2, 2))])
def test_places_are_read_and_shown_alike(text: str, nodes: tuple[int, ...]) -> None:
    assert Place.parse(text) == Place(nodes)
    assert str(Place(nodes)) == text


def test_exceptions_are_what_is_behind_and_nothing_else() -> None:
    results = Results.read()
    missed = {
        test
        for suite, place, backend in results.runs()
        if backend == "fusion"
        for test in behind(results.of(suite, place, "gloo"), results.of(suite, place, "fusion"))
    }
    assert missed == set(EXCEPTIONS)


def test_the_document_has_the_table_of_the_results() -> None:
    assert table.page(Results.read()) in table.DOCUMENT.read_text(encoding="utf-8")
