"""Measured machines and the links between them as documents, and the cache of earlier measurements on disk.

Measuring writes them, planning reads them. Rates are Mbit/s of TCP payload in one direction, as a test over the link
measures them (not the line rate), sizes are bytes, times are seconds unless the name says otherwise.
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
from training.records.bounded_fields import first_problem
from training.records.run_files import explain_errors, write_atomically

if TYPE_CHECKING:
    from typing_extensions import Self

LARGEST_FILE = 16_000_000
"""Largest size of a document that is read, in bytes."""

_PRINTABLE = r"[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e]"
Name = Annotated[str, StringConstraints(pattern=rf"^{_PRINTABLE}+$", max_length=100)]
Text = Annotated[str, StringConstraints(pattern=rf"^{_PRINTABLE}*$", max_length=4096)]
Mbit = Annotated[float, Field(ge=0, le=1e6)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]


class Document(BaseModel):
    """Base class of documents: frozen, without unknown fields, with finite numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DocumentFile(Document):
    """A document in a JSON file of its own."""

    when_missing: ClassVar[str]
    when_broken: ClassVar[str]
    """Hints of the errors for a file that does not exist, or that is not such a document."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a document from its file.

        Raises:
            BadInput: the file is missing, unreadable, too large, not JSON, or holds an invalid value; names which.
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
        """Write the document atomically.

        Raises:
            BadInput: it cannot be written.
        """
        with explain_errors(path, "--out"):
            write_atomically(path, self.model_dump_json(indent=2).encode())


class Measurement(Document):
    """One short run of the task on one machine, after its warm-up, without exchanges."""

    batch: Annotated[int, Field(ge=1, le=1_000_000)]
    seconds: Annotated[float, Field(gt=0, le=1e6)]
    """Mean time of an optimizer step of one micro-batch."""
    spread: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard deviation of single steps, in seconds; 0: unknown."""
    error: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Standard error of ``seconds``; 0: unknown."""
    peak: Bytes = 0
    """Peak memory of the training device; 0: unknown."""
    others: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the machine's processors that other programs used at the same time."""


class ClusterMachine(Document):
    """One possible member: a machine, or one device of it. Entries with the same identity share a machine."""

    name: Name
    """Name of the member."""
    machine: Text = ""
    """Name of its machine in the hosts file; empty: the same."""
    identity: Text = ""
    """Fingerprint of the SSH host key; empty: the machine is identified by its name."""
    system: Literal["linux", "darwin", "windows"] = "linux"
    device: Literal["cpu", "cuda", "mps"] = "cpu"
    trains: bool = True
    """``False``: it may run the coordinator, but is not a member."""
    measurements: Annotated[tuple[Measurement, ...], Field(max_length=64)] = ()
    """Measurements of the job's task; empty: it did not run there. Two batch sizes separate overhead from speed."""
    estimated: bool = False
    """Whether its measurements are those of another machine, because its own were skipped."""
    blocks: Annotated[tuple[Annotated[float, Field(ge=0, le=1e6)], ...], Field(max_length=10_000)] = ()
    """Seconds in which it computes forward and backward of one sample in each block of the model; empty: the blocks
    were not measured one by one."""
    evaluation: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Seconds in which it evaluates one sample; 0: not measured."""
    memory_total: Bytes = 0
    memory_free: Bytes = 0
    """Device memory that training may use; 0: unknown."""
    bf16: bool = False
    """Whether ``mixed_precision = auto`` is bf16 on its GPU."""
    interface_mbit: Mbit = 0.0
    """Rate of its network interface in each direction, all peers together; 0: that of its fastest link."""
    cores: Annotated[float, Field(ge=0, le=100_000)] = 0.0
    """Processor cores available to the run, possibly fractional; 0: unknown."""
    wifi: bool = False
    on_mains: bool = True

    @property
    def machine_name(self) -> str:
        return self.machine or self.name

    @property
    def host(self) -> str:
        """Identity of the machine, by which entries that share one are recognised."""
        return f"key {self.identity}" if self.identity else f"name {self.name}"

    @cached_property
    def step_time(self) -> tuple[float, float]:
        """Overhead ``o`` in seconds and speed ``v`` in samples/s of ``t = o + batch / v``, by least squares.

        Without a meaningful fit (one batch size, or noise that makes either negative) the overhead is 0 and the line
        goes through the origin. Speed 0: nothing was measured.
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
        relative_spreads = [m.spread / m.seconds for m in self.measurements if m.spread]
        return sum(relative_spreads) / len(relative_spreads) if relative_spreads else 0.0

    @property
    def others(self) -> float:
        """Largest share of its processors that other programs used during a measurement."""
        return max((m.others for m in self.measurements), default=0.0)

    @cached_property
    def memory_fit(self) -> tuple[float, float] | None:
        """Bytes that do not depend on the batch, and bytes per sample; ``None`` with fewer than two batch sizes."""
        points = sorted((float(m.batch), float(m.peak)) for m in self.measurements if m.peak)
        if len({batch for batch, _ in points}) < 2:
            return None
        fixed, per_sample = _line(points)
        return max(0.0, fixed), max(0.0, per_sample)

    def with_measurements(self, measurements: tuple[Measurement, ...]) -> ClusterMachine:
        """Return the machine with other measurements; ``model_copy`` would keep cached properties of the old ones."""
        fields = {name: getattr(self, name) for name in ClusterMachine.model_fields}
        return ClusterMachine(**fields | {"measurements": measurements})

    def memory_per_sample(self, fixed: float) -> float | None:
        """Return the bytes per sample of the micro-batch; with one batch size, from the bytes above ``fixed``."""
        if self.memory_fit is not None:
            return self.memory_fit[1]
        with_peak = [m for m in self.measurements if m.peak]
        return max(0.0, max((m.peak - fixed) / m.batch for m in with_peak)) if with_peak else None


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
    """Shared radio channel that the path crosses (BSSID or network name); empty: none."""

    @property
    def usable(self) -> bool:
        """Whether data passes in both directions."""
        return self.mbit > 0 and self.mbit_back > 0

    def reversed(self) -> Link:
        """Return the link as seen from its other end."""
        swapped = {"source": self.target, "target": self.source, "mbit": self.mbit_back, "mbit_back": self.mbit}
        return self.model_copy(update=swapped)


class Cluster(Document):
    """All measured machines, and the links between them."""

    machines: Annotated[tuple[ClusterMachine, ...], Field(min_length=1, max_length=64)]
    links: Annotated[tuple[Link, ...], Field(max_length=2016)] = ()
    here: Text = ""
    """Name of the machine that starts the run; it is preferred for the coordinator."""

    @model_validator(mode="after")
    def _check_names(self) -> Cluster:
        names = [machine.name for machine in self.machines]
        if len(set(names)) != len(names):
            raise ValueError("two machines have the same name")
        known_names = set(names)
        if self.here and self.here not in known_names:
            raise ValueError(f"here: there is no machine '{self.here}'")
        pairs = set()
        for link in self.links:
            for end in (link.source, link.target):
                if end not in known_names:
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
        """Links by the hosts of source and target, in both directions; of several between two hosts the fastest."""
        oriented_links: dict[tuple[str, str], Link] = {}
        for link in sorted(self.links, key=lambda link: (link.mbit + link.mbit_back, link.source, link.target)):
            ends = (self.machine(link.source).host, self.machine(link.target).host)
            if ends[0] != ends[1]:
                oriented_links[ends], oriented_links[ends[::-1]] = link, link.reversed()
        return oriented_links

    @cached_property
    def _interfaces(self) -> dict[str, float]:
        """Rate of the interface of each host: the stated one, or that of its fastest link if this is higher."""
        rates = dict.fromkeys((machine.host for machine in self.machines), 0.0)
        for machine in self.machines:
            rates[machine.host] = max(rates[machine.host], machine.interface_mbit)
        for (source, _), link in self._by_hosts.items():
            if link.usable:
                rates[source] = max(rates[source], link.mbit, link.mbit_back)
        return rates

    def machine(self, name: str) -> ClusterMachine:
        """Return the machine of this name.

        Raises:
            BadInput: no measured machine has it.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise BadInput(
                f"no machine '{name}' among the measured ones", "known: " + ", ".join(self._by_name)
            ) from None

    def link(self, source: str, target: str) -> Link | None:
        """Return the link from one machine to another; ``None`` if it is not usable or was not measured."""
        link = self._by_hosts.get((self.machine(source).host, self.machine(target).host))
        return link if link is not None and link.usable else None

    def on_one_machine(self, names: Iterable[str]) -> bool:
        """Whether all these entries are on one machine."""
        return len({self.machine(name).host for name in names}) < 2

    def reaches(self, source: str, target: str) -> bool:
        """Whether two entries are on one machine or have a usable link."""
        return self.on_one_machine((source, target)) or self.link(source, target) is not None

    def coordinator(self, candidates: Collection[str] | None = None) -> str:
        """Return the best machine for the coordinator: reached by most others, starting the run, wired, on mains power,
        in this order.

        Args:
            candidates: names of the machines that may run it; ``None``: all.
        """

        def order(machine: ClusterMachine) -> tuple[object, ...]:
            reachable = sum(self.reaches(machine.name, peer.name) for peer in self.machines)
            return -reachable, machine.name != self.here, machine.wifi, not machine.on_mains, machine.name

        eligible = [machine for machine in self.machines if candidates is None or machine.name in candidates]
        return min(eligible, key=order).name if eligible else ""

    def interface(self, name: str) -> float:
        """Return the rate of a machine's network interface in each direction, in Mbit/s; 0 without any link."""
        return self._interfaces[self.machine(name).host]

    def air_mbit(self, air: str) -> float:
        """Return the total rate of a radio channel in Mbit/s, from the best link over it.

        A byte between two stations crosses the channel twice, so the link's rate is half of the channel's.
        """
        air_links = [link for link in self.links if link.air == air]
        return max((max(link.mbit, link.mbit_back) * self.crossings(link) for link in air_links), default=0.0)

    def can_be_bottleneck(self, link: Link) -> bool:
        """Whether a link can be slower than the interfaces at its ends."""
        return True

    def crossings(self, link: Link) -> int:
        """Return how often a byte on this link crosses its radio channel: once for each wireless end."""
        if not link.air:
            return 0
        return max(1, self.machine(link.source).wifi + self.machine(link.target).wifi)

    def subset(self, names: tuple[str, ...]) -> Cluster:
        """Return the cluster of these machines and the links between them.

        Raises:
            BadInput: none of them was measured.
        """
        machines = tuple(machine for machine in self.machines if machine.name in names)
        if not machines:
            raise BadInput("none of these machines was measured", "known: " + ", ".join(self._by_name))
        subset_names = {machine.name for machine in machines}
        links = tuple(link for link in self.links if {link.source, link.target} <= subset_names)
        return Cluster(machines=machines, links=links, here=self.here if self.here in subset_names else "")


_LARGEST = 1_000_000
D = TypeVar("D", bound=BaseModel)


class MeasurementCache:
    """Cache of documents by the values that they depend on, with their age.

    Args:
        folder: ``None``: the user's cache folder of this operating system.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or Path(platformdirs.user_cache_dir("muster", appauthor=False)) / "measurements"

    def get(self, kind: type[D], key: dict[str, Any], max_age: float = float("inf")) -> D | None:
        """Return a document not older than ``max_age`` seconds; ``None`` if there is none that can be read."""
        path = self._path(kind, key)
        try:
            if path.stat().st_size > _LARGEST:
                return None
            entry = json.loads(path.read_bytes())
            age = time.time() - float(entry["measured_at"])
            return kind.model_validate_json(json.dumps(entry["document"])) if 0 <= age <= max_age else None
        except (OSError, ValueError, KeyError, TypeError, ValidationError, RecursionError):
            return None  # a damaged file is as good as none: it is measured again

    def put(self, key: dict[str, Any], document: BaseModel) -> None:
        """Store a document atomically.

        Raises:
            BadInput: the folder cannot be written.
        """
        path = self._path(type(document), key)
        entry = {"measured_at": time.time(), "document": document.model_dump(mode="json")}
        with explain_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, json.dumps(entry).encode())

    def _path(self, kind: type[BaseModel], key: dict[str, Any]) -> Path:
        identity = json.dumps([kind.__name__, key], sort_keys=True)
        return self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"
