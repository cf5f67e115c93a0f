"""The links between machines, measured: every pair once, in rounds in which no machine takes part twice."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from distributed.machine.link import Link as Connected
from distributed.machine.link import packed
from distributed.measuring.link_probe import TOKEN
from distributed.planning.cluster import Document, Link, Mbit, Name, Text
from distributed.ssh.errors import SshError
from distributed.ssh.process import Process
from profiles.errors import MusterError

PATIENCE = 25.0
"""Seconds for one pair; a link of 1 Mbit/s takes 4."""
_SHORT_PATIENCE = 10.0
_MODULES = ("distributed.system", "distributed.measuring.link_transfer", "distributed.measuring.link_probe")
_THUNDERBOLT = ("thunderbolt", "bridge0")
"""As Linux and macOS call it."""
_BUSY_SHARE, _BUSY_MBIT = 0.05, 1.0

Milliseconds = Annotated[float, Field(ge=0, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = tuple[str, str]


class Figures(Document):
    """What a probe says of one pair; it comes from another machine, so that every field has bounds."""

    mbit: Mbit
    mbit_back: Mbit
    rtt_ms: Milliseconds
    jitter_ms: Milliseconds
    loss: Share
    """Bytes that TCP had to send again, as a share; 0 where the system does not tell."""
    loss_back: Share
    interface: Text
    interface_back: Text
    wireless: bool
    wireless_back: bool
    other_mbit: Mbit
    """Traffic of others on the interfaces meanwhile."""
    address: Text
    paths: Annotated[tuple[tuple[Text, Text, Text, Mbit], ...], Field(max_length=8)]
    """Every way that was found: address, interface here, interface there, Mbit/s."""


class PairFigures(Document):
    """One pair of machines: figures, or why there are none."""

    source: Name
    target: Name
    figures: Figures | None = None
    problem: Text = ""

    def interface_of(self, name: str) -> str:
        """Return the network interface of one of the two on their best way."""
        if self.figures is None:
            return ""
        return self.figures.interface if name == self.source else self.figures.interface_back

    def other_end(self, name: str) -> str:
        """Return the name of the other machine."""
        return self.target if name == self.source else self.source

    @property
    def busy(self) -> bool:
        """Whether others used the link so much that the figures are too low."""
        found = self.figures
        return found is not None and found.other_mbit > max(_BUSY_MBIT, _BUSY_SHARE * min(found.mbit, found.mbit_back))

    @property
    def link(self) -> Link:
        """The link as the planner takes it; 0 Mbit/s where nothing passed."""
        found = self.figures
        if found is None:
            return Link(source=self.source, target=self.target, mbit=0, mbit_back=0)
        wireless = found.wireless or found.wireless_back
        return Link(
            source=self.source,
            target=self.target,
            mbit=found.mbit,
            mbit_back=found.mbit_back,
            rtt_ms=found.rtt_ms,
            jitter_ms=found.jitter_ms,
            medium="wifi" if wireless else _medium(found.interface, found.interface_back),
            air="wifi" if wireless else "",
        )


def _medium(*interfaces: str) -> Literal["loopback", "thunderbolt", "ethernet", "unknown"]:
    if not all(interfaces):
        return "unknown"
    if all(name in ("lo", "lo0") for name in interfaces):
        return "loopback"
    return "thunderbolt" if all(name.startswith(_THUNDERBOLT) for name in interfaces) else "ethernet"


def rounds(names: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of disjoint pairs in which every pair meets once: the circle method of round-robin tournaments.

    ``n`` names take ``n - 1`` rounds, ``n`` where that is odd.
    """
    ring: list[str | None] = list(names)
    if len(ring) % 2:
        ring.append(None)
    found = []
    for _ in range(len(ring) - 1):
        pairs = zip(ring[: len(ring) // 2], reversed(ring[len(ring) // 2 :]), strict=True)
        found.append([(one, other) for one, other in pairs if one is not None and other is not None])
        ring[1:] = [ring[-1], *ring[1:-1]]
    return found


class Probe:
    """The link probe on one machine, as a context manager."""

    def __init__(self, link: Connected) -> None:
        self.name = link.name
        self._link = link
        self._process: Process | None = None
        self.addresses: list[str] = []
        self.cards: dict[str, float] = {}
        """Line rates of its interfaces in Mbit/s, where its system tells them."""

    @property
    def may_carry_hub(self) -> bool:
        """Whether others can dial it."""
        return self._link.machine.here or bool(self._link.host)

    def __enter__(self) -> Probe:
        self._process = self._link.connection().stream(
            [self._link.python, "-c", packed(*_MODULES), "muster-link-probe"]
        )
        try:
            own = self.ask({"op": "addresses"}, _SHORT_PATIENCE)
            listed = [str(address) for name, address in own["addresses"] if _reaches_others(str(name), str(address))]
            self.cards = {str(name): float(rate) for name, rate in dict(own["cards"]).items()}
        except (KeyError, TypeError, ValueError):
            self.__exit__()
            raise SshError(self.name, "its link probe sent something other than addresses") from None
        except BaseException:
            self.__exit__()
            raise
        self.addresses = list(dict.fromkeys([*filter(None, [self._link.host]), *listed]))[:8]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            with contextlib.suppress(MusterError, OSError):
                self._process.end_input()
                self._process.wait(_SHORT_PATIENCE)
            self._process.close()

    def ask(self, order: dict[str, Any], patience: float) -> dict[str, Any]:
        """Give one order and return the answer.

        Raises:
            SshError: the probe ended, is silent, says something else, or could not carry the order out.
        """
        assert self._process is not None
        try:
            self._process.write(json.dumps(order).encode() + b"\n")
            found = json.loads(self._process.read_line(patience))
        except TimeoutError:
            raise SshError(self.name, f"its link probe has been silent for {patience:.0f} s") from None
        except ValueError:
            said = self._process.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise SshError(self.name, f"its link probe ended ({' '.join(said) or 'no word'})") from None
        if not isinstance(found, dict) or "error" in found:
            raise SshError(self.name, str(found.get("error")) if isinstance(found, dict) else "its link probe broke")
        return found


def _reaches_others(interface: str, address: str) -> bool:
    """Link-local IPv6 addresses need a scope that only the other side knows."""
    own = ("127.", "::1", "fe80:", "172.17.")
    return not address.lower().startswith(own) and not interface.startswith(("docker", "br-", "veth", "virbr"))


@contextlib.contextmanager
def probing(links: Sequence[Connected]) -> Iterator[dict[str, Probe]]:
    """Start the link probe on machines; it ends with the context.

    Raises:
        SshError: a machine cannot run it.
    """
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(max(1, len(links))) as pool:
        yield {probe.name: probe for probe in pool.map(stack.enter_context, [Probe(link) for link in links])}


def measure_links(
    probes: Mapping[str, Probe], tell: Callable[[PairFigures], None], known: Collection[frozenset[str]] = ()
) -> list[PairFigures]:
    """Measure every pair of machines in both directions but the known ones; ``tell`` hears of each as it is done."""
    found = []
    with ThreadPoolExecutor(max(1, len(probes))) as pool:
        for pairs in rounds(list(probes)):
            wanted = [pair for pair in pairs if frozenset(pair) not in known]
            for done in pool.map(lambda pair: _measure(probes[pair[0]], probes[pair[1]]), wanted):
                found.append(done)
                tell(done)
    return found


def _measure(source: Probe, target: Probe) -> PairFigures:
    """Measure one pair; a firewall may let only one of the two be called."""
    try:
        return PairFigures(source=source.name, target=target.name, figures=_call(source, target))
    except MusterError as first:
        try:
            return PairFigures(source=target.name, target=source.name, figures=_call(target, source))
        except MusterError:
            problem = "".join(c if c.isprintable() else " " for c in first.message)
            return PairFigures(source=source.name, target=target.name, problem=problem[:300])


def _call(source: Probe, target: Probe) -> Figures:
    with listening(target) as (port, token):
        order = {"op": "measure", "addresses": target.addresses, "port": port, "token": token}
        try:
            return Figures.model_validate(source.ask(order, PATIENCE))
        except ValidationError:
            raise SshError(source.name, f"measured impossible values towards {target.name}") from None


@contextlib.contextmanager
def listening(probe: Probe) -> Iterator[tuple[int, str]]:
    """Have a probe listen; yields its port and token.

    Raises:
        SshError: it cannot.
    """
    token = secrets.token_hex(TOKEN // 2)
    try:
        yield int(probe.ask({"op": "listen", "token": token}, _SHORT_PATIENCE)["port"]), token
    except (KeyError, TypeError, ValueError):
        raise SshError(probe.name, "its link probe sent something other than a port") from None
    finally:
        with contextlib.suppress(MusterError):
            probe.ask({"op": "unlisten"}, _SHORT_PATIENCE)
