"""Order of operations on the same memory: an operation that starts waits for those it would conflict with.

Of two all-reduces on the same memory the second would send what the first has not reduced yet. Backends with a single
queue run them one after the other; here the second one's call returns when the first one has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Span = tuple[str, int, int]
"""Device, address of the first byte, and the address after the last one."""


class Operation(Protocol):
    """An operation in progress."""

    def wait_for_end(self) -> None: ...


@dataclass(frozen=True)
class Use:
    """The memory of one operation.

    Args:
        between_two: it is a point-to-point message. Two of these need no order: a member that sends and receives in the
            same memory at once may have to start both before either ends.
    """

    reads: Sequence[Span]
    writes: Sequence[Span]
    between_two: bool = False

    @classmethod
    def of(cls, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], between_two: bool = False) -> Use:
        return cls([span(tensor) for tensor in reads], [span(tensor) for tensor in writes], between_two)

    def conflicts(self, other: Use) -> bool:
        """Whether one writes what the other one reads or writes."""
        if self.between_two and other.between_two:
            return False
        return (
            overlap(self.writes, other.writes) or overlap(self.writes, other.reads) or overlap(self.reads, other.writes)
        )


def span(tensor: torch.Tensor) -> Span:
    """Return the memory from a tensor's first element to its last one, gaps included."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return str(tensor.device), start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return str(tensor.device), start, start + (reach + 1) * tensor.element_size()


def overlap(spans: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether any of the spans overlaps one of the others."""
    return _in_common([(*span, 0) for span in spans] + [(*span, 1) for span in others]) if spans and others else False


def any_in_common(spans: Sequence[Span]) -> bool:
    """Whether any two of the spans overlap."""
    return _in_common([(*span, number) for number, span in enumerate(spans)])


def _in_common(spans: list[tuple[str, int, int, int]]) -> bool:
    """Whether two of the spans of different owners (the last item) overlap."""
    reach: dict[int, tuple[str, int]] = {}
    """By owner: the device, and the end of the spans seen so far."""
    for device, start, stop, owner in sorted(span for span in spans if span[1] < span[2]):
        if any(at == device and end > start for other, (at, end) in reach.items() if other != owner):
            return True
        owner_device, end = reach.get(owner, (device, 0))
        reach = {other: seen for other, seen in reach.items() if seen[0] == device and seen[1] > start}
        reach[owner] = device, max(stop, end if owner_device == device else 0)
    return False


class MemoryInUse:
    """The memory uses of all operations in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[Operation, Use] = {}

    def wait_for_others(self, use: Use) -> None:
        """Wait for the end of all operations in progress that conflict with this use."""
        while (earlier := self._conflicting(use)) is not None:
            earlier.wait_for_end()

    def enter(self, operation: Operation, use: Use) -> None:
        """Register an operation in progress; it must :meth:`leave` at its end in any case."""
        with self._lock:
            self._uses[operation] = use

    def leave(self, operation: Operation) -> None:
        """Unregister an operation. Idempotent."""
        with self._lock:
            self._uses.pop(operation, None)

    def _conflicting(self, use: Use) -> Operation | None:
        with self._lock:
            return next((earlier for earlier, other in self._uses.items() if use.conflicts(other)), None)


in_use = MemoryInUse()
"""All operations of this process, of whatever group."""
