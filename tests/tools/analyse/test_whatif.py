"""`fusion-trace whatif`: recordings of jobs of which everything is known, and predictions of them with a change."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fusion_rt.core.errors import FusionError
from fusion_trace.analyse.recorded_steps import Recorded, understand
from fusion_trace.analyse.whatif import FRAMED, Change, Figure, Model, answer, parse_rate
from fusion_trace.cli import app
from fusion_trace.read.job import load
from tests.tools.synthetic import MS, Job, Straggler, cheap, simulate

BASE = Job(nodes=3, bandwidth=120e6, bucket_nbytes=1 << 20, steps=12, skews={1: 7 * MS, 2: -3 * MS})
Record = Callable[[Job], Recorded]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    def recorded(job: Job) -> Recorded:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        simulate(job).write(folder)
        return understand(load([str(folder)], str(tmp_path)))

    return recorded


def true_step(job: Job) -> float:
    """Seconds."""
    ends = simulate(job).steps.values()
    return statistics.fmean((of[-1] - of[0]) / (len(of) - 1) for of in ends) / 1e9


def step_of(recorded: Recorded, change: Change) -> Figure:
    return answer(recorded, change, cheap).changed.step


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_without_a_change_a_step_is_as_long_as_it_was(record: Record, ranks_per_node: int) -> None:
    recorded = record(replace(BASE, ranks_per_node=ranks_per_node))
    found = answer(recorded, Change())
    assert abs(found.error) < 0.04
    assert found.changed.step.value == pytest.approx(statistics.fmean(recorded.steps.every), rel=0.01)
    assert found.changed.sent.value == pytest.approx(recorded.sent, rel=0.01)
    assert found.changed.exposed.value == pytest.approx(recorded.steps.waited, rel=0.1)
    assert found.recorded.step.low < found.recorded.step.value < found.recorded.step.high


@pytest.mark.parametrize("bandwidth", [480e6, 60e6, 20e6])
def test_with_another_rate_the_truth_is_in_the_range(record: Record, bandwidth: float) -> None:
    found = step_of(record(BASE), Change(rate=bandwidth * 8 * FRAMED))
    truth = true_step(replace(BASE, bandwidth=bandwidth))
    assert found.low <= truth <= found.high
    assert found.value == pytest.approx(truth, rel=0.1)
    assert found.low < found.value < found.high
    assert found.width < 0.25


def test_with_another_latency_the_truth_is_in_the_range(record: Record) -> None:
    found = step_of(record(BASE), Change(latency=3e-3))
    truth = true_step(replace(BASE, latency=3 * MS))
    assert found.low <= truth <= found.high
    assert found.value == pytest.approx(truth, rel=0.12)


def test_work_that_a_slow_link_hides_makes_a_range_wide_and_is_named(record: Record) -> None:
    """Daemons may work a lot or not at all, which cannot be seen where a step waits for links of 20 MB/s."""
    slow = record(replace(BASE, bandwidth=20e6, forward=MS, backward=MS, update=MS // 2, between=MS // 2))
    fast = answer(slow, Change(rate=25e9))
    assert fast.doubts[0].reason == "links hide how long daemons work"
    assert fast.changed.step.width > 0.5
    assert answer(slow, Change(rate=8e7)).changed.step.width < 0.15


def test_processor_time_says_how_much_work_a_link_hides(record: Record) -> None:
    slow = record(replace(BASE, bandwidth=20e6, forward=MS, backward=MS, update=MS // 2, between=MS // 2))
    known = replace(slow, work=replace(slow.work, used=0.02))
    widths = [answer(each, Change(rate=25e9)).changed.step.width for each in (slow, known)]
    assert widths[1] < widths[0] / 2


def test_a_rate_that_is_not_known_makes_a_range_wide_until_it_is_given(record: Record) -> None:
    """A job whose messages are small, such as top-k's, says nothing about the time of a dense one."""
    recorded = replace(record(BASE), rate_known=False)
    found = answer(recorded, Change(density=1), cheap)
    assert "the rate of links is not known: give it with --rate" in [doubt.reason for doubt in found.doubts]
    told = answer(recorded, Change(density=1, rate=1e9), cheap)
    assert "--rate" not in " ".join(doubt.reason for doubt in told.doubts)
    assert told.changed.step.width < found.changed.step.width


def test_on_one_host_nothing_depends_on_links(record: Record) -> None:
    alone = record(replace(BASE, nodes=1, ranks_per_node=2, skews={}))
    was = step_of(alone, Change()).value
    for change in (Change(rate=1e6), Change(latency=1.0), Change(hosts=1)):
        assert step_of(alone, change).value == pytest.approx(was)
    assert step_of(alone, Change(rate=1e8, hosts=2)).value > was


def test_doubts_make_the_range(record: Record) -> None:
    found = answer(record(BASE), Change(codec="fp16", rate=1e8, algorithm="bsp"), cheap)
    step = found.changed.step
    assert sum(doubt.seconds**2 for doubt in found.doubts) == pytest.approx((step.high - step.value) ** 2)
    assert [doubt.seconds for doubt in found.doubts] == sorted((d.seconds for d in found.doubts), reverse=True)
    reasons = {doubt.reason for doubt in found.doubts}
    assert "another algorithm was recorded" in reasons


def test_without_its_straggler_a_job_takes_as_long_as_one_without(record: Record) -> None:
    slow = replace(BASE, straggler=Straggler("compute", 1, factor=4.0))
    recorded = record(slow)
    assert recorded.steps.seconds > 1.3 * true_step(BASE)
    found = step_of(recorded, Change(without_straggler=True))
    assert found.low <= true_step(BASE) <= found.high
    assert found.value == pytest.approx(true_step(BASE), rel=0.08)


def test_other_buckets_carry_the_same_gradients(record: Record) -> None:
    model = Model(record(BASE))
    was = model.answer(Change()).changed
    for threshold in (1 << 10, 1 << 20, 64 << 20):
        found = model.answer(Change(fusion_threshold=threshold)).changed
        assert found.sent.value == pytest.approx(was.sent.value, rel=0.01)
    whole = model.answer(Change(fusion_threshold=64 << 20)).changed
    assert whole.exposed.value > was.exposed.value  # nothing overlaps
    same = model.answer(Change(fusion_threshold=1 << 20)).changed
    assert same.step.value == pytest.approx(was.step.value, rel=0.02)


def test_less_is_sent_with_a_density_and_more_hosts_send_what_a_ring_does(record: Record) -> None:
    model = Model(record(BASE), cheap)
    dense, sparse = model.answer(Change()).changed, model.answer(Change(density=0.01)).changed
    assert sparse.sent.value < 0.03 * dense.sent.value
    assert sparse.step.value < dense.step.value
    more = model.answer(Change(hosts=6)).changed
    assert more.sent.value == pytest.approx(dense.sent.value * (5 / 6) / (2 / 3), rel=0.02)
    assert more.step.value > dense.step.value


@pytest.mark.parametrize("codec", ["fp16", "int8", "topk(density=0.01)", "powersgd(rank=4)", "demo"])
def test_a_codec_says_itself_how_much_it_sends_of_the_recorded_shapes(record: Record, codec: str) -> None:
    """Matrices of 1024 x 128, two in a bucket: rank 4 has 4 * (1024 + 128) elements of 131072 for each."""
    recorded = record(BASE)
    shape = (1024, 128)
    recorded = replace(recorded, tensors=tuple(replace(tensor, shape=shape) for tensor in recorded.tensors))
    share = answer(recorded, Change(codec=codec)).changed.sent.value / recorded.sent
    expected = {"fp16": 0.5, "int8": 0.256, "topk(density=0.01)": 0.0067, "demo": 0.0046}
    expected["powersgd(rank=4)"] = 4 * sum(shape) / (shape[0] * shape[1])
    assert share == pytest.approx(expected[codec], rel=0.15)


def test_small_tensors_travel_whole_with_a_codec_that_selects(record: Record) -> None:
    recorded = record(BASE)  # buckets of two tensors, with 131072 elements each
    small = tuple(replace(tensor, shape=(10_000,)) for tensor in recorded.tensors)
    sent = [
        answer(each, Change(density=0.01)).changed.sent.value for each in (recorded, replace(recorded, tensors=small))
    ]
    assert sent[1] > 5 * sent[0]


def test_tensors_that_do_not_fit_into_their_bucket_have_no_shapes(record: Record) -> None:
    recorded = record(BASE)
    damaged = replace(recorded, tensors=tuple(replace(t, shape=(1 << 40, 1 << 40)) for t in recorded.tensors))
    whole = replace(recorded, tensors=())
    found = [answer(each, Change(codec="powersgd(rank=4)")).changed.sent for each in (damaged, whole)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "algorithm",
    [
        "bsp",
        "asp",
        "dpsgd(topology='ring')",
        "local_sgd(steps=2)",
        "easgd(steps=2)",
        "diloco(steps=2, fragments=2, delay=1)",
        "decoupled(steps=2)",
        "noloco(steps=2)",
    ],
)
def test_other_algorithms_are_predicted(record: Record, algorithm: str) -> None:
    recorded = record(replace(BASE, nodes=4))
    found, was = answer(recorded, Change(algorithm=algorithm)).changed, answer(recorded, Change()).changed
    computed = found.step.value - found.exposed.value
    assert computed == pytest.approx(was.step.value - was.exposed.value, rel=0.1)
    assert found.step.low < found.step.value < found.step.high


def test_what_cannot_be_meant_is_said(record: Record) -> None:
    recorded = record(BASE)
    for change, words in (
        (Change(hosts=0), "is not from 1 to"),
        (Change(density=2.0), "not above 0"),
        (Change(density=0.5, codec="fp16"), "give one of them"),
        (Change(algorithm="partial(backup=7)"), "wait for no rank"),
        (Change(algorithm="no_such"), "no_such"),
    ):
        with pytest.raises(FusionError, match=words):
            answer(recorded, change, cheap)
    with pytest.raises(FusionError, match="no plan"):
        answer(replace(recorded, tensors=()), Change(fusion_threshold=1))


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 1e8), ("2.5 Gbit", 2.5e9), ("1e9bit", 1e9), ("500kbit/s", 5e5)])
def test_rates_are_read(text: str, bits: float) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "-1gbit", "0", "0mbit", "5", "1e9", "5m", "1.2.3mbit", "nan"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(FusionError, match="not a rate"):
        parse_rate(text)


def test_the_command_prints_a_prediction_with_its_range_and_where_that_comes_from(tmp_path: Path) -> None:
    simulate(BASE).write(tmp_path)
    shown = CliRunner().invoke(app, ["whatif", str(tmp_path), "--rate", "100mbit", "--latency", "1ms"])
    assert shown.exit_code == 0, shown.output
    assert "100 Mbit/s, latency 1 ms" in shown.output
    assert "Its range comes from:" in shown.output
    assert "the model's own error" in shown.output
    document = json.loads(CliRunner().invoke(app, ["whatif", str(tmp_path), "--hosts", "4", "--json"]).output)
    assert document["change"] == {"hosts": 4}
    assert abs(document["error"]) < 0.04
    assert document["changed"]["sent"]["value"] > document["recorded"]["sent"]["value"]
    step = document["changed"]["step"]
    assert step["low"] < step["value"] < step["high"]
    assert document["doubts"]


def test_the_command_says_what_is_wrong_in_a_sentence(tmp_path: Path) -> None:
    for arguments in (["--rate", "fast"], []):
        found = CliRunner().invoke(app, ["whatif", str(tmp_path), *arguments])
        assert found.exit_code == 1
        assert "Traceback" not in found.output
