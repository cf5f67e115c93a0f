"""Sealed frames: their bytes are written down, and nothing but the next frame is taken."""

from __future__ import annotations

import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from training.exchange.links.sealing import (
    HEADER,
    MAX_FRAME,
    TAG,
    FrameError,
    Opener,
    Sealer,
    faster_cipher,
    parse_header,
)

SECRET = bytes(range(32))


def opened(opener: Opener, frame: bytes) -> bytes:
    into = bytearray(len(frame) - HEADER.size - TAG)
    view = memoryview(frame)
    opener.open(view[: HEADER.size], view[HEADER.size :], memoryview(into))
    return bytes(into)


@pytest.mark.parametrize(
    ("cipher", "sealed"),
    [
        ("aes", "270114cace9dd0f7094a006ae645c03219004e4f4314b9bf58040666d7b32408"),
        ("chacha", "f537c5c3e2467f8022857a7ef00318e31a7dfc19dca8c1ceab97a429ad9abfd0"),
    ],
)
def test_a_frame_has_the_bytes_that_are_written_down(cipher: str, sealed: str) -> None:
    sealer = Sealer(SECRET, cipher)  # type: ignore[arg-type]
    frame = bytes(sealer.seal(7, memoryview(b"forty recordings"), 5))
    assert frame[: HEADER.size] == bytes.fromhex("000000000000000007000000100000000500000000000000")
    assert frame[HEADER.size :].hex() == sealed


def test_the_key_is_hkdfs_and_the_nonce_the_counter() -> None:
    """With the formulas of RFC 5869 and RFC 5116 alone."""
    import hmac

    def expand(secret: bytes, purpose: bytes, size: int) -> bytes:
        return hmac.digest(secret, purpose + b"\x01", "sha256")[:size]

    sealer = Sealer(SECRET, "aes", rekey_after=2)
    frames = [bytes(sealer.seal(1, memoryview(b"x"), 0)) for _ in range(3)]
    second = expand(SECRET, b"muster next secret", 32)
    keys = [expand(secret, b"muster frames aes", 16) for secret in (SECRET, SECRET, second)]
    for number, (frame, key) in enumerate(zip(frames, keys)):
        nonce = bytes(4) + struct.pack("<Q", number)
        assert AESGCM(key).decrypt(nonce, frame[HEADER.size :], frame[: HEADER.size]) == b"x"


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=9), st.integers(1, 4))
def test_what_is_sealed_is_opened_in_order_also_with_new_keys(parts: list[bytes], rekey_after: int) -> None:
    sealer, opener = Sealer(SECRET, "chacha", rekey_after), Opener(SECRET, "chacha", rekey_after)
    for part in parts:
        frame = bytes(sealer.seal(1, memoryview(part), 0))
        assert opened(opener, frame) == part


@given(st.integers(0, HEADER.size + 20 + TAG - 1), st.integers(1, 255))
def test_a_frame_with_any_bit_changed_is_refused(place: int, change: int) -> None:
    frame = bytearray(Sealer(SECRET, "aes").seal(3, memoryview(bytes(20)), 0))
    frame[place] ^= change
    with pytest.raises(FrameError):
        opened(Opener(SECRET, "aes"), bytes(frame))


@given(st.permutations(range(4)))
def test_only_the_next_frame_is_taken(order: list[int]) -> None:
    sealer, opener = Sealer(SECRET, "aes"), Opener(SECRET, "aes")
    frames = [bytes(sealer.seal(0, memoryview(bytes([number])), 0)) for number in range(4)]
    for expected, number in enumerate(order):
        if number != expected:
            with pytest.raises(FrameError):
                opened(opener, frames[number])
            return
        opened(opener, frames[number])
    with pytest.raises(FrameError):
        opened(opener, frames[3])


def test_a_frame_of_the_other_direction_is_refused() -> None:
    frame = bytes(Sealer(bytes(32), "aes").seal(0, memoryview(b"x"), 0))
    with pytest.raises(FrameError):
        opened(Opener(SECRET, "aes"), frame)


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_no_header_asks_for_more_than_a_frame(header: bytes) -> None:
    try:
        _, length, _ = parse_header(memoryview(header))
    except FrameError:
        return
    assert length <= MAX_FRAME


def test_the_faster_cipher_is_one_of_the_two() -> None:
    assert faster_cipher() in ("aes", "chacha")
