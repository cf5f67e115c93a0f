"""Bytes between the devices of one member, and a sum over some of them."""

from __future__ import annotations

import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from profiles.errors import RunFailed
from training.exchange.base import MAX_GATHER_BYTES, ExchangeError, Traffic
from training.layouts.messages import as_bytes


class PendingSend(Protocol):
    """Handle of a message on its way."""

    def is_done(self) -> bool: ...

    def wait(self) -> object: ...


class Carrier(ABC):
    """One stage's endpoint: messages of known length to and from every other stage, in order between each pair.

    Args:
        stage: number of this stage, from 0.
        names: of the machines, by stage.
    """

    def __init__(self, stage: int, names: Sequence[str]) -> None:
        self.stage, self.names = stage, tuple(names)
        self.traffic = Traffic()
        self._lock = threading.Lock()

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.names)

    def send(self, stage: int, data: torch.Tensor) -> PendingSend:
        """Start sending flat uint8 ``data``, which is not changed before the handle's ``wait`` has returned."""
        with self._lock:
            self.traffic.bytes_sent += data.numel()
        return self._send(stage, data)

    def receive(self, stage: int, size: int) -> torch.Tensor:
        """Wait for the next message of ``stage``, ``size`` bytes; return it as flat uint8. Any thread may call it.

        Raises:
            ExchangeError: a device is lost, or the message has another length; it names the machine.
        """
        data = torch.empty(size, dtype=torch.uint8)
        self._receive(stage, data)
        with self._lock:
            self.traffic.bytes_received += size
        return data

    def close(self) -> None:
        """Leave the other stages, with which nothing is under way."""

    @abstractmethod
    def _send(self, stage: int, data: torch.Tensor) -> PendingSend: ...

    @abstractmethod
    def _receive(self, stage: int, data: torch.Tensor) -> None: ...

    def refused(self, stage: int, sent: str, expected: str) -> RunFailed:
        """Return the error for a device that sends something else than what belongs there."""
        return RunFailed(
            f"it sent {sent} where {expected} belongs",
            "run the same version of Muster, and the same plan, on all machines",
            machine=self.names[stage],
        )


class GroupCarrier(Carrier):
    """Messages through a ``torch.distributed`` process group: of the mesh (backend ``muster``), or a stock one.

    Args:
        group: of the member's devices.
        ranks: rank in the group of each stage.
        names: of the machines, by stage.
        release: closes what the group was made with.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        names: Sequence[str],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(list(ranks).index(group.rank()), names)
        self._group, self._ranks, self._release = group, tuple(ranks), release

    def close(self) -> None:
        self._group.shutdown()
        self._release()

    def _send(self, stage: int, data: torch.Tensor) -> PendingSend:
        return _GroupSend(self._group.send([data], self._ranks[stage], 0), data)

    def _receive(self, stage: int, data: torch.Tensor) -> None:
        _wait(self._group.recv([data], self._ranks[stage], 0))


class _GroupSend:
    def __init__(self, work: dist.Work, data: torch.Tensor) -> None:
        self._work, self._data = work, data  # stock groups read the memory until the work has ended

    def is_done(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        _wait(self._work)


def _wait(work: dist.Work) -> None:
    try:
        work.wait()
    except RuntimeError as error:  # torch knows no other; the group's text names the machine
        raise ExchangeError(str(error)) from error


def sum_among(carrier: Carrier, stages: Collection[int], values: torch.Tensor) -> torch.Tensor:
    """Return the sum of ``values`` over some stages, this one among them: the same bits on each.

    Every stage sends its values to all others and adds in order of the stages: one way over a link, ``n - 1`` times the
    size of ``values`` sent by each.
    """
    data = as_bytes(values.detach().cpu())
    others = [stage for stage in sorted(stages) if stage != carrier.stage]
    sends = [carrier.send(stage, data) for stage in others]
    received = {stage: carrier.receive(stage, data.numel()).view(values.dtype) for stage in others}
    for send in sends:
        send.wait()
    parts = {**received, carrier.stage: data.view(values.dtype)}
    total = functools.reduce(torch.add, (parts[stage] for stage in sorted(parts)))
    return total.view(values.shape).to(values.device)


def send_payload(carrier: Carrier, stage: int, payload: bytes) -> list[PendingSend]:
    """Start sending a small payload, which :func:`receive_payload` takes."""
    size, data = torch.tensor([len(payload)]), torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8)
    return [carrier.send(stage, message) for message in (as_bytes(size), data)]


def receive_payload(carrier: Carrier, stage: int) -> bytes:
    """Wait for the next payload of a stage.

    Raises:
        ExchangeError: a device is lost.
        RunFailed: it announces a payload of an impossible length.
    """
    length = int(carrier.receive(stage, torch.int64.itemsize).view(torch.int64))
    if not 0 <= length <= MAX_GATHER_BYTES:
        raise carrier.refused(stage, f"a payload of {length} bytes", f"at most {MAX_GATHER_BYTES}")
    return carrier.receive(stage, max(1, length)).numpy().tobytes()[:length]


def gather_among(carrier: Carrier, payload: bytes) -> list[bytes]:
    """Return a payload of every stage, by stage."""
    others = [stage for stage in range(carrier.stages) if stage != carrier.stage]
    sends = [send for stage in others for send in send_payload(carrier, stage, payload)]
    payloads = {carrier.stage: payload} | {stage: receive_payload(carrier, stage) for stage in others}
    for send in sends:
        send.wait()
    return [payloads[stage] for stage in range(carrier.stages)]
