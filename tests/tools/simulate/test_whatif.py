"""`fusion-trace whatif`: recordings of jobs of which everything is known, replayed and changed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace as replace_costs
from typer.testing import CliRunner

from fusion_rt.core.errors import FusionError
from fusion_rt.tracing.format import Kind, Role
from fusion_trace.cli import app
from fusion_trace.read.choice import StepRange
from fusion_trace.read.job import load
from fusion_trace.simulate import calibration
from fusion_trace.simulate import recorded as replaying
from fusion_trace.simulate.calibration import ONE_NODE, _unknown, answer, calibrate, scaled
from fusion_trace.simulate.changes import Change, Prediction, parse_bandwidth, replay
from fusion_trace.simulate.model import FRAMED, Bucket, CodecCosts
from fusion_trace.simulate.programs import Compute, Submit, Wait
from fusion_trace.simulate.recorded import MOST_STEPS, NotRecorded, Recorded, representative, understand
from fusion_trace.simulate.sharing import Machines, slowed, without_waits
from tests.diagnosis.generator import Fault, Shape, make
from tests.tools.synthetic import MS, Job, Straggler, simulate

BASE = Job(nodes=3, bandwidth=120e6, bucket_nbytes=1 << 20, steps=6, skews={1: 7 * MS, 2: -3 * MS})
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


def cheap(text: str) -> CodecCosts:
    """In place of a measurement."""
    return CodecCosts(0.0075 if text.startswith("topk") else 0.5)


def test_nodes_with_different_numbers_of_workers_are_named(tmp_path: Path) -> None:
    truth = simulate(replace(BASE, nodes=2, ranks_per_node=2))
    del truth.tapes[Role.WORKER, 3]
    truth.write(tmp_path)
    with pytest.raises(NotRecorded, match=r"different numbers of workers \(2 on host0, 1 on host1\)"):
        understand(load([str(tmp_path)], str(tmp_path)))


def test_a_program_is_what_was_done_between_what_was_submitted_and_waited_for(record: Record) -> None:
    found = record(replace(BASE, jitter=0.0))
    step = found.programs[0][2]
    submitted = [found.names[event.bucket] for event in step if isinstance(event, Submit)]
    assert submitted == ["bucket 0", "bucket 1", "bucket 2", "loss"]
    first_wait = next(index for index, event in enumerate(step) if isinstance(event, Wait))
    assert not any(isinstance(event, Submit) for event in step[first_wait:])
    computed = sum(event.seconds for event in step if isinstance(event, Compute))
    assert computed + found.waited[0][2] == pytest.approx(found.measured[0][2], rel=1e-6)
    assert [tensor.bucket for tensor in found.tensors] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("bandwidth", [25e6, 120e6])
@pytest.mark.parametrize("nodes", [2, 4])
def test_links_are_found_from_the_chunks(record: Record, nodes: int, bandwidth: float) -> None:
    found = record(replace(BASE, nodes=nodes, bandwidth=bandwidth, skews={1: 7 * MS}))
    for link in found.links:
        assert link.bandwidth == pytest.approx(bandwidth, rel=0.05)
        assert link.latency < 400e-6


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_replay_of_what_was_recorded_takes_as_long(record: Record, ranks_per_node: int) -> None:
    recorded = record(replace(BASE, ranks_per_node=ranks_per_node))
    as_found = replay(recorded, Change())
    assert abs(as_found.step / recorded.step_seconds - 1) < 0.04
    assert as_found.sent == pytest.approx(recorded.sent / recorded.nodes, rel=0.01)
    assert as_found.exposed == pytest.approx(recorded.waited_seconds, rel=0.08)
    found = answer(recorded, Change())
    assert abs(found.error) < 0.04
    assert found.changed is None


@pytest.mark.parametrize("bandwidth", [480e6, 60e6, 20e6])
def test_another_bandwidth_is_predicted(record: Record, bandwidth: float) -> None:
    predicted = replay(record(BASE), Change(bandwidth=bandwidth * 8 * FRAMED)).step
    assert predicted == pytest.approx(true_step(replace(BASE, bandwidth=bandwidth)), rel=0.1)


@pytest.mark.parametrize("bandwidth", [480e6, 60e6, 20e6])
def test_the_interval_of_a_prediction_has_the_truth_in_it(record: Record, bandwidth: float) -> None:
    found = answer(record(replace(BASE, steps=12)), Change(bandwidth=bandwidth * 8 * FRAMED))
    truth = true_step(replace(BASE, steps=12, bandwidth=bandwidth))
    if found.changed is None:  # beyond 480e6 bytes/s daemons' costs count, which 120e6 bytes/s have hidden
        assert bandwidth > BASE.bandwidth
        assert "does not decide" in found.refused
        return
    assert found.changed.step.low <= truth <= found.changed.step.high
    assert found.changed.step.value == pytest.approx(truth, rel=0.1)
    assert found.changed.step.low < found.changed.step.value < found.changed.step.high
    assert found.recorded.step.low < found.recorded.step.value < found.recorded.step.high


def test_costs_that_a_slow_link_has_hidden_are_not_told_for_a_fast_one(record: Record) -> None:
    """Daemons' costs are eight times as high as were found, or not: nobody can see that where a link of 20e6 bytes a
    second is what a step waits for. So what a link of 25 Gbit/s brings is refused, and a slower link is not."""
    slow = record(replace(BASE, bandwidth=20e6, forward=MS, backward=MS, update=MS // 2, between=MS // 2))
    kept = calibrate(slow)
    assert {model.scale for model in kept} >= {1.0, 8.0}
    found = answer(slow, Change(bandwidth=25e9))
    assert found.changed is None
    assert "models that replay it about as well as each other say" in found.refused
    assert "daemons' costs x 8" in found.refused
    assert answer(slow, Change(bandwidth=8e7)).changed is not None


def test_what_is_reduced_once_is_reduced_by_all_ranks_in_one_step_of_more_nodes(record: Record) -> None:
    recorded = record(BASE)
    once = len(recorded.buckets)
    programs = tuple(
        (*program[:1], (*program[1], Submit(once), Wait(once)), *program[2:]) for program in recorded.programs
    )
    more = replace(recorded, programs=programs, buckets=(*recorded.buckets, Bucket(4)))
    expected = replay(recorded, Change(nodes=7)).step
    assert replay(more, Change(nodes=7)).step == pytest.approx(expected, rel=0.05)


def test_ranks_that_wait_forever_in_a_replay_are_told_in_a_sentence(record: Record) -> None:
    recorded = record(BASE)
    odd = (recorded.programs[0][0] + (Submit(0), Wait(0)), *recorded.programs[0][1:])
    with pytest.raises(FusionError, match="cannot be replayed so: 1 of 3 ranks wait forever, the first of them rank 0"):
        replay(replace(recorded, programs=(odd, *recorded.programs[1:])), Change())


def test_on_one_node_nothing_depends_on_links(record: Record) -> None:
    alone = record(replace(BASE, nodes=1, ranks_per_node=2, skews={}))
    for change in (Change(bandwidth=1e9), Change(latency=1e-3, nodes=1)):
        assert answer(alone, change).refused == ONE_NODE
    assert answer(alone, Change(bandwidth=1e9, nodes=2)).refused != ONE_NODE


def test_what_daemons_use_is_not_the_work_of_bytes_where_none_was_sent(record: Record) -> None:
    """All that a daemon does beyond kernels would be the cost of a single byte, and other nodes would send millions."""
    alone = record(replace(BASE, nodes=1, ranks_per_node=2, skews={}))
    shared = replace(alone, machines=Machines((0,), (2,), daemons=5e-3))
    assert alone.sent == 0
    for model in calibrate(shared):
        assert model.recorded.costs.io_send == 0
        assert replay(model.recorded, Change(nodes=2, bandwidth=1e9)).step < 1


def test_models_that_differ_in_a_rate_that_the_change_sets_are_replayed_once(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = calibration.Calibrated(record(BASE))
    best = job.models[0]
    links = tuple(replace(link, bandwidth=1.1 * link.bandwidth) for link in best.recorded.links)
    faster = replace(best, recorded=replace(best.recorded, links=links))
    costly = replace(best, recorded=replace(best.recorded, costs=scaled(best.recorded.costs, 8.0)))
    change = Change(bandwidth=240e6 * 8 * FRAMED)
    tried = best, faster, costly
    each = [replay(model.recorded, change) for model in tried]
    assert each[2] != each[0]
    replays: list[Recorded] = []

    def counted(recorded: Recorded, *others: object) -> Prediction:
        replays.append(recorded)
        return replay(recorded, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(calibration, "replay", counted)
    assert job._replays(tried, change) == each
    assert len(replays) == 2


def test_a_step_without_its_waits_for_a_processor() -> None:
    step = (Compute(2.0), Submit(0), Compute(6.0))
    found = without_waits(step, used=2.0, waited=4.0)
    assert found == (Compute(1.0, 0.5), Submit(0), Compute(3.0, 1.5))
    threads = without_waits(step, used=16.0, waited=20.0)  # its own thread has waited for the others', too
    assert threads == (Compute(2.0, 4.0), Submit(0), Compute(6.0, 12.0))
    assert slowed(found, 2.0)[0] == Compute(1.5, 1.0)


def test_hosts_of_one_machine_wait_for_its_processors(record: Record) -> None:
    recorded = record(BASE)
    busy = tuple(tuple(without_waits(step, 0.02, 0.0) for step in program) for program in recorded.programs)
    on_one, apart = Machines((0, 0, 0), (1,), 0.001), Machines((0, 1, 2), (1, 1, 1), 0.001)
    shared = replace(recorded, programs=busy, machines=on_one)
    assert replay(shared, Change()).step > 3 * 0.02
    assert replay(replace(shared, machines=apart), Change()).step == pytest.approx(recorded.step_seconds, rel=0.1)
    assert replay(shared, Change(nodes=6)).step > 6 * 0.02


def test_a_recording_without_processors_is_replayed_as_if_each_thread_had_one(record: Record) -> None:
    assert record(BASE).machines is None


def test_costs_add_up_to_the_processor_time_that_daemons_used(record: Record) -> None:
    recorded = replace(record(BASE), machines=Machines((0, 0, 0), (2,), 0.01))
    for model in calibrate(recorded):
        if "processors" not in model.what and "costs" not in model.what:
            assert model.replayed.worked == pytest.approx(0.01, rel=0.05)


def test_what_waits_for_shared_processors_is_not_told(record: Record) -> None:
    """Three ranks compute all the time on two processors: what else these will have to do, nobody knows."""
    recorded = record(BASE)
    busy = tuple(tuple(without_waits(step, 0.024, 0.0) for step in program) for program in recorded.programs)
    shared = replace(recorded, programs=busy, machines=Machines((0, 0, 0), (1,), 0.002))
    step = replay(shared, Change()).step
    shared = replace(shared, measured=((step,) * 6,) * 3, every=(step,) * 6)
    assert answer(shared, Change(bandwidth=2e9)).changed is None
    assert "processors a third busier" in [m.what for m in _unknown(calibrate(shared)[0], Change(bandwidth=2e9))]


def test_a_latency_that_may_have_been_a_queue_is_tried_as_that_of_an_idle_link(record: Record) -> None:
    best = calibrate(record(BASE))[0]
    links = tuple(replace(link, latency=0.02, idle_latency=3e-4) for link in best.recorded.links)
    queued = replace(best, recorded=replace(best.recorded, links=links))
    (found,) = [m for m in _unknown(queued, Change(density=0.1)) if m.what == "latencies that were queues"]
    assert {link.latency for link in found.recorded.links} == {3e-4}
    assert not [m for m in _unknown(queued, Change(latency=0.01)) if m.what == found.what], "it is said"
    far = tuple(replace(link, idle_latency=0.0195) for link in links)
    assert not [m for m in _unknown(replace(best, recorded=replace(best.recorded, links=far)), Change(density=0.1))
                if m.what == found.what]  # fmt: skip


def test_a_recording_that_no_model_replays_predicts_nothing(record: Record) -> None:
    recorded = record(BASE)
    longer = tuple(tuple(seconds * 1.5 for seconds in rank) for rank in recorded.measured)
    found = answer(replace(recorded, measured=longer), Change(bandwidth=1e8))
    assert found.changed is None
    assert "% too short" in found.refused
    assert abs(found.error) > 0.15


def test_costs_are_scaled_with_those_of_codecs(record: Record) -> None:
    recorded = record(BASE)
    twice = scaled(recorded.costs, 2.0)
    assert (twice.send, twice.reduce, twice.threads) == (
        2 * recorded.costs.send, 2 * recorded.costs.reduce, recorded.costs.threads
    )  # fmt: skip


# --- which steps are replayed -----------------------------------------------------------------------------------------

STEPS = 600
PATTERNS = {
    "drifting": tuple(step / STEPS for step in range(STEPS)),
    "every 12th": tuple(float(step % 12 == 5) for step in range(STEPS)),
    "the last third": tuple(float(step >= 400) for step in range(STEPS)),
    "a few": tuple(float(step in (100, 300, 550)) for step in range(STEPS)),
    "nothing": (0.0,) * STEPS,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_steps_that_are_replayed_stand_for_all(pattern: str) -> None:
    """... of jobs that drift, have spikes or change midway: in mean, median and 95 %. Those in the middle do not."""
    shape = Shape(nodes=2, steps=STEPS, forward=5 * MS, backward=10 * MS, buckets=1, seed=4)
    trace = make(shape, Fault("forward", PATTERNS[pattern], frozenset({1}), more=20.0 * MS)).trace
    recorded = understand(trace)
    assert len(recorded.numbers) == MOST_STEPS
    whole = np.array(recorded.every)
    first = understand(trace, StepRange(1, 2)).numbers[0]
    chosen = whole[np.array(recorded.numbers) - first]
    assert chosen.mean() == pytest.approx(whole.mean(), rel=0.015)
    assert np.median(chosen) == pytest.approx(np.median(whole), rel=0.01)
    assert np.quantile(chosen, 0.95) == pytest.approx(np.quantile(whole, 0.95), rel=0.05)
    if pattern in ("drifting", "the last third"):
        assert recorded.numbers[-1] - recorded.numbers[0] > 0.8 * STEPS
    if pattern == "the last third":
        middle = whole[STEPS // 2 - MOST_STEPS // 2 :][:MOST_STEPS]
        assert abs(middle.mean() / whole.mean() - 1) > 0.2


def test_the_replay_of_chosen_steps_is_that_of_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(nodes=2, steps=200, forward=5 * MS, backward=10 * MS, buckets=2, seed=7)
    trace = make(shape, Fault("backward", PATTERNS["every 12th"][:200], frozenset({0}), more=20.0 * MS)).trace
    few = understand(trace)
    monkeypatch.setattr(replaying, "MOST_STEPS", STEPS)
    many = understand(trace)
    assert (len(few.numbers), len(many.numbers)) == (60, 199)
    for change in (Change(), Change(bandwidth=1e9), Change(no_straggler=True)):
        assert replay(few, change).step == pytest.approx(replay(many, change).step, rel=0.02)


@pytest.mark.parametrize("every", [7, 50, 150])
def test_rare_exchanges_are_replayed_as_often_as_they_are(every: int) -> None:
    """DiLoCo and the like: they are not longer than other steps, and still neither lost nor too many."""
    exchanging = [step % every == every - 1 for step in range(STEPS)]
    places = representative([1.0] * STEPS, MOST_STEPS, exchanging)
    chosen = [exchanging[place] for place in places]
    assert sum(chosen) >= 4
    assert sum(chosen) / len(chosen) == pytest.approx(1 / every, rel=0.1)
    assert list(places) == sorted(set(places))


def rarely_exchanging(record: Record, tmp_path: Path, kept: set[int]) -> Recorded:
    """Replays a job whose buckets are handed over in some steps only."""
    truth = simulate(replace(BASE, loss=False))
    for (role, _), tape in truth.tapes.items():
        if role == Role.WORKER:
            tape.rows = [row for row in tape.rows if row[6] != Kind.SUBMITTED or row[2] in kept]
    truth.write(tmp_path)
    return understand(load([str(tmp_path)], str(tmp_path)))


def test_one_exchange_tells_nothing_about_how_often_there_are_some(record: Record, tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="of 5 steps one exchanges data"):
        rarely_exchanging(record, tmp_path, {3})
    assert len(rarely_exchanging(record, tmp_path, {2, 4}).numbers) == 5


def test_hosts_of_whose_links_no_rate_is_known_are_named(record: Record) -> None:
    recorded = record(replace(BASE, bucket_nbytes=1 << 12))
    assert recorded.assumed == ("host0", "host1", "host2")
    assert [problem for problem in recorded.problems if problem.startswith("host1 has sent and received nothing large")]


def test_more_bytes_on_a_link_of_which_no_rate_is_known_are_refused(record: Record) -> None:
    """A job whose messages are small, such as top-k's, says nothing about what a dense one would take."""
    codec = "topk(density=0.01, minimum=0)"
    recorded = replace(record(BASE), assumed=("host0", "host2"), codec=codec)
    recorded = replace(recorded, costs=replace_costs(recorded.costs, codecs={codec: CodecCosts(0.01)}))
    step = replay(recorded, Change()).step
    recorded = replace(recorded, measured=((step,) * 6,) * 3)
    refused = answer(recorded, Change(density=1), cheap)
    assert refused.changed is None
    assert "too little to tell how fast the links of host0, host2 may be: say it (--bandwidth)" in refused.refused
    assert "--bandwidth" not in answer(recorded, Change(density=1, bandwidth=1e8), cheap).refused
    assert "--bandwidth" not in answer(recorded, Change(no_straggler=True)).refused


def test_small_tensors_travel_whole_with_a_codec_that_selects(record: Record) -> None:
    recorded = record(BASE)  # buckets of two tensors, with 131072 elements each
    halved = (Bucket(1 << 20, ((1 << 17,), (1 << 10, 1 << 7))),) * 3
    small = (Bucket(1 << 20, ((10_000,),) * 26 + ((2144,),)),) * 3
    costs = CodecCosts(0.0075)
    sent = [
        replay(replace(recorded, buckets=(*its, recorded.buckets[3])), Change(density=0.01), lambda _: costs).sent
        for its in (halved, small)
    ]
    assert sent[1] > 30 * sent[0]
    assert record(BASE).tensors[0].shape


def test_operations_of_a_process_group_which_have_one_name_keep_their_own_sizes(tmp_path: Path) -> None:
    truth = simulate(BASE)
    order = ["bucket 0", "bucket 1", "bucket 2", "loss"]
    for tape in truth.tapes.values():
        tape.rows = [
            (time, value, 4 * clock + order.index(name), "group", 0, *rest) if name in order else row
            for row in tape.rows
            for time, value, clock, name, _, *rest in [row]
        ]
    truth.write(tmp_path)
    found = understand(load([str(tmp_path)], str(tmp_path)))
    submitted = [found.buckets[event.bucket].nbytes for event in found.programs[0][2] if isinstance(event, Submit)]
    assert submitted == [1 << 20, 1 << 20, 1 << 20, 4]


def test_another_latency_is_predicted(record: Record) -> None:
    predicted = replay(record(BASE), Change(latency=3e-3)).step
    assert predicted == pytest.approx(true_step(replace(BASE, latency=3 * MS)), rel=0.1)


def test_without_its_straggler_a_job_takes_as_long_as_one_without(record: Record) -> None:
    slow = replace(BASE, straggler=Straggler("compute", 1, factor=4.0))
    recorded = record(slow)
    assert recorded.step_seconds > 1.3 * true_step(BASE)
    assert replay(recorded, Change(no_straggler=True)).step == pytest.approx(true_step(BASE), rel=0.08)
    assert replay(recorded, Change()).step == pytest.approx(true_step(slow), rel=0.05)


def test_other_buckets_carry_the_same_gradients(record: Record) -> None:
    recorded = record(BASE)
    as_it_was = replay(recorded, Change())
    for threshold in (1 << 10, 1 << 20, 64 << 20):
        found = replay(recorded, Change(fusion_threshold=threshold))
        assert found.sent == pytest.approx(as_it_was.sent, rel=0.01)
    assert replay(recorded, Change(fusion_threshold=64 << 20)).exposed > as_it_was.exposed  # nothing overlaps
    assert replay(recorded, Change(fusion_threshold=1 << 20)).step == pytest.approx(as_it_was.step, rel=0.02)


def test_less_is_sent_with_a_density_and_more_nodes_send_what_a_ring_does(record: Record) -> None:
    recorded = record(BASE)
    dense, sparse = replay(recorded, Change()), replay(recorded, Change(density=0.01), cheap)
    assert sparse.sent < 0.03 * dense.sent
    assert sparse.step < dense.step
    more = replay(recorded, Change(nodes=6))
    assert more.sent == pytest.approx(dense.sent * (5 / 6) / (2 / 3), rel=0.02)
    assert more.step > dense.step


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
def test_other_algorithms_are_replayed(record: Record, algorithm: str) -> None:
    found = replay(record(BASE), Change(algorithm=algorithm))
    computed = found.step - found.exposed
    assert computed == pytest.approx(
        replay(record(BASE), Change()).step - replay(record(BASE), Change()).exposed, rel=0.1
    )


def test_a_compressed_recording_is_replayed_with_what_was_sent(record: Record) -> None:
    recorded = record(BASE)
    assert recorded.codec == "dense"
    half = replace(recorded, codec="fp16", costs=recorded.costs)
    with pytest.raises(KeyError):
        replay(half, Change())
    assert replay(recorded, Change(codec="fp16"), cheap).sent == pytest.approx(recorded.sent / 3 / 2, rel=0.01)


def test_what_cannot_be_simulated_is_said(record: Record, tmp_path: Path) -> None:
    recorded = record(BASE)
    for change, words in (
        (Change(nodes=0), "cannot be replayed"),
        (Change(density=2.0), "not above 0"),
        (Change(density=0.5, codec="fp16"), "give one of them"),
        (Change(algorithm="partial(backup=7)"), "wait for no rank"),
        (Change(algorithm="no_such"), "no_such"),
    ):
        with pytest.raises(FusionError, match=words):
            replay(recorded, change, cheap)
    with pytest.raises(FusionError, match="no plan"):
        replay(replace(recorded, tensors=()), Change(fusion_threshold=1))
    short = tmp_path / "short"
    short.mkdir()
    simulate(replace(BASE, steps=1)).write(short)
    with pytest.raises(NotRecorded, match="no whole training steps"):
        understand(load([str(short)], str(tmp_path)))


def test_only_the_chosen_steps_are_replayed(record: Record, tmp_path: Path) -> None:
    simulate(BASE).write(tmp_path)
    found = understand(load([str(tmp_path)], str(tmp_path)), StepRange(2, 4))
    assert found.numbers == (2, 3)
    assert len(found.programs[0]) == 2


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 1e8), ("2.5 Gbit", 2.5e9), ("1e9bit", 1e9), ("500kbit/s", 5e5)])
def test_rates_are_read(text: str, bits: float) -> None:
    assert parse_bandwidth(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "-1gbit", "0", "0mbit", "5", "1e9", "5m", "1.2.3mbit", "nan"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(FusionError, match="not a rate"):
        parse_bandwidth(text)


def test_the_command_prints_the_error_of_the_replay_and_the_prediction(tmp_path: Path) -> None:
    simulate(BASE).write(tmp_path)
    shown = CliRunner().invoke(app, ["whatif", str(tmp_path), "--bandwidth", "100mbit", "--latency", "1ms"])
    assert shown.exit_code == 0, shown.output
    assert "The replay of the recording is" in shown.output
    assert "models replay it about as well" in shown.output
    assert "100 Mbit/s, latency 1 ms" in shown.output
    document = json.loads(CliRunner().invoke(app, ["whatif", str(tmp_path), "--nodes", "4", "--json"]).output)
    assert document["change"] == {"nodes": 4}
    assert abs(document["replayed"]["error"]) < 0.04
    assert document["changed"]["sent"]["value"] > document["replayed"]["sent"]["value"]
    assert (
        document["changed"]["step"]["low"] < document["changed"]["step"]["value"] < document["changed"]["step"]["high"]
    )


def test_the_command_says_what_is_wrong_in_a_sentence(tmp_path: Path) -> None:
    for arguments in (["--bandwidth", "fast"], []):
        found = CliRunner().invoke(app, ["whatif", str(tmp_path), *arguments])
        assert found.exit_code == 1
        assert "Traceback" not in found.output


def test_a_plan_that_is_recorded_again_has_its_tensors_once(tmp_path: Path) -> None:
    truth = simulate(BASE)
    for tape in truth.tapes.values():
        tape.rows += [row for row in tape.rows if row[6] in (Kind.PLAN, Kind.BUCKET, Kind.MEMBER)]
    truth.write(tmp_path)
    recorded = understand(load([str(tmp_path)], str(tmp_path)))
    assert len(recorded.tensors) == BASE.buckets * BASE.tensors
    fused = replay(recorded, Change(fusion_threshold=1 << 20))
    assert fused.sent == pytest.approx(replay(recorded, Change()).sent, rel=0.01)
