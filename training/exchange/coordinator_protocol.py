"""What members and the coordinator tell one another: small JSON documents, one a line, over TLS.

Both sides say what *is*, not what happened: a member its :class:`Report`, the coordinator the :class:`GroupStatus`
of the group, at every change and once a second. Whoever missed a line has all of it with the next one.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from training.bounded import first_problem
from training.events import MOST_WAYS, PeerPath

PROTOCOL_VERSION = 6
MAX_LINE = 64 << 10
MAX_RANKS = 4096
MOST_BEGUN = 8
"""Operations of which a report tells what they are."""
MOST_WORDS = 200
"""Letters that say what an operation is."""
MAX_STATUS = 4 << 20
BEAT = 1.0
"""Seconds after which either side says again what is."""
LEASE = 5.0
"""Seconds of silence after which a member, or the coordinator, is lost."""

Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
LAST_EPOCH = 1 << 40
Text = Annotated[str, Field(max_length=300)]
Begun = tuple[Count, tuple[Rank, ...], Annotated[str, Field(max_length=MOST_WORDS)]]
"""Number and group of an operation, empty: of all, and what it is in words that are the same on all members."""
Reason = Annotated[str, BeforeValidator(lambda text: text[:300] if isinstance(text, str) else text)]
"""What it quotes may be as long as a text already."""


class ProtocolError(Exception):
    """A message that is not allowed here; the text says why, in one line."""


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
    """Of the process: one that was started again has another."""
    port: int = Field(ge=0, lt=65536)
    """On which it listens for the other members."""
    hosts: tuple[Text, ...] = Field((), max_length=16)
    """Literal addresses at which it can be dialled, the fastest way first."""


class Report(_Message):
    """What a member is at."""

    epoch: Count = 0
    """The newest that it has heard of, and takes part in or has given up; 0: none yet."""
    mesh: Count = 0
    """Of the newest mesh that it was a member of; 0: none yet."""
    members: tuple[Rank, ...] = Field((), max_length=MAX_RANKS)
    """Of that mesh."""
    up: bool = False
    """Whether the mesh of ``epoch`` stands. If not, nothing more comes of it: ``full`` stays."""
    lost: Rank | None = None
    """Whose connection failed."""
    why: Text = ""
    hung_up: bool = False
    """The connection ended, and nothing says whose fault that is."""
    started: Count = 0
    """Operations that were started."""
    full: Count = 0
    """Of which as many, counted from the first, have their result."""
    kept: Count = 0
    """Results after this one are kept for those who do not have them yet."""
    aside: Count = 0
    """Of the full ones the last so many were those of a group of members, which others may not have begun."""
    begun: tuple[Begun, ...] = Field((), max_length=MOST_BEGUN)
    """The first operations that were started and that somebody has no result of."""
    moved: Count = 0
    """Bytes to and from other members so far."""
    ways: tuple[PeerPath, ...] = Field((), max_length=MOST_WAYS)
    """How what it sends to the other members of that mesh goes, as soon as they have met."""
    elements: int = Field(-1, ge=-1, lt=1 << 53)
    """Of the longest vector of its model; -1 while that is being built."""
    ready: bool = False
    """A newcomer: the joining state may come."""
    taken: Count = 0
    """A newcomer: it has the joining state with this number."""
    leaving: bool = False
    """It has done its work, and goes as soon as everybody has the results that it has."""
    halt: int = Field(-1, ge=-1, lt=1 << 53)
    """It is to stop: the first step after which it can; -1: it is not. It waits there until all can stop together."""
    leaves: bool = False
    """A good-bye."""

    @property
    def is_going(self) -> bool:
        """Whether it waits for a word to go."""
        return self.leaving or self.halt >= 0


class Peer(_Message):
    """Where another member is."""

    name: Text
    addresses: tuple[tuple[Text, int], ...] = ()


class MeshStart(_Message):
    """How a mesh begins."""

    peers: dict[Rank, Peer]
    """All its members."""
    stand: Count
    """Operations up to this one stand; those after it are done again."""
    donor: Rank
    """Who hands results over."""
    behind: dict[Rank, Count] = {}
    """Members that miss results, with the last that they have."""
    away: bool = False
    """There are others with the state that may be let in again, and then miss results."""


class HeldResults(_Message):
    """Which results a member holds, told to the others when a mesh is formed."""

    full: Count
    kept: Count
    results: tuple[tuple[Count, tuple[Rank, ...], tuple[Rank, ...]], ...]
    """Number, group and members of the results that it holds."""


class StateOrder(_Message):
    """Which member hands the training state to which newcomers."""

    number: Count
    donor: Rank
    peers: dict[Rank, Peer]
    """The donor and the newcomers."""


class GroupStatus(_Message):
    """The group as one member is to see it."""

    epoch: Count = 0
    form: MeshStart | None = None
    """How the mesh of ``epoch`` begins; ``None``: that mesh is given up, and the next one awaits all reports."""
    started: bool = False
    newcomer: bool = False
    """This member waits to be let in."""
    members: tuple[Rank, ...] = ()
    missing: tuple[Text, ...] = ()
    """Before the start: who has not come yet, in words."""
    settled: Count = 0
    """Everybody has the results up to this one."""
    closed: Count = 0
    """So far nobody lacks the result of an operation that it has started."""
    joining: StateOrder | None = None
    halting: bool = False
    """Whoever started the group is gone, and a member is to stop: all do, and say after which step they can."""
    halt: int = Field(-1, ge=-1, lt=1 << 53)
    """All have said it, and stop after this one."""
    relay: int = Field(0, ge=0, lt=65536)
    """Port of the relay on the coordinator's machine; 0: there is none."""
    failed: Reason = ""
    """The member is no part of the group any more, and why."""
    again: bool = False
    """It may come back as a newcomer."""


def line(message: Hello | Report | GroupStatus | HeldResults) -> bytes:
    """Return a message as one line of JSON."""
    return message.model_dump_json(exclude_defaults=True).encode() + b"\n"


def parse(kind: type[M], data: bytes) -> M:
    """Read a message of one kind.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ProtocolError(f"not a message of this protocol: {first_problem(error)}") from error
