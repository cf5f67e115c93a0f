"""An operation as ``torch.distributed`` sees it."""

from __future__ import annotations

import contextlib
import math
import threading
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from profiles.quantities import span_text
from training.exchange.links.link import MARKS
from training.exchange.mean.transfer import PendingTransfer
from training.exchange.torch_backend.memory_order import Use, in_use
from training.exchange.torch_backend.untraced import untraced

BACKEND = "muster"


@untraced
class _Future(Future[Any]):
    """A future whose callbacks may wait for further operations: they run in their own thread, not the link's. Callbacks
    of a complete operation are called at once, as torch specifies."""

    def then(self, callback: Callable[..., Any]) -> Future[Any]:
        if self.done():
            return super().then(callback)
        after: Future[Any] = Future()

        def carry_out() -> None:
            try:
                after.set_result(callback(self))
            except Exception as error:  # noqa: BLE001 - raised where the result is waited for
                after.set_exception(error)

        self.add_done_callback(lambda _: threading.Thread(target=carry_out, daemon=True).start())
        return after


@untraced
class MusterWork(dist.Work):
    """An operation in progress. It is complete when its parts are; then results are copied to their tensors.

    Args:
        name: its kind and tensors: for errors, and equal on all members.
        waits_for: returns the names of members whose data is missing.
        seconds: default timeout of :meth:`wait`; 0: none.
    """

    def __init__(self, result: Any, part_count: int, name: str, waits_for: Callable[[], str], seconds: float) -> None:
        super().__init__()
        self._name, self._waits_for, self._seconds = name, waits_for, seconds
        self.mark = zlib.crc32(name.encode()) % MARKS
        self.transfer: PendingTransfer | None = None
        """Its transfer on the mesh, which a thread that waits for it may drive."""
        self.use = Use((), ())
        """The memory that it reads and writes."""
        self.inference = False
        """Whether it writes tensors of :class:`torch.inference_mode`, which must not be modified outside that mode."""
        self.sender: int | None = None
        """Of a point-to-point message: the sender's rank in the group."""
        self._result = result
        self._left = part_count
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._deliveries: list[Callable[[], object]] = []
        self._future: Future[Any] = _Future()

    def begin(self) -> None:
        """Register it as in progress: from here on it ends, with a result or an error."""
        in_use.enter(self, self.use)

    def deliver(self, delivery: Callable[[], object]) -> MusterWork:
        """Call ``delivery`` when all parts are complete."""
        self._deliveries.append(delivery)
        return self

    def deliver_first(self, delivery: Callable[[], object]) -> MusterWork:
        """Like :meth:`deliver`, but before all other deliveries."""
        self._deliveries.insert(0, delivery)
        return self

    def copy_back(self, target: torch.Tensor, host: torch.Tensor) -> MusterWork:
        """Copy ``host`` to ``target`` at the end, unless they share memory."""
        if host.device != target.device or host.data_ptr() != target.data_ptr():
            self.deliver(lambda: target.detach().copy_(host))
        return self

    def part_ended(self, error: Exception | None) -> None:
        """Record the end of one part."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        if self._error is None:
            try:
                with torch.inference_mode(self.inference):
                    for delivery in self._deliveries:
                        delivery()
            except Exception as failure:  # noqa: BLE001 - raised where the result is waited for
                self._error = failure
        self._deliveries.clear()
        in_use.leave(self)
        self._ended.set()
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)

    def profiled(self, suffix: str) -> contextlib.AbstractContextManager[object]:
        """Record a profiler event, if profiling is on; it covers this thread only, and may end before the operation
        does."""
        if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # of torch's C
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"{BACKEND}:{self._name.partition(' ')[0]}{suffix}")

    def wait_for_end(self) -> None:
        """Block until it is complete, or has failed."""
        self._ended.wait()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() or self._seconds
        with self.profiled(" wait"):
            transfer = self.transfer or PendingTransfer(0)
            ended = transfer.drive_for(self._ended, seconds or math.inf)
        if not ended:
            missing = self._waits_for()
            raise RuntimeError(
                self._message(
                    f"no result after {span_text(seconds)}" + (f": it waits for {missing}" if missing else "")
                )
            )
        if self._error is not None:
            raise RuntimeError(self._message(str(self._error))) from self._error
        self._future.wait()  # a link's thread is about to set it
        return True

    def _message(self, text: str) -> str:
        return f"{BACKEND}: {self._name}: {text}"

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result

    def source_rank(self) -> int:
        return super().source_rank() if self.sender is None else self.sender

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()
