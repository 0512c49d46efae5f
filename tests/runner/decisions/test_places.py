"""Who gets which place in a membership epoch."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import SettingError
from fusion_rt.runner.decisions.host_list import Host, parse_hosts
from fusion_rt.runner.decisions.places import (
    Place,
    Places,
    add_shard_hosts,
    assign,
    fill,
    shard_host_names,
)
from tests.for_each import for_each

A, B, C = Host("a", 2), Host("b", 2), Host("c", 1)


def of(*arguments: object, **options: object) -> Places:
    places = assign(*arguments, **options)  # type: ignore[arg-type]
    assert places is not None
    return places


def test_a_job_begins_with_hosts_in_their_order() -> None:
    places = of([A, B, C], [])
    assert places.topology.hosts == ("a", "b", "c")
    assert places.topology.ranks == ((0, 1), (2, 3), (4,))
    assert places.slots == ((0, 1), (0, 1), (0,))


def test_no_more_workers_than_there_may_be() -> None:
    places = of([A, B, C], [], most=3)
    assert places.topology.hosts == ("a", "b")
    assert places.slots == ((0, 1), (0,))


def test_hosts_of_survivors_come_first_in_their_old_order() -> None:
    places = of([A, B, C], [("c", 0), ("b", 0), ("b", 1)])
    assert places.topology.hosts == ("c", "b", "a")
    assert places.ranks == {("c", 0): 0, ("b", 0): 1, ("b", 1): 2, ("a", 0): 3, ("a", 1): 4}


def test_survivors_keep_their_slots_and_rank_0_is_one() -> None:
    places = of([A], [("a", 1)])
    assert places.slots == ((0, 1),)
    assert places.topology.ranks == ((1, 0),), "the survivor keeps its local_rank, and has the lower rank"


def test_survivors_have_places_before_others_do() -> None:
    places = of([A, B], [("a", 1), ("b", 0), ("b", 1)], most=3)
    assert places.ranks == {("a", 1): 0, ("b", 0): 1, ("b", 1): 2}


def test_a_host_that_has_fewer_slots_now_keeps_as_many_workers() -> None:
    places = of([Host("a", 1), B], [("a", 0), ("a", 1)])
    assert places.slots == ((0,), (0, 1))
    assert of([Host("a", 1)], [("a", 1)]).slots == ((1,),)


def test_survivors_elsewhere_are_not_counted() -> None:
    assert of([A], [("z", 0), ("a", 0)], most=1).ranks == {("a", 0): 0}
    assert assign([], [("a", 0)]) is None


@for_each("seed", range(200))
def test_what_holds_for_any_hosts_and_survivors(seed: int) -> None:
    rng = random.Random(seed)
    hosts = [Host(name, rng.randint(1, 4)) for name in rng.sample("abcdef", rng.randint(1, 6))]
    everyone: list[Place] = [(name, slot) for name in "abcdef" for slot in range(4)]
    survivors = rng.sample(everyone, rng.randint(0, 8))
    most = rng.choice([None, 1, 3, 6])
    places = of(hosts, survivors, most)
    slots = {host.name: host.slots for host in hosts}
    assert places.size == min(sum(slots.values()), most or 99)
    assert sorted(places.ranks.values()) == list(range(places.size))
    for host, used, ranks in zip(places.hosts, places.slots, places.topology.ranks, strict=True):
        assert len(set(used)) == len(used) == len(ranks) <= slots[host.name]
        assert list(used) == sorted(used)
    staying = [place for place in survivors if place in places.ranks]
    if any(name in slots for name, _ in survivors):
        assert any(rank == 0 for place, rank in places.ranks.items() if place in staying)
    if len([place for place in survivors if place[0] in slots]) <= places.size:
        kept = {name: sum(place[0] == name for place in staying) for name in slots}
        wanted = {name: min(sum(place[0] == name for place in survivors), slots[name]) for name in slots}
        assert kept == wanted


NAMES = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=8, unique=True)


@given(NAMES, st.data())
def test_ranks_fill_the_hosts_in_order(names: list[str], data: st.DataObject) -> None:
    hosts = tuple(Host(name, data.draw(st.integers(1, 5))) for name in names)
    num_proc = data.draw(st.integers(1, sum(host.slots for host in hosts)))
    places = fill(hosts, num_proc)
    used, topology = places.hosts, places.topology
    assert [rank for ranks in topology.ranks for rank in ranks] == list(range(num_proc))
    assert used == hosts[: len(used)]
    assert topology.hosts == tuple(host.name for host in used)
    assert all(len(ranks) == host.slots for host, ranks in zip(used[:-1], topology.ranks, strict=False))


def test_more_processes_than_slots_are_refused() -> None:
    with pytest.raises(SettingError, match=r"-np 5 asks for more processes than the 4 slots of a:1, b:3; name more"):
        fill((Host("a", 1), Host("b", 3)), 5)


def with_shards(text: str, hosts: str = "ann@a:2,b:2,e:2", num_proc: int = 4) -> Places:
    wanted = parse_hosts(hosts)
    return add_shard_hosts(text, wanted, fill(wanted, num_proc))


def test_shard_hosts_are_nodes_without_workers_behind_the_others() -> None:
    places = with_shards("bob@c, d")
    assert [host.target for host in places.hosts] == ["ann@a", "b", "bob@c", "d"]
    assert places.topology.hosts == ("a", "b", "c", "d")
    assert places.topology.ranks == ((0, 1), (2, 3), (), ())
    assert places.slots == ((0, 1), (0, 1), (), ())
    assert shard_host_names("bob@c, d") == "c,d"


def test_a_shard_host_that_has_workers_stays_one_node() -> None:
    for text in ("a,c", "ann@a,c"):
        places = with_shards(text)
        assert [host.target for host in places.hosts] == ["ann@a", "b", "c"]
        assert places.topology.ranks == ((0, 1), (2, 3), ())
    places = with_shards("e")  # of whose slots none was needed
    assert (places.hosts[-1], places.topology.ranks) == (Host("e", 2), ((0, 1), (2, 3), ()))


def test_without_shard_hosts_nothing_is_added() -> None:
    assert with_shards("") == fill(parse_hosts("ann@a:2,b:2,e:2"), 4)
    assert shard_host_names("") == ""


@for_each(
    ("text", "why"),
    [
        ("c,c", "host c is named twice; name it once"),
        ("c,bob@c", "host c is named twice; name it once"),
        ("c:2", "'c:2' has slots, which are for workers"),
        ("c,,d", "'' is not a host"),
        ("-x", "'-x' is not a host"),
        ("bob@a", "host a is named as 'bob@a' and for workers as 'ann@a'; name one user"),
    ],
)
def test_shard_hosts_that_cannot_be_used(text: str, why: str) -> None:
    with pytest.raises(SettingError) as raised:
        with_shards(text)
    assert str(raised.value).startswith("--shard-hosts (FUSION_SHARD_HOSTS): ")
    assert why in str(raised.value)
