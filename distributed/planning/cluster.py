"""What was measured, as data: machines and the links between them; and what was measured before, on disk.

Measuring writes it, planning reads it. Rates are Mbit/s of TCP payload in one direction, as a test over the link sees
them (not the line rate), sizes are bytes, times are seconds unless the name says otherwise.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import platformdirs
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from profiles.errors import BadInput
from training.bounded import first_problem
from training.run_files import explained, write_whole

if TYPE_CHECKING:
    from typing_extensions import Self

LARGEST_FILE = 16_000_000
"""Bytes of a document that is read."""

_SHOWN = r"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e]"
Name = Annotated[str, StringConstraints(pattern=rf"^{_SHOWN}+$", max_length=100)]
Text = Annotated[str, StringConstraints(pattern=rf"^{_SHOWN}*$", max_length=4096)]
Mbit = Annotated[float, Field(ge=0, le=1e6)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]


class Document(BaseModel):
    """Frozen, and no field may be unknown or not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DocumentFile(Document):
    """A document that is a JSON file of its own."""

    when_missing: ClassVar[str]
    when_broken: ClassVar[str]
    """What to do about a file that is not there, or that is something else."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read such a file.

        Raises:
            BadInput: missing, unreadable, too large, not JSON, or a value that cannot be; one line that says which.
        """
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise BadInput(f"{path}: {path.stat().st_size} bytes are too many", cls.when_broken)
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise BadInput(f"{path}: {error.strerror}", cls.when_missing) from error
        except ValidationError as error:
            raise BadInput(f"{path}: {first_problem(error)}", cls.when_broken) from error

    def write(self, path: Path) -> None:
        """Write it, whole or not at all.

        Raises:
            BadInput: it cannot be written.
        """
        with explained(path, "--out"):
            write_whole(path, self.model_dump_json(indent=2).encode())


class Measurement(Document):
    """One short run of the task itself on one machine, after its warm-up, without any exchange."""

    batch: Annotated[int, Field(ge=1, le=1_000_000)]
    seconds: Annotated[float, Field(gt=0, le=1e6)]
    """One optimizer step of one micro-batch, on average."""
    spread: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard deviation of single steps, in seconds; 0: unknown."""
    error: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard error of ``seconds``; 0: unknown."""
    peak: Bytes = 0
    """Memory at its highest, of the device that trains; 0: unknown."""
    others: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the machine's processors that other programs used meanwhile."""


class ClusterMachine(Document):
    """One member to be: a machine, or one device of it. Entries with the same identity share a machine."""

    name: Name
    identity: Text = ""
    """SSH host key (fingerprint); empty: the name tells machines apart."""
    system: Literal["linux", "darwin", "windows"] = "linux"
    device: Literal["cpu", "cuda", "mps"] = "cpu"
    trains: bool = True
    """``False``: may carry the coordinator, but is no member."""
    measurements: Annotated[tuple[Measurement, ...], Field(max_length=64)] = ()
    """Of the job's task; none: it did not run there. Two batch sizes or more tell overhead from speed."""
    memory_total: Bytes = 0
    memory_free: Bytes = 0
    """What training may use of the device's memory; 0: unknown."""
    bf16: bool = False
    """Whether ``mixed_precision = auto`` is bf16 on its GPU."""
    interface_mbit: Mbit = 0.0
    """What its network interface carries in each direction, all peers together; 0: as its fastest link."""
    cores: Annotated[float, Field(ge=0, le=100_000)] = 0.0
    """Processor cores that are free for the run, a part of one too; 0: unknown."""
    wifi: bool = False
    on_mains: bool = True

    @property
    def host(self) -> str:
        """What tells machines apart."""
        return f"key {self.identity}" if self.identity else f"name {self.name}"

    @cached_property
    def step_time(self) -> tuple[float, float]:
        """Overhead ``o`` in seconds and speed ``v`` in samples/s of ``t = o + batch / v``, by least squares.

        Where the fit has no meaning (one batch size, or noise that makes either negative) the overhead is 0 and the
        line goes through the origin. Speed 0: nothing was measured.
        """
        points = sorted((float(m.batch), m.seconds) for m in self.measurements)
        if not points:
            return 0.0, 0.0
        overhead, slope = _line(points)
        if overhead < 0 or slope <= 0:
            slope = sum(b * t for b, t in points) / sum(b * b for b, _ in points)
            overhead = 0.0
        return overhead, 1.0 / slope

    @property
    def overhead(self) -> float:
        """Seconds of a micro-batch that do not depend on its size."""
        return self.step_time[0]

    @property
    def speed(self) -> float:
        """Samples/s beyond the overhead."""
        return self.step_time[1]

    @cached_property
    def spread(self) -> float:
        """Standard deviation of a step over its time; 0: unknown."""
        known = [m.spread / m.seconds for m in self.measurements if m.spread]
        return sum(known) / len(known) if known else 0.0

    @property
    def others(self) -> float:
        """Share of its processors that other programs used while it was measured."""
        return max((m.others for m in self.measurements), default=0.0)

    @cached_property
    def memory_fit(self) -> tuple[float, float] | None:
        """Bytes that do not depend on the batch, and bytes a sample; ``None`` where one batch size or none is known."""
        points = sorted((float(m.batch), float(m.peak)) for m in self.measurements if m.peak)
        if len({batch for batch, _ in points}) < 2:
            return None
        fixed, each = _line(points)
        return max(0.0, fixed), max(0.0, each)

    def measured_as(self, measurements: tuple[Measurement, ...]) -> ClusterMachine:
        """Return the machine with other measurements; a mere copy would keep what was worked out from the old ones."""
        fields = {name: getattr(self, name) for name in ClusterMachine.model_fields}
        return ClusterMachine(**fields | {"measurements": measurements})

    def memory_per_sample(self, fixed: float) -> float | None:
        """Return the bytes of a sample in the micro-batch; where one point is known, what is above ``fixed``."""
        if self.memory_fit is not None:
            return self.memory_fit[1]
        known = [m for m in self.measurements if m.peak]
        return max(0.0, max((m.peak - fixed) / m.batch for m in known)) if known else None


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of the least-squares line; through the origin where all x are equal."""
    xs, ys = zip(*points, strict=True)
    if len(set(xs)) == 1:
        return 0.0, statistics.fmean(ys) / xs[0]
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept, slope


class Link(Document):
    """The best path between two machines."""

    source: Name
    target: Name
    mbit: Mbit
    """From source to target."""
    mbit_back: Mbit
    """From target to source."""
    rtt_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    jitter_ms: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    medium: Literal["ethernet", "wifi", "thunderbolt", "loopback", "unknown"] = "unknown"
    air: Text = ""
    """Which shared radio channel the path crosses (BSSID or network name); empty: none."""

    @property
    def usable(self) -> bool:
        """Whether something passes in both directions."""
        return self.mbit > 0 and self.mbit_back > 0

    def reversed(self) -> Link:
        """Return the same link, seen from the other end."""
        turned = {"source": self.target, "target": self.source, "mbit": self.mbit_back, "mbit_back": self.mbit}
        return self.model_copy(update=turned)


class Cluster(Document):
    """All machines that were measured, and the links between them."""

    machines: Annotated[tuple[ClusterMachine, ...], Field(min_length=1, max_length=64)]
    links: Annotated[tuple[Link, ...], Field(max_length=2016)] = ()
    here: Text = ""
    """Name of the machine that starts the run; between equals the coordinator goes there."""

    @model_validator(mode="after")
    def _fits_together(self) -> Cluster:
        names = [machine.name for machine in self.machines]
        if len(set(names)) != len(names):
            raise ValueError("two machines have the same name")
        known = set(names)
        if self.here and self.here not in known:
            raise ValueError(f"here: there is no machine '{self.here}'")
        pairs = set()
        for link in self.links:
            for end in (link.source, link.target):
                if end not in known:
                    raise ValueError(f"link {link.source} - {link.target}: there is no machine '{end}'")
            pair = frozenset((link.source, link.target))
            if len(pair) < 2 or pair in pairs:
                raise ValueError(f"link {link.source} - {link.target}: between two machines, once a pair")
            pairs.add(pair)
        return self

    @cached_property
    def _by_name(self) -> dict[str, ClusterMachine]:
        return {machine.name: machine for machine in self.machines}

    @cached_property
    def _by_hosts(self) -> dict[tuple[str, str], Link]:
        """Oriented links by the hosts at their ends; of several entries of two hosts the fastest."""
        found: dict[tuple[str, str], Link] = {}
        for link in sorted(self.links, key=lambda link: (link.mbit + link.mbit_back, link.source, link.target)):
            ends = (self.machine(link.source).host, self.machine(link.target).host)
            if ends[0] != ends[1]:
                found[ends], found[ends[::-1]] = link, link.reversed()
        return found

    @cached_property
    def _interfaces(self) -> dict[str, float]:
        """What every host's interface carries: what was stated, or its fastest link."""
        found = dict.fromkeys((machine.host for machine in self.machines), 0.0)
        for machine in self.machines:
            found[machine.host] = max(found[machine.host], machine.interface_mbit)
        for (source, _), link in self._by_hosts.items():
            if link.usable:
                found[source] = max(found[source], link.mbit, link.mbit_back)
        return found

    def machine(self, name: str) -> ClusterMachine:
        """Return the machine of this name.

        Raises:
            BadInput: there is none.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise BadInput(
                f"no machine '{name}' among the measured ones", "known: " + ", ".join(self._by_name)
            ) from None

    def link(self, source: str, target: str) -> Link | None:
        """Return the link from one machine to another; ``None`` where nothing passes or nothing was measured."""
        found = self._by_hosts.get((self.machine(source).host, self.machine(target).host))
        return found if found is not None and found.usable else None

    def on_one_machine(self, names: Iterable[str]) -> bool:
        """Whether all these entries are one machine."""
        return len({self.machine(name).host for name in names}) < 2

    def reaches(self, one: str, other: str) -> bool:
        """Whether something passes between two entries without help."""
        return self.on_one_machine((one, other)) or self.link(one, other) is not None

    def coordinator(self, able: Collection[str] | None = None) -> str:
        """Return the machine for the coordinator: most others reach it, it is where the run is started, wired, and on
        mains, in this order.

        Args:
            able: those that may carry it; ``None``: all.
        """

        def order(machine: ClusterMachine) -> tuple[object, ...]:
            reached = sum(self.reaches(machine.name, other.name) for other in self.machines)
            return -reached, machine.name != self.here, machine.wifi, not machine.on_mains, machine.name

        chosen = [machine for machine in self.machines if able is None or machine.name in able]
        return min(chosen, key=order).name if chosen else ""

    def interface(self, name: str) -> float:
        """Return what a machine's network interface carries in each direction, in Mbit/s; 0 without any link."""
        return self._interfaces[self.machine(name).host]

    def air_mbit(self, air: str) -> float:
        """Return what a radio channel carries in all, in Mbit/s, from the best link over it.

        A byte between two stations crosses the air twice, so that link's rate is half of the channel's.
        """
        over_it = [link for link in self.links if link.air == air]
        return max((max(link.mbit, link.mbit_back) * self.crossings(link) for link in over_it), default=0.0)

    def narrows(self, link: Link) -> bool:
        """Whether a link can be slower than the interfaces at its ends."""
        return True

    def crossings(self, link: Link) -> int:
        """Return how often a byte on this link crosses its air: once for every end that is wireless."""
        if not link.air:
            return 0
        return max(1, self.machine(link.source).wifi + self.machine(link.target).wifi)

    def only(self, names: tuple[str, ...]) -> Cluster:
        """Return the part of the cluster with these machines.

        Raises:
            BadInput: none of them is known.
        """
        kept = tuple(machine for machine in self.machines if machine.name in names)
        if not kept:
            raise BadInput("none of these machines was measured", "known: " + ", ".join(self._by_name))
        known = {machine.name for machine in kept}
        links = tuple(link for link in self.links if link.source in known and link.target in known)
        return Cluster(machines=kept, links=links, here=self.here if self.here in known else "")


_LARGEST = 1_000_000
D = TypeVar("D", bound=BaseModel)


class MeasurementCache:
    """Documents by what they depend on, with their age.

    Args:
        folder: ``None`` for the user's cache folder of this operating system.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "measurements"

    def get(self, kind: type[D], key: dict[str, Any], max_age: float = float("inf")) -> D | None:
        """Return a document not older than ``max_age`` seconds; ``None`` where there is none that can be read."""
        path = self._path(kind, key)
        try:
            if path.stat().st_size > _LARGEST:
                return None
            held = json.loads(path.read_bytes())
            age = time.time() - float(held["measured_at"])
            return kind.model_validate_json(json.dumps(held["document"])) if 0 <= age <= max_age else None
        except (OSError, ValueError, KeyError, TypeError, ValidationError, RecursionError):
            return None  # whatever is wrong with the file: measuring again mends it

    def put(self, key: dict[str, Any], document: BaseModel) -> None:
        """Keep a document, whole or not at all.

        Raises:
            BadInput: the folder cannot be written.
        """
        path = self._path(type(document), key)
        held = {"measured_at": time.time(), "document": document.model_dump(mode="json")}
        with explained(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, json.dumps(held).encode())

    def _path(self, kind: type[BaseModel], key: dict[str, Any]) -> Path:
        words = json.dumps([kind.__name__, key], sort_keys=True)
        return self.folder / f"{hashlib.sha256(words.encode()).hexdigest()[:32]}.json"
