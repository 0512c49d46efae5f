"""The simulator: time, links, exchanges and algorithms against closed formulas, and the daemon's own exchanges."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_rt import codecs
from fusion_rt.algorithms import parse
from fusion_trace.simulate.daemons import SimulationError
from fusion_trace.simulate.ghost_codecs import factors, real_layout
from fusion_trace.simulate.model import HEAD_NBYTES, Bucket, Cluster, CodecCosts, Costs, Link, equal, ethernet
from fusion_trace.simulate.network import Network
from fusion_trace.simulate.programs import Action, Compute, Submit, Wait, around_steps
from fusion_trace.simulate.simulation import Job, Outcome, place
from fusion_trace.simulate.simulator import Processor, Simulator, Thread

CODECS = {
    "fp16": CodecCosts(0.5, pack=1e-9, unpack=1e-9),
    "topk(density=0.01)": CodecCosts(0.0075, 0.3e-9, 2e-9, 2e-9, 1e-9, 9e-9, 1e-9),
    "int8": CodecCosts(0.26, 0.2e-9, 0.1e-9, 0.1e-9, 0.2e-9, 1e-9, 0.3e-9),
    "powersgd(rank=4)": CodecCosts(0.01, 0.1e-9, add=0.1e-9, write=0.1e-9),
}
COSTS = Costs(codecs=CODECS)
FREE = Costs(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # what is left are the links
NO_COSTS = msgspec.structs.replace(FREE, codecs={text: CodecCosts(each.ratio) for text, each in CODECS.items()})
LINK = ethernet(1e9, 100e-6)
ALGORITHMS = (
    "bsp", "asp", "ssp(staleness=2)", "softsync(contributions=2)", "dc_asgd", "hogwild", "partial(backup=1)",
    "collaborative(samples=2)", "easgd(steps=1)", "ea_wild(steps=1)", "easgd(steps=1, synchronous_home=True)",
    "dpsgd(topology='ring')", "sgp(topology='one-peer-exponential')", "adpsgd(topology='ring')",
    "noloco(steps=1)", "decoupled(steps=1, grace=0.5)",
)  # fmt: skip


def all_reduce(cluster: Cluster, nbytes: int, codec: str = "dense", steps: int = 1, **more: Any) -> Outcome:
    program = [(Submit(0), Wait(0))] * steps
    return Job(cluster, [program] * cluster.ranks, [Bucket(nbytes)], codec=codec, **more).run()


# --- time and links ---------------------------------------------------------------------------------------------------


def test_events_happen_in_order_and_none_in_the_past() -> None:
    simulator, seen = Simulator(), []
    for time in (3.0, 1.0, 2.0, 1.0):
        simulator.at(time, lambda t=time: seen.append((simulator.now, t)))
    simulator.run()
    assert seen == [(1.0, 1.0), (1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    with pytest.raises(ValueError, match="cannot be asked for"):
        simulator.at(0.5, seen.clear)


def test_a_thread_does_one_thing_after_the_other_and_cores_are_shared() -> None:
    simulator, ends = Simulator(), []
    processor = Processor(simulator, 1)
    threads = [Thread(simulator, processor) for _ in range(3)]
    for thread in threads:
        thread.post(1.0, lambda: ends.append(simulator.time))
    threads[0].post(1.0, lambda: ends.append(simulator.time))
    simulator.run()
    assert ends == [1.0, 2.0, 3.0, 4.0]  # one core: never two at the same time
    assert sum(thread.busy for thread in threads) == 4.0


def network(*links: Link) -> tuple[Simulator, Network, list[tuple[str, float]]]:
    simulator = Simulator()
    return simulator, Network(simulator, links), []


def test_a_message_takes_the_latency_and_its_length_once_between_equal_links() -> None:
    simulator, net, came = network(Link(1e6, 0.01), Link(1e6, 0.01))
    net.send(0, 1, 1_000_000 - HEAD_NBYTES, 0, lambda: came.append(("a", simulator.now)))
    net.send(0, 1, 500_000 - HEAD_NBYTES, 0, lambda: came.append(("b", simulator.now)))
    simulator.run()
    assert [name for name, _ in came] == ["a", "b"]
    assert [time for _, time in came] == pytest.approx([1.01, 1.51])


def test_senders_share_the_link_of_a_receiver_and_a_slow_one_does_not_block_it() -> None:
    simulator, net, came = network(Link(1e6, 0), Link(1e6, 0), Link(1e6, 0), Link(1e5, 0))
    for source in (0, 1):
        net.send(source, 2, 100_000 - HEAD_NBYTES, 0, lambda: came.append(("fast", simulator.now)))
    net.send(3, 2, 100_000 - HEAD_NBYTES, 0, lambda: came.append(("slow", simulator.now)))
    simulator.run()
    assert [name for name, _ in came] == ["fast", "fast", "slow"]
    assert [time for _, time in came] == pytest.approx([0.1, 0.2, 1.0])


@pytest.mark.parametrize(("discipline", "expected"), [("fifo", "abc"), ("priority", "acb")])
def test_with_priority_the_smaller_number_leaves_first(discipline: str, expected: str) -> None:
    link = Link(1e6, 0, discipline)
    simulator, net, _ = network(link, link)
    came: list[str] = []
    for name, priority in (("a", 5), ("b", 4), ("c", 1)):
        net.send(0, 1, 1000, priority, came.append, name)
    simulator.run()
    assert "".join(came) == expected


# --- all-reduces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 4, 7])
def test_a_ring_sends_what_theory_says_and_takes_as_long_as_its_bytes(nodes: int) -> None:
    nbytes = 4 * 5040 * 500  # divisible by all of them
    outcome = all_reduce(equal(nodes, LINK, costs=NO_COSTS), nbytes)
    each = 2 * (nodes - 1) * nbytes // nodes
    assert [(traffic.sent, traffic.received) for traffic in outcome.traffic] == [(each, each)] * nodes
    wire = each + HEAD_NBYTES * outcome.traffic[0].sent_messages
    least = wire * LINK.byte
    rounds = 2 * (nodes - 1) * (LINK.latency + 2e-4)  # the latency of each, and credit between the chunks
    assert least < outcome.ends[0][0] < least + rounds


def test_recursive_doubling_takes_a_latency_and_a_message_for_each_round() -> None:
    cluster = equal(8, LINK, costs=NO_COSTS)
    outcome = all_reduce(cluster, 4000)
    assert outcome.ends[0][0] == pytest.approx(3 * (LINK.latency + (4000 + HEAD_NBYTES) * LINK.byte), rel=1e-9)
    assert outcome.traffic[3].sent == 3 * 4000


def test_costs_of_messages_add_up_in_a_chain_of_rounds() -> None:
    costs = replace_costs(NO_COSTS, send=1e-3, receive=2e-3, local=4e-3)
    free = all_reduce(equal(4, LINK, costs=NO_COSTS), 400).ends[0][0]
    assert all_reduce(equal(4, LINK, costs=costs), 400).ends[0][0] == pytest.approx(free + 2 * 3e-3 + 2 * 4e-3)


def replace_costs(costs: Costs, **more: Any) -> Costs:
    return msgspec.structs.replace(costs, **more)


@pytest.mark.parametrize("codec", ["dense", *CODECS])
@pytest.mark.parametrize("nodes", [2, 5])
def test_every_byte_that_is_sent_arrives(codec: str, nodes: int) -> None:
    outcome = all_reduce(equal(nodes, LINK, costs=COSTS, workers=2), 2_000_000, codec, steps=3)
    sent, received = ([getattr(t, name) for t in outcome.traffic] for name in ("sent", "received"))
    assert sum(sent) == sum(received) > 0
    assert sum(t.sent_messages for t in outcome.traffic) == sum(t.received_messages for t in outcome.traffic)
    dense = 2 * 2_000_000 * (nodes - 1) * 3
    most = {"dense": 1.0, "fp16": 0.5, "int8": 0.27}.get(codec, 1.0)
    assert sum(sent) <= dense * most + 3000 * nodes


def test_the_same_job_comes_to_the_same_result_and_another_to_another() -> None:
    def job(seed: int) -> Outcome:
        dice = random.Random(seed)
        programs = [[(Compute(dice.random()), Submit(0), Submit(1), Wait(0), Wait(1))] * 3 for _ in range(6)]
        return Job(equal(3, LINK, costs=COSTS, workers=2), programs, [Bucket(100_000), Bucket(3_000_000)]).run()

    assert job(1) == job(1)
    assert job(1).ends != job(2).ends


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    nodes=st.integers(2, 5),
    nbytes=st.integers(1, 500_000).map(lambda n: 4 * n),
    rate=st.floats(1e7, 1e10),
    latency=st.floats(0, 1e-2),
    codec=st.sampled_from(["dense", "fp16", "int8"]),
)
def test_a_slower_link_or_more_bytes_never_make_it_sooner(
    nodes: int, nbytes: int, rate: float, latency: float, codec: str
) -> None:
    # Chunks and exchanges are chosen by the link: they are held here, so that it is the same exchange.
    def seconds(nbytes: int, link: Link) -> float:
        cluster = equal(nodes, link, costs=COSTS, chunk_bytes=256 * 1024)
        return all_reduce(cluster, nbytes, codec).ends[0][0]

    base = seconds(nbytes, Link(rate, latency))
    assert seconds(nbytes, Link(rate / 2, latency)) >= base * 0.999
    assert seconds(nbytes, Link(rate, latency * 2)) >= base * 0.999
    assert seconds(2 * nbytes, Link(rate, latency)) >= base * 0.999


def test_a_rank_that_is_late_makes_the_others_wait() -> None:
    programs: list[list[Sequence[Action]]] = [[(Compute(0.01), Submit(0), Wait(0))] for _ in range(4)]
    programs[2] = [(Compute(0.5), Submit(0), Wait(0))]
    outcome = Job(equal(4, LINK, costs=COSTS), programs, [Bucket(4000)]).run()
    assert all(0.5 < ends[0] < 0.51 for ends in outcome.ends)
    assert outcome.waited[0][0] == pytest.approx(0.49, abs=0.01)
    assert outcome.waited[2][0] < 0.01


def test_hosts_of_one_machine_share_its_cores() -> None:
    costs = replace_costs(NO_COSTS, io_send=5e-9, io_receive=5e-9)
    alone = all_reduce(equal(4, LINK, costs=costs), 8_000_000).ends[0][0]
    shared = equal(4, LINK, costs=costs, machines=(0,) * 4, processors=(1,))
    assert all_reduce(shared, 8_000_000).ends[0][0] > 1.2 * alone


@pytest.mark.parametrize(("used", "seconds"), [(0.0, 0.1), (0.02, 0.1), (0.08, 0.16), (0.3, 0.6)])
def test_computing_waits_for_processors_that_it_shares(used: float, seconds: float) -> None:
    """Two ranks on one processor: as long as each sleeps for as long as the other computes, nobody waits for it."""
    programs: list[list[Sequence[Action]]] = [[(Compute(0.1, used),)] for _ in range(2)]
    outcome = Job(equal(2, LINK, machines=(0, 0), processors=(1,)), programs, [Bucket(4000)]).run()
    assert max(ends[0] for ends in outcome.ends) == pytest.approx(seconds, rel=0.05)
    apart = Job(equal(2, LINK, machines=(0, 1), processors=(4, 4)), programs, [Bucket(4000)]).run()
    assert max(ends[0] for ends in apart.ends) == pytest.approx(0.1)


# --- homes ------------------------------------------------------------------------------------------------------------


def home_job(algorithm: str, nodes: int = 4, codec: str = "dense", slow: int = -1, steps: int = 6) -> Outcome:
    buckets = [Bucket(400_000), Bucket(200_000)]
    programs = []
    for rank in range(nodes):
        compute = Compute(0.5 if rank == slow else 0.05)
        programs.append([(compute, Submit(0), Submit(1), Wait(0), Wait(1))] * steps)
    return Job(equal(nodes, LINK, costs=COSTS), programs, buckets, algorithm, codec).run()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_goes_on_to_the_end_and_loses_no_byte(algorithm: str) -> None:
    outcome = home_job(algorithm)
    assert all(len(ends) == 6 for ends in outcome.ends)
    assert sum(t.sent for t in outcome.traffic) == sum(t.received for t in outcome.traffic) > 0
    assert home_job(algorithm) == outcome


def test_traffic_of_shards_and_gossip_is_what_theory_says() -> None:
    model, nodes, steps = 600_000, 4, 6
    shards = home_job("bsp")  # each rank's gradient to the homes elsewhere, and the parameters back
    assert sum(t.sent for t in shards.traffic) == 2 * (nodes - 1) * model * steps
    assert {t.sent for t in home_job("dpsgd(topology='ring')").traffic} == {2 * model * steps}
    assert {t.sent for t in home_job("sgp(topology='one-peer-exponential')").traffic} == {model * steps}


def test_who_waits_for_a_straggler_depends_on_the_algorithm() -> None:
    def pace(algorithm: str) -> float:
        """Steps of the first rank by the time at which the slow one has taken as many as it can in a second."""
        return home_job(algorithm, slow=3, steps=20).ends[0][-1]

    waits, bounded, free = pace("bsp"), pace("ssp(staleness=2)"), pace("asp")
    assert waits > 19 * 0.5
    assert 17 * 0.5 - 0.5 < bounded < waits  # two steps ahead of the slow one
    assert free < 20 * 0.1
    assert pace("partial(backup=1)") < 20 * 0.15
    assert pace("adpsgd(topology='ring')") < 20 * 0.1


def local_job(algorithm: str, slow: int = -1, steps: int = 40) -> Outcome:
    """Ranks that compute for 50 ms a step, a slow one for 250, and train 2.4 MB in four buckets at 100 Mbit/s."""
    spec, nodes = parse(algorithm), 4
    buckets = [Bucket(600_000)] * 4
    computed = [[0.25 if rank == slow else 0.05] * (steps // 5 if rank == slow else steps) for rank in range(nodes)]
    programs = [around_steps(each, len(buckets), spec) for each in computed]
    return Job(equal(nodes, ethernet(100e6), costs=FREE), programs, buckets, algorithm).run()


def test_fragments_send_what_the_whole_sends_and_wait_less() -> None:
    whole, pieces, late = (
        local_job(f"diloco(steps=8{more})") for more in ("", ", fragments=4", ", fragments=4, delay=2")
    )
    assert [t.sent for t in whole.traffic] == [t.sent for t in pieces.traffic]
    exchange = 2 * 3 / 4 * 2_400_000 * 8 / 100e6  # s, of the whole model by a ring
    assert whole.waited_seconds(0) == pytest.approx(exchange / 8, rel=0.1)
    assert pieces.waited_seconds(0) == pytest.approx(exchange / 8, rel=0.1)
    assert late.waited_seconds(0) < 0.05 * whole.waited_seconds(0)
    assert max(max(waited) for waited in pieces.waited) == pytest.approx(exchange / 4, rel=0.1)


def test_decoupled_learners_wait_for_nobody() -> None:
    for slow in (-1, 2):
        outcome = local_job("decoupled(steps=8, fragments=4)", slow)
        assert outcome.waited_seconds(0) == 0
        assert max(ends[-1] for ends in outcome.ends) == pytest.approx(40 * 0.05)
    synchronous = local_job("diloco(steps=8, fragments=4)", slow=-1)
    assert synchronous.ends[0][-1] > 1.2 * 40 * 0.05


def test_a_bucket_home_is_where_a_plan_has_it() -> None:
    from fusion_rt.wire import Bucket as Planned
    from fusiond.control.planning import place_homes

    sizes = [7, 3, 9, 9, 1, 4, 4]
    planned = [
        Planned(index=index, dtype="float32", offset=0, numel=numel, tensors=()) for index, numel in enumerate(sizes)
    ]
    assert place([Bucket(4 * size) for size in sizes], 3) == place_homes(planned, dict.fromkeys(range(3), 1.0))


# --- thousands of nodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["dense", *CODECS])
@pytest.mark.parametrize(("nodes", "rate"), [(2, 1e9), (4, 10e9), (16, 1e9)])
def test_one_node_that_stands_for_all_comes_to_what_each_of_them_does(codec: str, nodes: int, rate: float) -> None:
    cluster = equal(nodes, ethernet(rate), costs=COSTS)
    buckets = [Bucket(4_096_000, ((1024, 1000),)), Bucket(409_600, ((100, 1024),))]
    program = [(Submit(0), Compute(0.005), Submit(1), Wait(0), Wait(1))] * 2
    each = Job(cluster, [program] * nodes, buckets, codec=codec).run()
    one = Job(cluster, [program], buckets, codec=codec, alike=True).run()
    assert one.ends[0] == pytest.approx(tuple(map(max, zip(*each.ends, strict=True))), rel=1e-3)
    assert {traffic.sent for traffic in each.traffic} == {one.traffic[0].sent} == {one.traffic[0].received}
    assert {traffic.sent_messages for traffic in each.traffic} == {one.traffic[0].sent_messages}


def test_nodes_that_do_not_all_do_the_same_are_refused() -> None:
    program = [(Submit(0), Wait(0))]  # recursive doubling, in which two of six nodes only fold
    with pytest.raises(SimulationError):
        Job(equal(6, LINK, costs=COSTS), [program], [Bucket(4008)], alike=True).run()


def test_factors_are_as_large_as_those_of_the_codec() -> None:
    bucket = Bucket(4 * (300 * 200 + 64 + 16 * 16 * 9), ((300, 200), (64,), (16, 16, 9)))
    chosen = codecs.parse("powersgd(rank=4)")
    real: Any = chosen.open(real_layout(bucket))
    assert factors(bucket, chosen) == (real.first_elements, real.second_elements)  # type: ignore[arg-type]
