"""Payload messages that are sealed, and attempts to have others taken for them."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fusiond.transport import sealing
from fusiond.transport.sealing import AES, CHACHA, Damaged, Opener, Sealer
from tests.for_each import for_each

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
WAYS = [(encrypts, cipher) for encrypts in (True, False) for cipher in (AES, CHACHA)]
Frames = tuple[bytes, bytes]


class Connection:
    """A sender and a receiver, with everything that was sent between them."""

    def __init__(self, encrypts: bool, cipher: int, secret: bytes = SECRET) -> None:
        self.sealer, self.opener = Sealer(secret, encrypts, cipher), Opener(secret, encrypts)
        self.sent: list[Frames] = []
        self.open(*self.seal(0, b""))

    def seal(self, serial: int, payload: bytes) -> Frames:
        head, sealed = self.sealer.seal(serial, b"about %d" % serial, payload)
        self.sent.append((head, bytes(sealed)))
        return self.sent[-1]

    def open(self, head: bytes, payload: bytes) -> tuple[int, bytes, bytes]:
        serial, body, opened = self.opener.open(memoryview(head), memoryview(payload))
        return serial, bytes(body), bytes(opened)


@for_each("way", WAYS)
def test_what_was_sealed_is_opened_as_it_was(way: tuple[bool, int]) -> None:
    connection = Connection(*way)
    for serial, nbytes in enumerate((0, 1, 15, 16, 17, 100_000), 7):  # those before were sent on another connection
        payload = bytes(i * i % 251 for i in range(nbytes))
        frames = connection.seal(serial, payload)
        assert connection.open(*frames) == (serial, b"about %d" % serial, payload)
        assert b"about" not in frames[0]
        assert (frames[1] == payload) == (not way[0])


def test_the_bytes_are_those_of_aes_gcm_with_the_documented_key_and_nonces() -> None:
    connection = Connection(True, AES)
    head, payload = connection.seal(5, b"some gradients")
    label = b"\x01\x01" + struct.pack("<Q", 0) + b"fusion_rt payload"
    cipher = AESGCM(hmac.new(SECRET, label, hashlib.sha256).digest()[:16])
    assert head[:9] == struct.pack("<QB", 5, 1)
    assert cipher.decrypt(struct.pack("<QI", 5, 0), head[9:], head[:9]) == b"about 5"
    assert cipher.decrypt(struct.pack("<QI", 5, 1), payload, head) == b"some gradients"


@for_each("way", WAYS)
def test_any_flipped_bit_is_noticed(way: tuple[bool, int]) -> None:
    length = sum(map(len, Connection(*way).seal(1, b"payload")))
    for bit in range(8 * length):
        connection = Connection(*way)
        head, payload = connection.seal(1, b"payload")
        changed = bytearray(head + payload)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            connection.open(bytes(changed[: len(head)]), bytes(changed[len(head) :]))


@for_each("way", WAYS)
def test_messages_that_are_cut_or_lengthened_are_noticed(way: tuple[bool, int]) -> None:
    for cut in range(1, 40):
        for which in (0, 1):
            for change in (lambda frame, cut=cut: frame[:-cut], lambda frame, cut=cut: frame + bytes(cut)):
                connection = Connection(*way)
                frames = list(connection.seal(1, b"a payload of some length, so that there is enough to cut"))
                frames[which] = change(frames[which])
                with pytest.raises(Damaged):
                    connection.open(frames[0], frames[1])


@for_each("way", WAYS)
def test_messages_that_come_again_or_in_another_order_or_are_left_out_are_noticed(way: tuple[bool, int]) -> None:
    connection = Connection(*way)
    sent = [connection.sent[0], *(connection.seal(serial, b"payload %d" % serial) for serial in range(3, 7))]
    connection.open(*sent[1])
    connection.open(*sent[2])
    for wrong in (sent[0], sent[1], sent[2], sent[4]):
        with pytest.raises(Damaged, match="came after message 4"):
            connection.open(*wrong)
    assert connection.open(*sent[3])[0] == 5


@for_each("way", WAYS)
def test_a_connection_begins_with_its_greeting(way: tuple[bool, int]) -> None:
    connection = Connection(*way)
    connection.opener = Opener(SECRET, way[0])
    with pytest.raises(Damaged):
        connection.open(*connection.seal(1, b"payload"))


@for_each("way", WAYS)
def test_a_message_of_another_connection_is_noticed(way: tuple[bool, int]) -> None:
    """Spliced in from a connection of another pair, or reflected: that of the other direction has another secret."""
    connection, other = Connection(*way), Connection(*way, secret=OTHER)
    with pytest.raises(Damaged):
        connection.open(*other.seal(1, b"payload"))


@for_each("way", WAYS)
def test_a_head_with_the_payload_of_another_message_is_noticed(way: tuple[bool, int]) -> None:
    connection = Connection(*way)
    (head, _), (_, payload) = connection.seal(1, b"first!"), connection.seal(2, b"second")
    with pytest.raises(Damaged):
        connection.open(head, payload)


@for_each("cipher", [AES, CHACHA])
def test_a_message_in_the_clear_is_not_taken_for_an_encrypted_one_or_the_other_way_round(cipher: int) -> None:
    encrypted, clear = Connection(True, cipher), Connection(False, cipher)
    frames = encrypted.seal(1, b"payload"), clear.seal(1, b"payload")
    for connection, wrong in zip((clear, encrypted), frames, strict=True):
        with pytest.raises(Damaged):
            connection.open(*wrong)


def test_no_nonce_is_used_twice_with_a_key() -> None:
    connection = Connection(True, AES)
    connection.seal(4, b"")
    for serial in (0, 3, 4):
        with pytest.raises(RuntimeError, match="would use a nonce twice"):
            connection.seal(serial, b"")


@for_each("way", WAYS)
def test_keys_change_long_before_they_have_sealed_too_much(
    way: tuple[bool, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for name in ("AESGCM", "ChaCha20Poly1305"):
        real = getattr(sealing, name)
        monkeypatch.setattr(sealing, name, lambda key, real=real: keys.append(key) or real(key))  # type: ignore[func-returns-value]
    connection = Connection(*way)
    last = sealing._REKEY - 1
    for serial in (last, last + 1, last + 2):
        assert connection.open(*connection.seal(serial, b"payload"))[2] == b"payload"
    assert len(keys) == 4
    assert keys[:2] == [keys[0]] * 2
    assert keys[2:] == [keys[2]] * 2
    assert keys[0] != keys[2]
    assert 2 * sealing._REKEY <= 2**32


def test_the_cipher_follows_from_the_processor() -> None:
    intel = "processor\t: 0\nflags\t\t: fpu sse2 pclmulqdq aes avx\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd aes pmull sha1\n"
    assert sealing.has_aes(intel)
    assert sealing.has_aes(arm)
    for without in (intel.replace(" aes", ""), arm.replace(" pmull", ""), "model name\t: aes pmull", ""):
        assert not sealing.has_aes(without)
