"""Parts of snapshots on their way between the devices of a member: the manifest, then the tensors in pieces.

The receiver acknowledges every piece, so the sender knows for how long the link was busy with it, and can leave the
rest of the time to others. What arrives is written as a snapshot of its own, and is not one before its hash is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from pydantic import TypeAdapter

from profiles.errors import RunFailed
from training.snapshots.member_snapshots import MemberSnapshots, SnapshotParts
from training.snapshots.snapshot_store import SnapshotStore, announced_copy

PIECE = 4 << 20
_LENGTH = 8
"""Bytes that hold the length of a manifest."""
_LONGEST_MANIFEST = 4 << 20
_NAMES, _NUMBERS = TypeAdapter(dict[int, list[str]]), TypeAdapter(list[int])


class Sending(Protocol):
    def wait(self) -> object: ...


class DeviceLinks(Protocol):
    """A device's end of the links to the member's other devices, see :class:`training.layouts.carrier.Carrier`."""

    stage: int

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


def send_part(links: DeviceLinks, target: int, store: SnapshotStore, step: int, pace: SendingPace = AT_ONCE) -> None:
    """Send the snapshot of ``step`` to a device, which receives it with the same pace.

    Raises:
        ExchangeError: the device is lost.
        DamagedSnapshot: it cannot be read.
    """
    manifest = store.manifest(step)
    for message in (len(manifest).to_bytes(_LENGTH, "little"), manifest):
        links.send(target, _tensor(message)).wait()
    for piece in store.content(step, pace.piece):
        start = time.monotonic()
        links.send(target, _tensor(piece)).wait()
        links.receive(target, 1)
        pace.rest(time.monotonic() - start)


def receive_part(links: DeviceLinks, source: int, store: SnapshotStore, step: int, pace: SendingPace = AT_ONCE) -> None:
    """Receive what a device sends with :func:`send_part`.

    Raises:
        ExchangeError: the device is lost.
        RunFailed: it sent something else, or that cannot be written.
    """
    length = int.from_bytes(_bytes(links.receive(source, _LENGTH)), "little")
    if not 0 < length <= _LONGEST_MANIFEST:
        raise links.refused(source, f"{length} bytes", "a manifest")
    manifest = _bytes(links.receive(source, length))
    if (announced := announced_copy(manifest)).step != step:
        raise links.refused(source, f"the snapshot of step {announced.step}", f"that of step {step}")
    pieces = _arriving(links, source, announced.size, pace.piece)
    try:
        store.write_copy(manifest, pieces)
    except RunFailed:
        for _ in pieces:  # which the other device sends all the same
            continue
        raise


def _arriving(links: DeviceLinks, source: int, size: int, piece: int) -> Iterator[bytes]:
    for start in range(0, size, piece):
        data = _bytes(links.receive(source, min(piece, size - start)))
        links.send(source, torch.ones(1, dtype=torch.uint8))
        yield data


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
) -> None:
    """Send and receive this device's parts of some transfers; all devices call it with the same ones.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: a part cannot be read or written; all others were sent and received.
    """
    pool, problems = ThreadPoolExecutor(2, thread_name_prefix="parts"), list[RunFailed]()
    try:
        for phase in in_phases(transfers):
            jobs = [pool.submit(send, transfer) for transfer in phase if transfer.source == links.stage]
            jobs += [pool.submit(receive, transfer) for transfer in phase if transfer.target == links.stage]
            for job in jobs:
                try:
                    job.result()
                except RunFailed as error:  # the others wait for what comes after it
                    problems.append(error)
        if problems:
            raise problems[0]
    finally:
        pool.shutdown(wait=False)  # what waits for a device that failed ends with the group


def bring_parts(
    snapshots: MemberSnapshots,
    links: DeviceLinks | None,
    gather: Callable[[bytes], list[bytes]],
    parts: SnapshotParts,
    is_wanted: Callable[[str], bool],
) -> None:
    """Copy the parts of a snapshot that devices need to their machines, where these lack them; all devices call it.

    Args:
        links: to the member's other devices; ``None``: there are none.
        is_wanted: whether this device needs a tensor.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: a part cannot be read or written.
    """
    if links is None:
        return
    step, origin, holders = parts
    local = snapshots.parts(step, origin)
    speaks_for = [part for part in local if holders[part][0] == links.stage]
    answers = gather(_NAMES.dump_json({part: local[part].names(step) for part in speaks_for}))
    names = {part: names for answer in answers for part, names in _NAMES.validate_json(answer).items()}
    here = {name for part in local for name in names[part]}
    lacking = [part for part in sorted(names.keys() - local.keys()) if any(map(is_wanted, {*names[part]} - here))]
    requests = map(_NUMBERS.validate_json, gather(_NUMBERS.dump_json(lacking)))
    transfers = {
        Transfer(part, holders[part][0], snapshots.receiver(device))
        for device, lacks in enumerate(requests)
        for part in lacks
    }
    carry_out(
        sorted(transfers),
        links,
        lambda transfer: send_part(links, transfer.target, local[transfer.part], step),
        lambda transfer: receive_part(links, transfer.source, snapshots.store_of(transfer.part), step),
    )
    if transfers:
        gather(b"")  # what one device of a machine receives, its others read
