"""Parts of snapshots on their way between the devices of a member: the manifest, then the tensors in pieces.

The receiver acknowledges every piece, so the sender knows for how long the link was busy with it, and can leave the
rest of the time to others. What arrives is written as a snapshot of its own, and is not one before its hash is right.
A device that cannot read its part says so instead, and the part is taken from another machine that has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from pydantic import TypeAdapter

from profiles.errors import RunFailed
from training.snapshots.member_snapshots import MemberSnapshots, SnapshotParts
from training.snapshots.snapshot_store import AnnouncedCopy, DamagedSnapshot, SnapshotStore, announced_copy

PIECE = 4 << 20
_LENGTH = 8
"""Bytes that hold the length of a manifest."""
_LONGEST_MANIFEST = 4 << 20
_READ = b"\1"
"""Before each piece that could be read; zeros come instead of one that could not."""
_NAMES, _NUMBERS = TypeAdapter(dict[int, list[str] | None]), TypeAdapter(list[int])


class UnreadSnapshot(DamagedSnapshot):
    """A snapshot that another machine has but cannot read."""


class Sending(Protocol):
    def wait(self) -> object: ...


class DeviceLinks(Protocol):
    """A device's end of the links to the member's other devices, see :class:`training.layouts.carrier.Carrier`."""

    stage: int

    @property
    def names(self) -> Sequence[str]: ...

    def send(self, stage: int, data: torch.Tensor) -> Sending: ...

    def receive(self, stage: int, size: int) -> torch.Tensor: ...

    def refused(self, stage: int, sent: str, expected: str) -> RunFailed: ...


class Transfer(NamedTuple):
    """A part that one device sends to another."""

    part: int
    source: int
    target: int

    def disturbs(self, other: Transfer) -> bool:
        """Whether the two cannot go on at once: acknowledgements go the other way over the same links."""
        is_opposite = (self.source, self.target) == (other.target, other.source)
        return self.source == other.source or self.target == other.target or is_opposite


@dataclass
class SendingPace:
    """How a part is sent."""

    piece: int = PIECE
    """Bytes."""
    share: float = 1.0
    """Share of the time for which the link is used."""

    def rest(self, seconds: float) -> None:
        """Leave the link to others after it was used for ``seconds``."""
        if self.share < 1:
            time.sleep(seconds / self.share - seconds)


AT_ONCE = SendingPace()
_TRANSFERS = TypeAdapter(list[Transfer])


def send_part(links: DeviceLinks, target: int, store: SnapshotStore, step: int, pace: SendingPace = AT_ONCE) -> None:
    """Send the snapshot of ``step`` to a device, which receives it with the same pace.

    That it cannot be read is sent as well, so that nobody waits for what does not come.

    Raises:
        ExchangeError: the device is lost.
        DamagedSnapshot: it cannot be read.
    """
    try:
        manifest = store.manifest(step)
        size = announced_copy(manifest).size
    except DamagedSnapshot:
        links.send(target, _tensor(bytes(_LENGTH))).wait()
        raise
    for message in (len(manifest).to_bytes(_LENGTH, "little"), manifest):
        links.send(target, _tensor(message)).wait()
    pieces = store.content(step, pace.piece)
    for offset in range(0, size, pace.piece):
        length = min(pace.piece, size - offset)
        try:
            piece = _next_piece(pieces, length, store, step)
        except DamagedSnapshot:
            links.send(target, _tensor(bytes(len(_READ) + length))).wait()
            raise
        start = time.monotonic()
        links.send(target, _tensor(_READ + piece)).wait()
        links.receive(target, 1)
        pace.rest(time.monotonic() - start)


def _next_piece(pieces: Iterator[bytes], length: int, store: SnapshotStore, step: int) -> bytes:
    piece = next(pieces, b"")
    if len(piece) != length:
        raise DamagedSnapshot(f"{store.directory}: the snapshot of step {step} is shorter than it was written")
    return piece


def receive_part(links: DeviceLinks, source: int, store: SnapshotStore, step: int, pace: SendingPace = AT_ONCE) -> None:
    """Receive what a device sends with :func:`send_part`.

    Raises:
        ExchangeError: the device is lost.
        UnreadSnapshot: the device cannot read it.
        RunFailed: it sent something else, or that cannot be written.
    """
    length = int.from_bytes(_bytes(links.receive(source, _LENGTH)), "little")
    if length == 0:
        raise UnreadSnapshot(f"it cannot read the snapshot of step {step}", machine=links.names[source])
    if length > _LONGEST_MANIFEST:
        raise links.refused(source, f"{length} bytes", "a manifest")
    manifest = _bytes(links.receive(source, length))
    if (announced := announced_copy(manifest)).step != step:
        raise links.refused(source, f"the snapshot of step {announced.step}", f"that of step {step}")
    pieces = _arriving(links, source, announced, pace.piece)
    try:
        store.write_copy(manifest, pieces)
    except RunFailed:
        for _ in pieces:  # which the other device sends all the same
            continue
        raise


def _arriving(links: DeviceLinks, source: int, announced: AnnouncedCopy, piece: int) -> Iterator[bytes]:
    for start in range(0, announced.size, piece):
        data = _bytes(links.receive(source, len(_READ) + min(piece, announced.size - start)))
        if not data.startswith(_READ):
            raise UnreadSnapshot(f"it cannot read the snapshot of step {announced.step}", machine=links.names[source])
        links.send(source, torch.ones(1, dtype=torch.uint8))
        yield data[len(_READ) :]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def in_phases(transfers: Iterable[Transfer]) -> list[list[Transfer]]:
    """Divide transfers into those that can go on at once, one group after another."""
    phases: list[list[Transfer]] = []
    for transfer in transfers:
        free = (phase for phase in phases if not any(map(transfer.disturbs, phase)))
        if (phase := next(free, None)) is None:
            phases.append(phase := [])
        phase.append(transfer)
    return phases


def carry_out(
    transfers: Iterable[Transfer],
    links: DeviceLinks,
    send: Callable[[Transfer], object],
    receive: Callable[[Transfer], object],
) -> list[tuple[Transfer, RunFailed]]:
    """Send and receive this device's parts of some transfers; all devices call it with the same ones.

    Returns:
        The transfers of this device whose parts could not be read or written, and why; all others were made.

    Raises:
        ExchangeError: a device is lost.
    """
    pool, failed = ThreadPoolExecutor(2, thread_name_prefix="parts"), list[tuple[Transfer, RunFailed]]()
    try:
        for phase in in_phases(transfers):
            jobs = [(each, pool.submit(send, each)) for each in phase if each.source == links.stage]
            jobs += [(each, pool.submit(receive, each)) for each in phase if each.target == links.stage]
            for transfer, job in jobs:
                try:
                    job.result()
                except RunFailed as error:  # the others wait for what comes after it
                    failed.append((transfer, error))
        return failed
    finally:
        pool.shutdown(wait=False)  # what waits for a device that failed ends with the group


class _Holders:
    """Which devices' machines have each part of a snapshot, without those that could not read it."""

    def __init__(self, parts: SnapshotParts, snapshots: MemberSnapshots) -> None:
        self._parts, self._snapshots = parts, snapshots
        self._left = {part: list(devices) for part, devices in parts.holders.items()}

    def first(self, part: int) -> int:
        """Return the device from whose machine a part is taken."""
        return self._left[part][0]

    def without(self, part: int, device: int) -> None:
        """Take the part from another machine than that of ``device`` from now on.

        Raises:
            RunFailed: there is none.
        """
        receiver = self._snapshots.receiver
        self._left[part] = [other for other in self._left[part] if receiver(other) != receiver(device)]
        if not self._left[part]:
            message = f"no machine can read part {part + 1} of {self._parts.origin.parts} of the snapshot of step"
            raise RunFailed(f"{message} {self._parts.step}", "repair a disk that has it, and resume again")


def bring_parts(
    snapshots: MemberSnapshots,
    links: DeviceLinks | None,
    gather: Callable[[bytes], list[bytes]],
    parts: SnapshotParts,
    is_wanted: Callable[[str], bool],
    warn: Callable[[str], None],
) -> None:
    """Copy the parts of a snapshot that devices need to their machines, where these lack them; all devices call it.

    A part that its machine cannot read is taken from another one that has it.

    Args:
        links: to the member's other devices; ``None``: there are none.
        is_wanted: whether this device needs a tensor.
        warn: takes a line about a part that cannot be read here.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: a part cannot be read anywhere, or not be written.
    """
    if links is None:
        return
    holders, local = _Holders(parts, snapshots), snapshots.parts(parts.step, parts.origin)
    names, unreadable = _names(parts, local, links.stage, gather, holders, warn)
    receiver, present = snapshots.receiver(links.stage), set(local)
    present -= {part for part, device in unreadable if snapshots.receiver(device) == receiver}
    while transfers := _requested(_lacking(names, present, is_wanted), snapshots, gather, holders):
        failed = carry_out(
            sorted(transfers),
            links,
            lambda transfer: send_part(links, transfer.target, local[transfer.part], parts.step),
            lambda transfer: receive_part(links, transfer.source, snapshots.store_of(transfer.part), parts.step),
        )
        for _, error in failed:
            if not isinstance(error, DamagedSnapshot):
                raise error
            if not isinstance(error, UnreadSnapshot):  # its machine says so itself
                warn(f"{error.message}; another machine's copy is taken")
        # and what one device of a machine has received, its others read
        reports = gather(_TRANSFERS.dump_json([transfer for transfer, _ in failed]))
        undelivered = {transfer for report in reports for transfer in _TRANSFERS.validate_json(report)}
        present |= {transfer.part for transfer in transfers - undelivered if transfer.target == receiver}
        for part, source in sorted({(transfer.part, transfer.source) for transfer in undelivered}):
            holders.without(part, source)
            present -= {part} if snapshots.receiver(source) == receiver else set()


def _names(
    parts: SnapshotParts,
    local: Mapping[int, SnapshotStore],
    device: int,
    gather: Callable[[bytes], list[bytes]],
    holders: _Holders,
    warn: Callable[[str], None],
) -> tuple[dict[int, list[str]], list[tuple[int, int]]]:
    """Return the names of the tensors in each part, as the first device reads them that has it and can; and which
    parts which devices could not read."""

    def read(part: int) -> list[str] | None:
        try:
            return local[part].names(parts.step) if part in local else None
        except DamagedSnapshot as error:
            warn(f"{error.message}; another machine's copy is taken")
            return None

    names, unreadable = dict[int, list[str]](), list[tuple[int, int]]()
    while unread := sorted(parts.holders.keys() - names.keys()):
        answers = gather(_NAMES.dump_json({part: read(part) for part in unread if holders.first(part) == device}))
        for other, answer in enumerate(answers):
            for part, listed in _NAMES.validate_json(answer).items():
                if listed is None:
                    holders.without(part, other)
                    unreadable.append((part, other))
                else:
                    names[part] = listed
    return names, unreadable


def _lacking(names: Mapping[int, Sequence[str]], present: set[int], is_wanted: Callable[[str], bool]) -> list[int]:
    """Return the parts with wanted tensors that are in none that is ``present``."""
    here = {name for part in present for name in names[part]}
    return [part for part in sorted(names.keys() - present) if any(map(is_wanted, {*names[part]} - here))]


def _requested(
    lacking: Sequence[int], snapshots: MemberSnapshots, gather: Callable[[bytes], list[bytes]], holders: _Holders
) -> set[Transfer]:
    """Return what is to be sent so that every device gets the parts that it lacks."""
    requests = map(_NUMBERS.validate_json, gather(_NUMBERS.dump_json([*lacking])))
    return {
        Transfer(part, holders.first(part), snapshots.receiver(device))
        for device, lacks in enumerate(requests)
        for part in lacks
    }
