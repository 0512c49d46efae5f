"""Inputs made of other inputs: bits changed, parts cut out, repeated and put together, hostile counts put in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

MAX_BYTES = 1 << 17
_COUNTS = (0, 1, 2, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**48, 2**63 - 1, 2**64 - 1)
_WORDS = (
    # counts in MessagePack: of elements, of entries, of bytes
    b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x10\x00\x00", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc0", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00", b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + b"\0" * 7,
    # nesting
    b"\x91" * 2000, b"[" * 2000, b'{"a":' * 2000, b"(" * 190,
    # texts that are read as numbers, or are none
    b"null", b"-1", b"1e999", b"-0.0", b"NaN", b"9" * 5000, b"0x" + b"f" * 5000, b"1:1:1:1", b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xc2\xb2", b"\0", b"\n", b"\r\n\r\n", b",", b":", b"=", b"#", b"'", b'"', b"\xe2\x80\xa8", b"..", b"/",
)  # fmt: skip


def mutated(pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the inputs, changed a few times."""
    data = bytearray(rng.choice(pool))
    for _ in range(1 + min(int(rng.expovariate(0.7)), 12)):
        rng.choice(_WAYS)(data, pool, words, rng)
    return bytes(data[:MAX_BYTES])


def _place(data: bytearray, rng: random.Random) -> int:
    return rng.randint(0, len(data))


def _flip_bit(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _cut_end(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    del data[_place(data, rng) :]


def _cut_out(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    start = _place(data, rng)
    del data[start : start + rng.randint(1, 16)]


def _insert_noise(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    start = _place(data, rng)
    data[start:start] = rng.randbytes(rng.randint(1, 16))


def _insert_word(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    word = rng.choice(words if words and rng.random() < 0.7 else _WORDS)
    start = _place(data, rng)
    end = start if rng.random() < 0.5 else start + len(word)
    data[start:end] = word


def _write_count(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    width = rng.choice((1, 2, 4, 8))
    start = _place(data, rng)
    count = rng.choice(_COUNTS) + rng.choice((-1, 0, 0, 1))
    data[start : start + width] = (count % 256**width).to_bytes(width, rng.choice(("little", "big")))


def _repeat(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    start = _place(data, rng)
    part = data[start : start + rng.randint(1, 64)]
    data[start:start] = part * rng.choice((1, 2, 10, 100))
    del data[MAX_BYTES:]


def _splice(data: bytearray, pool: Sequence[bytes], words: Sequence[bytes], rng: random.Random) -> None:
    other = rng.choice(pool)
    data[_place(data, rng) :] = other[rng.randint(0, len(other)) :]


_WAYS: tuple[Callable[[bytearray, Sequence[bytes], Sequence[bytes], random.Random], None], ...] = (
    _flip_bit,
    _set_byte,
    _set_byte,
    _cut_end,
    _cut_out,
    _insert_noise,
    _insert_word,
    _insert_word,
    _write_count,
    _repeat,
    _splice,
)
