"""Assembles the records of multicast DNS responders into sightings of machines (RFC 6762, RFC 6763).

Records are kept by sender and interface, so that two machines that claim one name stay separate, and no sender can
withdraw or overwrite the records of another. Memory is bounded: excess announcements are counted, not stored.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from zeroconf import (  # type: ignore[attr-defined]  # documented there, but not listed in its __all__
    DNSAddress,
    DNSIncoming,
    DNSOutgoing,
    DNSPointer,
    DNSQuestion,
    DNSRecord,
    DNSService,
    DNSText,
    Error,
)

from distributed.discovery.network_interfaces import Endpoint, Interfaces, PathKind
from distributed.discovery.sightings import (
    LONGEST_DETAIL,
    MOST_ENDPOINTS,
    MOST_PER_SOURCE,
    Ignored,
    Observation,
    Sighting,
    SightingKey,
    SightingOrigin,
    Withdrawn,
)

SSH, SFTP, MUSTER, DEVICE = "_ssh._tcp", "_sftp-ssh._tcp", "_muster._tcp", "_device-info._tcp"
SERVICES = (SSH, SFTP, MUSTER)
"""Services announced by machines with an SSH server, with its port."""
BROWSED = (*SERVICES, DEVICE)
JOIN = "_muster-join._tcp"
"""Service of computers that share a code now, with the port of their door."""
LONGEST_PACKET = 9000
"""Bytes (RFC 6762, 17)."""
_LONGEST_TXT = 1300
_LIFETIME = 120.0
"""Lifetime of host records in seconds (RFC 6762, 10)."""
_MOST_SPEAKERS = 512
_MOST_QUESTIONS = 24
_SHOWN_DETAILS = ("version", "devices", "memory", "model", "slot")
_PTR, _TXT, _AAAA, _SRV, _A, _QUERY, _MULTICAST_CLASS = 12, 16, 28, 33, 1, 0, 1


def parse_txt(data: bytes) -> dict[str, str]:
    """Parse a TXT record (RFC 6763, 6): the first of equal keys counts; keys that are not displayed are skipped."""
    properties: dict[str, str] = {}
    position, end = 0, min(len(data), _LONGEST_TXT)
    while position < end:
        length = data[position]
        entry = data[position + 1 : position + 1 + length]
        position += 1 + length
        key, _, value = entry.partition(b"=")
        name = key.decode("ascii", "replace").lower()
        if name in _SHOWN_DETAILS and len(entry) == length:
            properties.setdefault(name, value.decode("utf-8", "replace")[:LONGEST_DETAIL])
    return properties


def query_packets(questions: Iterable[tuple[str, int]]) -> list[bytes]:
    """Return the multicast packets with these questions (name, record type)."""
    query = DNSOutgoing(_QUERY)
    for name, kind in questions:
        with contextlib.suppress(Error):  # a name from the network may be too long for a question
            query.add_question(DNSQuestion(name, kind, _MULTICAST_CLASS))
    try:
        return [bytes(packet) for packet in query.packets()]
    except Error:
        return []


@dataclass
class _Instance:
    service: str
    name: str
    full_name: str
    host: str = ""
    port: int = 0
    txt: dict[str, str] = field(default_factory=dict)
    heard: float = 0.0


@dataclass
class _Speaker:
    """The records of one source address on one interface."""

    instances: dict[str, _Instance] = field(default_factory=dict)
    addresses: dict[str, list[str]] = field(default_factory=dict)
    models: dict[str, str] = field(default_factory=dict)


class RecordBook:
    """Stores records from packets, and returns observations.

    Args:
        services: of which instances are kept.
    """

    def __init__(self, services: tuple[str, ...] = BROWSED) -> None:
        self._services = services
        self._speakers: dict[tuple[str, str], _Speaker] = {}

    def hear(self, data: bytes, interfaces: Interfaces, interface: str, source: str, now: float) -> list[Observation]:
        """Process one packet.

        Args:
            interface: interface that received it.
            source: IP address without scope.
            now: seconds of a monotonic clock.
        """
        packet = _parse(data)
        if packet is None:
            return []
        speaker_key = (interface, source)
        speaker = self._speakers.get(speaker_key) or _Speaker()
        records = [record for record in packet if len(record.name) < 256]
        living = [record for record in records if record.ttl > 0]
        ignored_count = len({_note_instance(speaker, record, now, self._services) for record in living} - {""})
        _note_addresses(speaker, [record for record in living if isinstance(record, DNSAddress)])
        withdrawn = list(_withdrawn(speaker, records))
        if speaker.instances:
            if speaker_key not in self._speakers and len(self._speakers) >= _MOST_SPEAKERS:
                return [Ignored(source)]
            self._speakers[speaker_key] = speaker
        else:
            self._speakers.pop(speaker_key, None)
        observations: list[Observation] = [Withdrawn(_key(instance, speaker_key)) for instance in withdrawn]
        aliases = {record.alias.casefold() for record in records if isinstance(record, DNSPointer)}
        mentioned = aliases | {record.name.casefold() for record in records}
        observations += _sightings(speaker, mentioned, interfaces, speaker_key)
        return observations + ([Ignored(source, ignored_count)] if ignored_count else [])

    def expire(self, now: float) -> list[Observation]:
        """Drop instances that were not repeated although asked for: their network or machine is gone."""
        withdrawn: list[Observation] = []
        for speaker_key, speaker in list(self._speakers.items()):
            for key, instance in list(speaker.instances.items()):
                if now - instance.heard > _LIFETIME:
                    del speaker.instances[key]
                    withdrawn.append(Withdrawn(_key(instance, speaker_key)))
            if not speaker.instances:
                del self._speakers[speaker_key]
        return withdrawn

    def questions(self, interface: str) -> list[tuple[str, int]]:
        """Return the questions for missing records of the instances on an interface."""
        missing: dict[tuple[str, int], None] = {}
        for (speaker_interface, _), speaker in self._speakers.items():
            if speaker_interface == interface:
                missing.update(dict.fromkeys(_missing(speaker)))
        return list(missing)[:_MOST_QUESTIONS]


def _parse(data: bytes) -> list[DNSRecord] | None:
    """Return the records of a response; ``None`` for queries and invalid packets."""
    if len(data) > LONGEST_PACKET:
        return None
    try:
        packet = DNSIncoming(data)
        return packet.answers() if packet.valid and packet.is_response() else None
    except (Error, ValueError, IndexError, RecursionError):
        return None


def _key(instance: _Instance, speaker_key: tuple[str, str]) -> SightingKey:
    return SightingKey(SightingOrigin.BONJOUR, instance.service, instance.name.casefold(), *speaker_key)


def _split(full_name: str, services: tuple[str, ...]) -> tuple[str, str]:
    """Split ``My Mac._ssh._tcp.local.`` into instance and service; empty for services that are not browsed."""
    lower = full_name.casefold().rstrip(".")
    for service in services:
        suffix = f".{service}.local"
        if lower.endswith(suffix):
            return full_name.rstrip(".")[: -len(suffix)], service
    return "", ""


def _note_instance(speaker: _Speaker, record: DNSRecord, now: float, services: tuple[str, ...]) -> str:
    """Store what a record says about an instance; return the instance's name if the limit is reached."""
    full_name = record.alias if isinstance(record, DNSPointer) else record.name
    name, service = _split(full_name, services)
    if not name:
        return ""
    if service == DEVICE:
        if isinstance(record, DNSText) and len(speaker.models) < MOST_PER_SOURCE:
            speaker.models[name.casefold()] = parse_txt(record.text).get("model", "")
        return ""
    key = full_name.casefold()
    instance = speaker.instances.get(key)
    if instance is None:
        if len(speaker.instances) >= MOST_PER_SOURCE:
            return key
        instance = speaker.instances[key] = _Instance(service, name, full_name)
    instance.heard = now
    if isinstance(record, DNSService):
        instance.host, instance.port = record.server, record.port
    elif isinstance(record, DNSText):
        instance.txt = parse_txt(record.text)
    return ""


def _note_addresses(speaker: _Speaker, records: list[DNSAddress]) -> None:
    replaced: set[tuple[str, int]] = set()
    for record in records:
        host = record.name.casefold()
        if host not in speaker.addresses and len(speaker.addresses) >= MOST_PER_SOURCE:
            continue
        family, size = (socket.AF_INET, 4) if record.type == _A else (socket.AF_INET6, 16)
        text = socket.inet_ntop(family, record.address) if len(record.address) == size else ""
        addresses = speaker.addresses.setdefault(host, [])
        if record.unique and (host, record.type) not in replaced:  # the whole set is in this packet (RFC 6762, 10.2)
            addresses[:] = [address for address in addresses if (":" in address) != (record.type == _AAAA)]
        replaced.add((host, record.type))
        if text and text not in addresses and len(addresses) < MOST_ENDPOINTS:
            addresses.append(text)


def _withdrawn(speaker: _Speaker, records: list[DNSRecord]) -> Iterator[_Instance]:
    """Yield the instances that are withdrawn (time to live 0)."""
    for record in records:
        if record.ttl == 0 and isinstance(record, DNSPointer | DNSService):
            name = record.alias if isinstance(record, DNSPointer) else record.name
            instance = speaker.instances.pop(name.casefold(), None)
            if instance is not None:
                yield instance


def _missing(speaker: _Speaker) -> Iterator[tuple[str, int]]:
    for instance in speaker.instances.values():
        if not instance.host:
            yield instance.full_name, _SRV
            yield instance.full_name, _TXT
        elif not speaker.addresses.get(instance.host.casefold()):
            yield instance.host, _A
            yield instance.host, _AAAA
        if instance.name.casefold() not in speaker.models:
            yield f"{instance.name}.{DEVICE}.local.", _TXT


def _sightings(
    speaker: _Speaker, mentioned: set[str], interfaces: Interfaces, speaker_key: tuple[str, str]
) -> Iterator[Sighting]:
    """Yield sightings of the instances that a packet concerns, by the names of instances and hosts in it."""
    for key, instance in speaker.instances.items():
        related = {key, instance.host.casefold(), f"{instance.name}.{DEVICE}.local.".casefold()}
        if not instance.host or not related & mentioned:
            continue
        endpoints = tuple(_endpoints(speaker, instance, interfaces, speaker_key))
        details = dict(instance.txt)
        model = details.get("model") or speaker.models.get(instance.name.casefold(), "")
        if model:
            details["model"] = model
        if endpoints:
            host, shown = instance.host.rstrip("."), tuple(sorted(details.items()))
            yield Sighting(_key(instance, speaker_key), instance.name, host, endpoints, shown)


def _endpoints(
    speaker: _Speaker, instance: _Instance, interfaces: Interfaces, speaker_key: tuple[str, str]
) -> Iterator[Endpoint]:
    """Yield endpoints for the announced addresses. This machine's own addresses (a docker bridge has the same address
    everywhere) are left out unless this machine is the announcer."""
    interface, source = speaker_key
    is_local = _is_here(interfaces.endpoint_for(source, 22, interface))
    for address in speaker.addresses.get(instance.host.casefold()) or [source]:
        endpoint = interfaces.endpoint_for(address, instance.port, interface)
        if endpoint is not None and (is_local or not _is_here(endpoint)):
            yield endpoint


def _is_here(endpoint: Endpoint | None) -> bool:
    return endpoint is not None and endpoint.kind is PathKind.HERE
