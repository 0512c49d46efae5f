"""Payload messages as they are on the wire: sealed with keys that both ends have agreed on over the control channel.

The receiver of a payload connection makes a random secret for each connection of TCP, and tells it to the sender with
the token (`wire.Ticket`), under CURVE. So no key is used by two pairs of nodes, in two directions, or on two
connections. A message is two frames:

    the head:    serial (8 bytes), cipher (1), and sealed: [tag of the payload (16),] the message; the tag of this (16)
    the payload: sealed, and its tag (16); where payloads travel in the clear, as it is

Both are sealed by an AEAD (AES-128-GCM, NIST SP 800-38D; ChaCha20-Poly1305, RFC 8439, where one of the two processors
has no instructions for AES). The nonce is the serial and which of the two frames it is. Serials ascend on a connection,
and a message that is sent again is sent on another one: so no nonce comes twice with a key, which both ends see to. The
frame of the head is associated data of the payload. In the clear, a payload is associated data of an empty text, whose
tag is in the head: that is a message authentication code (GMAC, or Poly1305).

A key is good for `_REKEY` messages. The next one follows from the secret: HMAC-SHA-256 of its number (a KDF in counter
mode, NIST SP 800-108).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from fusion_rt.core.errors import WireError

AES, CHACHA = 1, 2
"""The ciphers, by their numbers on the wire."""
SECRET = 32  # bytes
TAG = 16  # bytes
_REKEY = 1 << 18  # messages with a key: of 1 MiB, 2**34 blocks of AES, which tell it from a random function by 2**-61
_HEAD = struct.Struct("<QB")
_NONCE = struct.Struct("<QI")
_OF_HEAD, _OF_PAYLOAD = 0, 1
_KEY_BYTES = {AES: 16, CHACHA: 32}


Cipher: TypeAlias = AESGCM | ChaCha20Poly1305
Frames: TypeAlias = tuple[bytes, bytes | memoryview]
_CHANGED = "message {} was changed on the way, or is not from it"


class Damaged(WireError):
    """A message is not as it was sent, or not from the peer at all."""


def new_secret() -> bytes:
    """Returns a secret for one connection."""
    return secrets.token_bytes(SECRET)


def has_aes(cpuinfo: str) -> bool:
    """Returns whether a processor has the instructions that AES-GCM needs to be fast, by Linux's description of it:
    those of AES, and of products without carries. Without them AES-GCM is slower than ChaCha20-Poly1305."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = set(value.split())
            return "aes" in found and bool({"pclmulqdq", "pmull"} & found)
    return False


def has_aes_here() -> bool:
    """Returns the same of this host's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return has_aes(file.read())
    except OSError:
        return False


class _Keys:
    """The keys of one connection: the sender's and the receiver's are the same.

    Args:
        secret: `SECRET` bytes.
        encrypts: payloads are encrypted, and not only authenticated.
    """

    def __init__(self, secret: bytes, encrypts: bool) -> None:
        assert len(secret) == SECRET
        self.encrypts = encrypts
        self._origin = secret
        self._which = (0, -1)  # cipher, and number of the key
        self._cipher: Cipher | None = None

    def cipher(self, which: int, serial: int) -> Cipher:
        """Returns the cipher for a message."""
        wanted = (which, serial // _REKEY)
        if self._cipher is None or wanted != self._which:
            label = struct.pack("<BBQ", which, self.encrypts, wanted[1]) + b"fusion_rt payload"
            key = hmac.digest(self._origin, label, hashlib.sha256)[: _KEY_BYTES[which]]
            self._cipher = AESGCM(key) if which == AES else ChaCha20Poly1305(key)
            self._which = wanted
        return self._cipher


class Sealer:
    """Seals the messages of one connection.

    Args:
        secret, encrypts: see `_Keys`.
        cipher: `AES` or `CHACHA`.
    """

    def __init__(self, secret: bytes, encrypts: bool, cipher: int) -> None:
        self._keys = _Keys(secret, encrypts)
        self._number = cipher
        self._last = -1

    def seal(self, serial: int, body: bytes, payload: bytes | memoryview) -> Frames:
        """Returns both frames of a message; the second is the payload itself where it is not encrypted.

        Args:
            serial: larger than that of the message before.
        """
        return self.sealing(serial, body, payload)()

    def sealing(self, serial: int, body: bytes, payload: bytes | memoryview) -> Callable[[], Frames]:
        """Returns a function that does what `seal` does, which any thread may call."""
        if serial <= self._last:  # not an assertion, which `python -O` leaves out
            raise RuntimeError(f"message {serial} after {self._last} would use a nonce twice")
        self._last = serial
        return partial(self._seal, self._keys.cipher(self._number, serial), serial, body, payload)

    def _seal(self, cipher: Cipher, serial: int, body: bytes, payload: bytes | memoryview) -> Frames:
        head, nonce = _HEAD.pack(serial, self._number), _NONCE.pack(serial, _OF_PAYLOAD)
        if not self._keys.encrypts:
            body = cipher.encrypt(nonce, b"", payload) + body
        head += cipher.encrypt(_NONCE.pack(serial, _OF_HEAD), body, head)
        if not self._keys.encrypts:
            return head, payload
        sealed = np.empty(len(payload) + TAG, np.uint8).data  # not a bytearray, which would be filled with zeros first
        cipher.encrypt_into(nonce, payload, head, sealed)
        return head, sealed


class Opener:
    """Opens the messages of one connection.

    Args:
        secret, encrypts: see `_Keys`.
    """

    def __init__(self, secret: bytes, encrypts: bool) -> None:
        self._keys = _Keys(secret, encrypts)
        self._last = -1  # the first message is the greeting, 0

    def open(self, head: memoryview, payload: memoryview) -> tuple[int, memoryview, memoryview]:
        """Returns the serial, the body, and the payload of a message; nothing of it is used before its tags fit.

        Raises:
            Damaged: a tag does not fit, or the message is not the one that follows on this connection.
        """
        serial, body, opening = self.opening(head)
        return serial, body, opening(payload)

    def opening(self, head: memoryview) -> tuple[int, memoryview, Callable[[memoryview], memoryview]]:
        """Opens the head of a message. Returns its serial, its body, and a function that opens its payload, which any
        thread may call.

        Raises:
            Damaged: as `open`, which that function does as well.
        """
        if len(head) < _HEAD.size + TAG:
            raise Damaged(f"a head of {len(head)} bytes is too short")
        serial, number = _HEAD.unpack_from(head)
        if number not in _KEY_BYTES:
            raise Damaged(f"there is no cipher {number}")
        follows = serial == self._last + 1 or (self._last == 0 and serial > 0)  # those had before are not sent again
        if not follows:
            raise Damaged(f"message {serial} came after message {self._last}")
        cipher = self._keys.cipher(number, serial)
        try:
            prefix, sealed = head[: _HEAD.size], head[_HEAD.size :]
            body = memoryview(cipher.decrypt(_NONCE.pack(serial, _OF_HEAD), sealed, prefix))
        except InvalidTag:
            raise Damaged(_CHANGED.format(serial)) from None
        self._last = serial
        tag, body = (None, body) if self._keys.encrypts else (body[:TAG], body[TAG:])
        return serial, body, partial(self._open, cipher, serial, head, tag)

    @staticmethod
    def _open(cipher: Cipher, serial: int, head: memoryview, tag: memoryview | None, payload: memoryview) -> memoryview:
        nonce = _NONCE.pack(serial, _OF_PAYLOAD)
        try:
            if tag is not None:
                cipher.decrypt(nonce, tag, payload)
                return payload
            opened = np.empty(max(len(payload) - TAG, 0), np.uint8).data
            cipher.decrypt_into(nonce, payload, head, opened)
        except InvalidTag:
            raise Damaged(_CHANGED.format(serial)) from None
        return opened
