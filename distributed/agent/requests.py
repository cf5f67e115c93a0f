"""What can be asked of a machine: one class a request, used by who asks and by the program on the machine.

Standard library only, Python >= 3.9: it is sent to the machines as part of that program, which
:mod:`distributed.agent.program` runs. A request is one frame on the program's standard input: the number of its bytes
in a line, then ``[CLASS, {FIELD: VALUE}]`` in JSON. The reply is one line with a JSON object, unless the request says
otherwise; where it fails, the last line of the error output says why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # what type checkers alone need is not on the machines
else:

    def dataclass_transform(**_: bool) -> Callable[[type], type]:
        return lambda kind: kind


_LONGEST_COUNT = 12


@dataclass_transform(frozen_default=True)
class MachineRequest:
    """Base class; a subclass is a frozen dataclass."""

    module: ClassVar[str]
    function: ClassVar[str]
    """Called on the machine with Muster's folder there and the request; returns the reply, or ``None`` where it has
    written something else."""

    def __init_subclass__(cls, by: str) -> None:
        module, _, cls.function = by.partition(":")
        cls.module = f"distributed.agent.{module}"
        dataclass(frozen=True)(cls)

    @property
    def title(self) -> list[str]:
        """Words that tell in a list of processes what this is: its name, and the run and the folder that it is for."""
        fields = vars(self)
        return [type(self).__name__.lower(), *(fields[name] for name in ("run", "rank") if name in fields)]


# ----------------------------------------------------------------------------------------------------- before a run


class ProbeMachine(MachineRequest, by="files:probe"):
    """A report on the machine; see :func:`distributed.agent.files.report_on`."""

    modules: Sequence[str]
    """Packages to look for."""
    dial: str = ""
    """``HOST PORT`` that it tries to connect to; the reply's ``dialled`` is the word that it was sent there."""


class ReadHealth(MachineRequest, by="machine_health:facts"):
    """Its hardware and system; needs psutil and filelock there."""


class Listen(MachineRequest, by="machine_health:listen"):
    """``{"port": N}`` at once; takes connections there until its input ends, or for ``seconds``."""

    seconds: float


class Reach(MachineRequest, by="machine_health:reach"):
    """``{"HOST PORT": ""}``, or the reason why it cannot be connected to, for every endpoint."""

    endpoints: Sequence[tuple[str, int]]


class InspectData(MachineRequest, by="data_probe:inspect"):
    """What lies at a path, relative to the home folder: ``path``, ``problem``, ``columns``."""

    path: str


# Requests about links follow one another on the input of one process, which needs psutil. One that fails has the reply
# {"error": ...}.


class ListAddresses(MachineRequest, by="link_probe:converse"):
    """``addresses``: pairs of interface and address; ``cards``: Mbit/s by interface."""


class ListenForPeers(MachineRequest, by="link_probe:converse"):
    """``{"port": N}``, on which peers are served that send the token."""

    token: str


class MeasureLink(MachineRequest, by="link_probe:converse"):
    """The figures of the best path to a peer that listens."""

    addresses: Sequence[str]
    port: int
    token: str


class MeasureTogether(MachineRequest, by="link_probe:converse"):
    """``mbit`` to all ``peers`` at once, and ``mbit_back`` from them."""

    peers: Sequence[Mapping[str, Any]]
    """``addresses``, ``port`` and ``token`` of each, and the ``ends``: the interfaces of the path here and there."""


class StopListening(MachineRequest, by="link_probe:converse"):
    """Ends all listeners; ``{"refused": N}`` connections had no token."""


class FindEnvironment(MachineRequest, by="environment_builder:find"):
    """The ``python`` of the environment of a recipe, empty where there is none, and which wheels fit."""

    recipe: str
    """Its digest."""


class BuildEnvironment(MachineRequest, by="environment_builder:build"):
    """Builds it: lines with the progress, the last one with ``python`` or ``problem``."""

    recipe: str
    requirements: Sequence[str]
    lock: str
    hashed: str
    uv: str
    """Its path there; empty: pip builds it."""
    wheels: str
    """Folder there with the packages; empty: they are downloaded."""


# ------------------------------------------------------------------------------------------------------------ files


class ListMissing(MachineRequest, by="files:missing"):
    """The ``trees`` and ``blobs`` of these that are missing, the bytes of blobs that have ``begun``, and ``root``."""

    trees: Sequence[str]
    blobs: Sequence[str]


class PutFiles(MachineRequest, by="files:put"):
    """Stores blobs, whose gzipped tar follows, and builds trees of them."""

    trees: Mapping[str, Mapping[str, str]]
    """Blob by relative path, for each tree."""
    begun: Mapping[str, int]
    """Bytes of each blob that are there already, and are not sent."""


class GetFiles(MachineRequest, by="files:get"):
    """``{"files": {path: bytes}}`` about a folder of a worker, then these bytes."""

    run: str
    rank: str
    name: str


# ---------------------------------------------------------------------------------------------------------- workers


class Start(MachineRequest, by="daemon:start"):
    """Starts a worker under a daemon; see :mod:`distributed.agent.daemon`."""

    run: str
    rank: str
    argv: Sequence[str]
    """``{folder}`` stands for its folder, ``{python}`` for this Python; in ``env``, too."""
    env: Mapping[str, str]
    files: Mapping[str, str]
    """Content in base64 by relative path."""
    links: Mapping[str, str]
    """Target by relative path."""
    lease: float
    """Seconds without a sign of who started it, after which the worker is stopped."""
    grace: float
    """Seconds that it then has for its snapshot."""
    defaults: Mapping[str, str]
    """Environment variables where none are set."""
    unattended: str = "stop"
    """What becomes of the worker when the lease is over: ``stop``; ``train``: it is told so, and goes on with the other
    members, if it has begun; ``serve``: its input is closed."""


class Attach(MachineRequest, by="daemon:attach"):
    """Carries lines between a daemon and this session until either ends."""

    run: str
    rank: str
    after: int
    """Number of the last record that is known."""
    silence: float
    """Seconds without input after which it ends."""


class ListRemains(MachineRequest, by="files:left"):
    """The ``processes`` of a run and its ``snapshots``; removes keys that no agent is there to remove."""

    run: str


class ListSnapshots(MachineRequest, by="run_folders:held"):
    """The parts of a run's ``snapshots`` that look complete, see :func:`distributed.agent.run_folders.snapshots`."""

    run: str


class RemoveRun(MachineRequest, by="run_folders:remove"):
    """Removes what the workers of a completed run have left there: those of its earlier attempts had other folders."""

    run: str


class Forget(MachineRequest, by="files:forget_worker"):
    """Removes the keys of a worker whose agent and guard were killed before they could."""

    run: str
    rank: str


def frame(request: MachineRequest) -> bytes:
    """Return a request as the program reads it."""
    data = json.dumps([type(request).__name__, vars(request)]).encode()
    return b"%d\n%s" % (len(data), data)


def read_request(read: Callable[[int], bytes]) -> MachineRequest:
    """Read one request, and nothing that follows it.

    Args:
        read: returns at most this many bytes of the input.

    Raises:
        ValueError: something else was sent.
        EOFError: the input ended.
    """
    count = b""
    while not count.endswith(b"\n"):
        byte = read(1)
        if not byte:
            raise EOFError("no request arrived")
        count += byte
        if len(count) > _LONGEST_COUNT:
            raise ValueError("not a request")
    pieces, left = [], int(count)
    while left:
        piece = read(min(left, 1 << 16))
        if not piece:
            raise EOFError("the request was cut short")
        pieces.append(piece)
        left -= len(piece)
    return _parsed(json.loads(b"".join(pieces)))


def _parsed(message: Any) -> MachineRequest:
    kinds = {kind.__name__: kind for kind in MachineRequest.__subclasses__()}
    try:
        name, fields = message
        return kinds[name](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request of this version: {error}") from None
