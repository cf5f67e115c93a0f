"""The exchange by which two machines that share a code learn each other's keys, with nobody in between.

SPAKE2 (Abdalla and Pointcheval 2005; the library is python-spake2, as in magic-wormhole) turns the code into a strong
key: who does not know the code learns nothing by listening, and by taking part can check one guess. From the key two
ChaCha20-Poly1305 keys follow, one a direction, and an identifier of this exchange. Each side then sends a sealed
introduction: one that cannot be opened means that the code was wrong. It carries a signature of the identifier by the
key that it names, so nobody introduces itself with a key of others.
"""

from __future__ import annotations

import contextlib
import json
from typing import Annotated, Any, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from distributed.hosts.lending import LendClass
from distributed.joining.pairing.codes import Code
from distributed.joining.pairing.keys import JoiningKey, is_signed
from profiles.errors import BadInput
from profiles.installation import package_line

VERSION = 1
LONGEST_FRAME = 8192
"""Bytes of a sealed message."""
MESSAGE_BYTES = 33
"""Bytes of a message of SPAKE2 on Ed25519: the side, and a point."""
_HELPER, _POOL = b"muster helper 1", b"muster pool 1"
DECISION = 180.0
"""Seconds that two people have to look at each other's machines and agree."""
_LINE = r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]*$"
_Text = Annotated[str, StringConstraints(pattern=_LINE, max_length=120)]
_Key = Annotated[str, StringConstraints(pattern=r"^AAAAC3NzaC1lZDI1NTE5AAAAI[A-P][A-Za-z0-9+/]{42}$")]
"""One spelling alone: machines are told from one another by it."""
Label = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]


class BadPeer(Exception):
    """The other side does not speak this protocol."""


class WrongCode(BadPeer):
    """The other side does not know the code, or does not speak this protocol."""


class Introduction(BaseModel):
    """What a machine says of itself. Everything but the key is for display only."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Annotated[int, Field(ge=1, le=VERSION)] = VERSION
    name: Label
    key: _Key
    """Its Ed25519 key in SSH's wire format, base64: a helper's host key, or the key by which a pool logs in."""
    user: _Text = ""
    system: _Text = ""
    devices: _Text = ""
    memory: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    """Bytes."""
    addresses: Annotated[tuple[_Text, ...], Field(max_length=16)] = ()
    """Addresses of the pool's door, as the pool sees them."""
    lend: LendClass = "own"
    """Of a helper: what it lets the pool run."""
    limits: _Text = ""
    """Of a helper: when and how much, in words."""


class _Side(Protocol):
    def start(self) -> bytes: ...

    def finish(self, message: bytes) -> bytes: ...


class Pairing:
    """One side of a pairing: pure, without a network. :attr:`message` goes to the other side first.

    Args:
        code: what both sides know.
        is_helper: whether this side joins.

    Raises:
        BadInput: the library is missing.
    """

    def __init__(self, code: Code, is_helper: bool) -> None:
        try:
            from spake2 import SPAKE2_A, SPAKE2_B  # only who pairs needs it
        except ModuleNotFoundError:
            raise BadInput("the package spake2 is missing here", f"install it: {package_line('spake2')}") from None
        kind = SPAKE2_A if is_helper else SPAKE2_B
        self._exchange: _Side = kind(code.password, idA=_HELPER, idB=_POOL)
        self._is_helper = is_helper
        self.message: bytes = self._exchange.start()
        self._sending = self._receiving = ChaCha20Poly1305(bytes(32))
        self._sent = self._received = 0
        self._identifier = b""
        """Of this exchange: only the two sides know it."""

    def finish(self, message: bytes) -> None:
        """Take the other side's message.

        Raises:
            WrongCode: it is none.
        """
        from spake2 import SPAKEError

        try:
            secret = self._exchange.finish(message)
        except (SPAKEError, ValueError, AssertionError, IndexError) as error:
            raise WrongCode from error
        both = (self.message, message) if self._is_helper else (message, self.message)
        keys = HKDF(SHA256(), 96, salt=None, info=b"muster pairing 1" + b"".join(both)).derive(secret)
        ciphers = ChaCha20Poly1305(keys[:32]), ChaCha20Poly1305(keys[32:64])
        self._sending, self._receiving = ciphers if self._is_helper else ciphers[::-1]
        self._identifier = keys[64:]

    def seal(self, document: dict[str, Any]) -> bytes:
        """Return a document encrypted for the other side."""
        nonce, self._sent = self._sent.to_bytes(12, "big"), self._sent + 1
        return self._sending.encrypt(nonce, json.dumps(document).encode(), None)

    def open(self, frame: bytes) -> dict[str, Any]:
        """Return the other side's next document.

        Raises:
            WrongCode: it was not sealed with this key, or is no document.
        """
        nonce, self._received = self._received.to_bytes(12, "big"), self._received + 1
        with contextlib.suppress(InvalidTag, ValueError, RecursionError):
            document = json.loads(self._receiving.decrypt(nonce, frame, None))
            if isinstance(document, dict):
                return document
        raise WrongCode

    def seal_introduction(self, introduction: Introduction, identity: JoiningKey) -> bytes:
        """Return an introduction encrypted for the other side, with the proof that its key is held here.

        Args:
            identity: the key that it names.
        """
        proof = identity.sign(self._signed_by(self._is_helper))
        return self.seal({**introduction.model_dump(), "proof": proof})

    def open_introduction(self, frame: bytes) -> Introduction:
        """Return the other side's introduction.

        Raises:
            WrongCode: it was not sealed with this key, or names a key that the other side does not hold.
        """
        document = self.open(frame)
        try:
            introduction = Introduction.model_validate(document)
        except ValidationError as error:
            raise WrongCode from error
        if not is_signed(introduction.key, self._signed_by(not self._is_helper), document.get("proof")):
            raise WrongCode
        return introduction

    def _signed_by(self, is_helper: bool) -> bytes:
        """Return what a side signs: good for this exchange and this side alone."""
        return b"muster pair 1 " + (b"helper " if is_helper else b"pool ") + self._identifier.hex().encode()
