"""Messages between members and the coordinator: small JSON documents, one a line, over TLS.

Both sides send their state, not changes to it: a member its :class:`Report`, the coordinator the :class:`GroupStatus`,
at every change and once a second. So a missed line does no harm: the next one has everything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from training.records.bounded_fields import first_problem
from training.records.events import MOST_WAYS, PeerPath

PROTOCOL_VERSION = 11
MAX_LINE = 64 << 10
MAX_RANKS = 4096
MAX_BEGUN = 8
"""Operations that a report describes."""
MAX_DESCRIPTION = 200
"""Characters that describe an operation."""
MAX_STATUS = 4 << 20
MAX_UNCOMMITTED = 64
"""Configurations one after the other of which none is known to be committed."""
BEAT = 1.0
"""Seconds after which either side repeats its state."""
LEASE = 5.0
"""Seconds of silence after which a member, or the coordinator, is lost."""

Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[tuple[Rank, ...], Field(max_length=MAX_RANKS)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
LAST_EPOCH = 1 << 40
COUNT_BITS, RANK_BITS = 16, 12
"""Of an epoch: the last ones count the meshes of a coordinator's term; of a term, the last ones are the rank of the
member on whose machine that coordinator is."""
Text = Annotated[str, Field(max_length=300)]
Begun = tuple[Count, tuple[Rank, ...], Annotated[str, Field(max_length=MAX_DESCRIPTION)]]
"""Number and group of an operation (empty: all members), and a description that is the same on all members."""
Reason = Annotated[str, BeforeValidator(lambda text: text[:300] if isinstance(text, str) else text)]
"""Truncated, because what it quotes may already be as long as a text."""


class ProtocolError(Exception):
    """A message that is not allowed; the text says why, in one line."""


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


M = TypeVar("M", bound=_Message)


class Hello(_Message):
    """The first line of a member."""

    version: int
    run_id: Text
    rank: Rank
    world_size: Count
    name: Text
    incarnation: Text
    """Of the process: a restarted one has another."""
    port: int = Field(ge=0, lt=65536)
    """Port on which it listens for the other members."""
    hosts: tuple[Text, ...] = Field((), max_length=16)
    """Literal addresses at which it can be dialled, the fastest route first."""


class Configuration(_Message):
    """The members of a mesh, among whom a majority decides who goes on (:mod:`training.exchange.group.quorum`)."""

    epoch: Count
    members: tuple[Rank, ...] = Field(max_length=MAX_RANKS)

    @classmethod
    def of(cls, epoch: int, ranks: Iterable[int]) -> Configuration:
        """Return that of the mesh of an epoch, among ``ranks``."""
        return cls(epoch=epoch, members=tuple(sorted(ranks)))


Configurations = Annotated[tuple[Configuration, ...], Field(max_length=MAX_UNCOMMITTED)]


class Report(_Message):
    """A member's state."""

    epoch: Count = 0
    """The newest epoch it has heard of, and takes part in or has given up; 0: none yet."""
    mesh: Count = 0
    """The newest mesh it was a member of; 0: none yet."""
    members: tuple[Rank, ...] = Field((), max_length=MAX_RANKS)
    """Members of that mesh."""
    earlier: Configurations = ()
    """Configurations that counted when that mesh was formed, later than the committed one."""
    committed: Configuration | None = None
    """The newest configuration of which it knows that it is committed."""
    up: bool = False
    """Whether the mesh of ``epoch`` stands. If not, it yields no more results: ``full`` is final."""
    lost: Rank | None = None
    """Rank of the member whose connection failed."""
    why: Text = ""
    hung_up: bool = False
    """The connection ended without anything to show which side caused it."""
    started: Count = 0
    """Number of operations started."""
    full: Count = 0
    """Number of operations, counted from the first, that have their result."""
    dropped: Count = 0
    """Results up to this operation are dropped; later ones are held for members that miss them."""
    aside: Count = 0
    """The last so many of the full ones belonged to a group of members; others may not have started them."""
    begun: tuple[Begun, ...] = Field((), max_length=MAX_BEGUN)
    """The first operations that were started and of which some member may lack the result."""
    moved: Count = 0
    """Bytes sent to and received from other members so far."""
    routes: tuple[PeerPath, ...] = Field((), max_length=MOST_WAYS)
    """Routes to the other members of that mesh, once they are connected."""
    elements: int = Field(-1, ge=-1, lt=1 << 53)
    """Length of the longest vector of its model; -1 while the model is being built."""
    ready: bool = False
    """A newcomer: it can receive the joining state."""
    taken: Count = 0
    """A newcomer: it has received the joining state with this number."""
    leaving: bool = False
    """It has finished, and leaves as soon as all members have the results that it has."""
    halt: int = Field(-1, ge=-1, lt=1 << 53)
    """It is to stop: the first step after which it can; -1: it is not. It waits there until all can stop together."""
    heard: Count = 0
    """``sent`` of the newest status on this connection; 0: there was none yet."""
    leaves: bool = False
    """Its last report: it leaves."""
    barred: Ranks = ()
    """Who was dropped for good, according to its coordinator."""

    @property
    def is_going(self) -> bool:
        """Whether it waits for permission to leave."""
        return self.leaving or self.halt >= 0


class Peer(_Message):
    """Name and addresses of another member."""

    name: Text
    addresses: tuple[tuple[Text, int], ...] = ()


class MeshStart(_Message):
    """How a mesh begins."""

    peers: dict[Rank, Peer]
    """All its members."""
    stand: Count
    """Operations up to this one stand; later ones are repeated."""
    donor: Rank
    """The member that hands over results."""
    behind: dict[Rank, Count] = {}
    """Members that lack results, with the last one they have."""
    earlier: Configurations = ()
    """The configurations whose votes it has."""
    away: bool = False
    """Other members with the state may return later, and then lack results."""


class HeldResults(_Message):
    """The results that a member holds, exchanged when a mesh is formed."""

    full: Count
    dropped: Count
    results: tuple[tuple[Count, tuple[Rank, ...], tuple[Rank, ...]], ...]
    """Number, group and members of each result."""


class Standing(_Message):
    """What a member tells another one that has lost the coordinator."""

    report: Report = Report()
    term: Count = 0
    """Of the coordinator that it follows, or has followed last; 0: the one that the run was started with."""
    carrier: int = Field(-1, ge=-1, lt=MAX_RANKS)
    """The member on whose machine that coordinator is; -1: it is not on one's own account."""
    port: int = Field(0, ge=0, lt=65536)
    """Port on which that coordinator listens there."""
    lost: bool = False
    """It has no coordinator under which its group can go on."""
    able: bool = False
    """A coordinator can be started on its machine."""


class StateOrder(_Message):
    """Which member hands the joining state to which newcomers."""

    number: Count
    donor: Rank
    peers: dict[Rank, Peer]
    """The donor and the newcomers."""


class GroupStatus(_Message):
    """The group from one member's point of view."""

    sent: Count = 0
    """When it was sent: milliseconds of the coordinator's clock, which begins at 1."""
    epoch: Count = 0
    form: MeshStart | None = None
    """How the mesh of ``epoch`` begins; ``None``: that mesh is given up, and the next one awaits all reports."""
    started: bool = False
    newcomer: bool = False
    """This member waits to join."""
    members: tuple[Rank, ...] = ()
    missing: tuple[Text, ...] = ()
    """Before the start: the members that have not connected yet, in words."""
    settled: Count = 0
    """All members have the results up to this one."""
    closed: Count = 0
    """Up to this operation no member lacks the result of one that it has started."""
    joining: StateOrder | None = None
    halting: bool = False
    """The supervisor is gone, and a member is to stop: all members are, and report after which step they can."""
    halt: int = Field(-1, ge=-1, lt=1 << 53)
    """All members have reported it, and stop after this step."""
    committed: Configuration | None = None
    """The newest configuration that counts."""
    barred: Ranks = ()
    """Who was dropped for good, and is refused."""
    held: bool = False
    """Too few members are here to go on as the run: all wait for others."""
    relay: int = Field(0, ge=0, lt=65536)
    """Port of the relay on the coordinator's machine; 0: there is none."""
    failed: Reason = ""
    """Why this member is no longer part of the group."""
    may_return: bool = False
    """It may return as a newcomer."""


def newest_of(*configurations: Configuration | None) -> Configuration | None:
    """Return the newest one of these configurations."""
    return max(
        (c for c in configurations if c is not None), key=lambda configuration: configuration.epoch, default=None
    )


def encode_line(message: Hello | Report | GroupStatus | HeldResults | Standing) -> bytes:
    """Return a message as one line of JSON."""
    return message.model_dump_json(exclude_defaults=True).encode() + b"\n"


def parse(kind: type[M], data: bytes) -> M:
    """Parse a message of one kind.

    Raises:
        ProtocolError: it is invalid.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"not a message of this protocol: {first_problem(error)}") from error
