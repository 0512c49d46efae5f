"""Host strings and hostfiles."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_rt.core.errors import SettingError
from fusion_rt.runner.decisions.host_list import MAX_SLOTS, Host, parse_hostfile, parse_hosts
from tests.for_each import for_each


@for_each(
    ("text", "hosts"),
    [
        ("a", (Host("a"),)),
        ("h1:2,h2:4", (Host("h1", 2), Host("h2", 4))),
        ("h1:2, h2:4", (Host("h1", 2), Host("h2", 4))),
        ("ann@node-1.example.org:3", (Host("node-1.example.org", 3, "ann"),)),
        ("[::1]", (Host("::1"),)),
        ("[fe80::1%eth0]:2", (Host("fe80::1%eth0", 2),)),
        ("ann@[2001:db8::7]:8", (Host("2001:db8::7", 8, "ann"),)),
        ("127.0.0.1:2,localhost:2", (Host("127.0.0.1", 2), Host("localhost", 2))),
        ("a:1,b:1,a:3", (Host("a", 4), Host("b", 1))),
    ],
)
def test_hosts_are_read(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


@for_each(
    ("text", "complaint"),
    [
        ("", "'' is not a host"),
        ("a,,b", "'' is not a host"),
        ("a:", "'' slots of 'a:'"),
        ("a:0", "'0' slots of 'a:0'"),
        ("a:-1", "'-1' slots"),
        ("a:x", "'x' slots"),
        (f"a:{MAX_SLOTS + 1}", f"from 1 to {MAX_SLOTS}"),
        ("a:٣", "'٣' slots"),
        ("::1", "more than one colon"),
        ("fe80::1:2", "more than one colon"),
        ("[nonsense]:2", "no IPv6 address"),
        ("[127.0.0.1]", "no IPv6 address"),
        ("[::1", "no IPv6 address"),
        ("[::1]x", "goes on after its brackets"),
        ("[::1%a b]", "no IPv6 address"),
        ("-oProxyCommand=touch:2", "is not a host"),
        ("-l@a", "'-l' in '-l@a' is not a user name"),
        ("@a", "'' in '@a' is not a user name"),
        ("a b", "is not a host"),
        ("a;b", "is not a host"),
        ("ann@a,bob@a", "host a is named as 'ann@a' and as 'bob@a'"),
    ],
)
def test_what_is_no_host_is_refused_with_its_text(text: str, complaint: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_hosts(text)
    assert complaint in str(caught.value)


def test_a_hostfile_may_have_comments_blank_lines_users_and_ipv6() -> None:
    text = """
    # the fast ones
    gpu1 slots=4   # four of them
    ann@gpu2   slots=2

    [fe80::2]\tslots=3
    plain
    short:5
    """
    assert parse_hostfile(text) == (
        Host("gpu1", 4),
        Host("gpu2", 2, "ann"),
        Host("fe80::2", 3),
        Host("plain", 1),
        Host("short", 5),
    )


def test_a_batch_systems_file_with_a_line_per_slot_adds_up() -> None:
    assert parse_hostfile("n1\nn1\nn2\nn2\nn1\n") == (Host("n1", 3), Host("n2", 2))


@for_each(
    ("line", "complaint"),
    [
        ("a slots", "'slots' is not understood"),
        ("a slots=", "'' slots of 'a'"),
        ("a slots=two", "'two' slots"),
        ("a max_slots=4", "'max_slots=4' is not understood; a line is NAME [slots=N]"),
        ("a:2 slots=2", "'slots=2' is not understood"),
        ("a b", "'b' is not understood"),
        ("a, b", "'a,' is not a host"),
    ],
)
def test_a_bad_line_of_a_hostfile_is_named_by_its_number(line: str, complaint: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_hostfile(f"# hosts\n\n{line}\n", "my.hosts")
    assert str(caught.value).startswith("my.hosts, line 3: ")
    assert complaint in str(caught.value)


def test_a_hostfile_without_hosts_is_refused() -> None:
    with pytest.raises(SettingError, match=r"^f names no host$"):
        parse_hostfile("# nothing\n\n", "f")


@given(st.text(max_size=40))
def test_any_text_is_hosts_or_a_sentence(text: str) -> None:
    for parse in (parse_hosts, parse_hostfile):
        try:
            hosts = parse(text)
        except SettingError:
            continue
        assert all(
            host.slots >= 1 and not host.target.startswith("-") and not host.target.split()[1:] for host in hosts
        )
        assert len({host.name for host in hosts}) == len(hosts)


def test_what_is_this_machine_is_told_by_the_name() -> None:
    own = socket.gethostname()
    local = {host.name for host in parse_hosts(f"localhost,127.0.0.1,127.9.9.9,[::1],{own},elsewhere") if host.is_local}
    assert local == {"localhost", "127.0.0.1", "127.9.9.9", "::1", own}
    assert not Host("localhost", user="ann").is_local
    assert not Host(own).is_loopback
