"""Sealed frames: how bytes travel on a connection once TLS 1.3 has authenticated the other end.

A frame is a header of 24 bytes, the encrypted bytes, and a tag of 16 bytes:

========  =====  ==============================================================
counter   u64    frames sent before on this connection
operation u32    which exchange, or which tag, the bytes belong to
length    u32    bytes in this frame, at most :data:`MAX_FRAME`
left      u64    bytes of the same message that follow in further frames
========  =====  ==============================================================

Numbers are little-endian. Encryption is AES-128-GCM, or ChaCha20-Poly1305 where that is faster, as an AEAD of RFC 5116:
the header is the associated data, the nonce four zero bytes and the counter. Each direction of each connection has a
secret of its own, drawn by the dialling end and sent inside TLS; every :data:`REKEY_AFTER` frames both ends derive the
next one (HKDF-Expand, RFC 5869), so no nonce is ever used twice with a key and no key nears the limits of its cipher.
The receiver takes the frame that it expects and no other: a frame that is changed, repeated, left out or out of order
raises :class:`FrameError`, and the connection ends. ``tests/exchange/test_sealing.py`` holds test vectors.
"""

from __future__ import annotations

import struct
import time
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

HEADER = struct.Struct("<QIIQ")
TAG = 16
MAX_FRAME = 1 << 20
SECRET = 32
"""Bytes of a direction's secret."""
REKEY_AFTER = 1 << 14
"""Frames with one key: at most 16 GiB."""

Cipher = Literal["aes", "chacha"]
_KEY_BYTES: dict[Cipher, int] = {"aes": 16, "chacha": 32}


class FrameError(ValueError):
    """A frame is not the expected one; the text is one line for the log."""


class _Keys:
    """The successive keys of one direction."""

    def __init__(self, secret: bytes, cipher: Cipher, rekey_after: int) -> None:
        self._secret = secret
        self._cipher = cipher
        self._rekey_after = rekey_after
        self._counter = 0
        self._aead = self._current()

    def next(self) -> tuple[int, bytes, AESGCM | ChaCha20Poly1305]:
        """Return the next frame's counter, nonce and key."""
        if self._counter and self._counter % self._rekey_after == 0:
            self._secret = _expand(self._secret, b"muster next secret", SECRET)
            self._aead = self._current()
        counter, self._counter = self._counter, self._counter + 1
        return counter, struct.pack("<4xQ", counter), self._aead

    def _current(self) -> AESGCM | ChaCha20Poly1305:
        key = _expand(self._secret, f"muster frames {self._cipher}".encode(), _KEY_BYTES[self._cipher])
        return AESGCM(key) if self._cipher == "aes" else ChaCha20Poly1305(key)


class Sealer:
    """The sending end of one direction."""

    def __init__(self, secret: bytes, cipher: Cipher, rekey_after: int = REKEY_AFTER) -> None:
        self._keys = _Keys(secret, cipher, rekey_after)
        self._buffer = memoryview(bytearray(HEADER.size + MAX_FRAME + TAG))

    def seal(self, operation: int, payload: memoryview, left: int) -> memoryview:
        """Return the next frame around at most :data:`MAX_FRAME` bytes; it is valid until the next call."""
        counter, nonce, aead = self._keys.next()
        HEADER.pack_into(self._buffer, 0, counter, operation, len(payload), left)
        frame = self._buffer[: HEADER.size + len(payload) + TAG]
        aead.encrypt_into(nonce, payload, frame[: HEADER.size], frame[HEADER.size :])
        return frame


class Opener:
    """The receiving end of one direction."""

    def __init__(self, secret: bytes, cipher: Cipher, rekey_after: int = REKEY_AFTER) -> None:
        self._keys = _Keys(secret, cipher, rekey_after)

    def open(self, header: memoryview, sealed: memoryview, into: memoryview) -> None:
        """Decrypt ``sealed`` (with its tag) into ``into``, which has as many bytes as the frame.

        Raises:
            FrameError: it is not the next frame, or was changed; the contents of ``into`` are then undefined.
        """
        counter, nonce, aead = self._keys.next()
        if HEADER.unpack(header)[0] != counter:
            raise FrameError(f"frame {HEADER.unpack(header)[0]} where {counter} had to come")
        try:
            aead.decrypt_into(nonce, sealed, header, into)
        except InvalidTag:
            raise FrameError(f"frame {counter} was changed on its way") from None


def parse_header(header: memoryview) -> tuple[int, int, int]:
    """Return operation, length and left of a header that is not authenticated yet.

    Raises:
        FrameError: the length is above the maximum.
    """
    _, operation, length, left = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise FrameError(f"a frame of {length} bytes is above {MAX_FRAME}")
    return operation, length, left


def faster_cipher() -> Cipher:
    """Return the faster cipher on this machine: AES wherever the processor has instructions for it."""
    data, into = bytes(256 << 10), bytearray((256 << 10) + TAG)
    seconds = {}
    for name, aead in (("aes", AESGCM(bytes(16))), ("chacha", ChaCha20Poly1305(bytes(32)))):
        begin = time.thread_time()
        for number in range(4):
            aead.encrypt_into(struct.pack("<4xQ", number), data, None, into)
        seconds[name] = time.thread_time() - begin
    return "aes" if seconds["aes"] <= seconds["chacha"] else "chacha"


def _expand(secret: bytes, purpose: bytes, size: int) -> bytes:
    return HKDFExpand(hashes.SHA256(), size, purpose).derive(secret)
