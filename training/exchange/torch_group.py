"""The torch engine: stock ``torch.distributed``, NCCL where all members are CUDA, else gloo on the CPU.

Everything a group does runs on one communication thread in the order it was started, so an exchange overlaps with the
training and members cannot get out of step. A group is fixed: nobody joins later, and the loss of a member ends it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from training.exchange.base import Exchange, ExchangeError, MeanResult, Pending
from training.exchange.codecs import Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.operations import Meter, Operation
from training.exchange.store_client import StoreClient
from training.exchange.torch_liveness import Liveness
from training.exchange.torch_mean import WeightedMean, Wire, gather
from training.exchange.torch_rendezvous import choose_backend, first_line, form_group, introduce

MAX_GATHER = 4 << 20
_VERDICT_SECONDS = 5.0
"""How long a failed exchange waits to learn who is to blame."""
_CLOSE_SECONDS = 10.0

V = TypeVar("V")


class _Started(Operation[V]):
    """An exchange that the communication thread carries out."""

    def __init__(self, name: str, meter: Meter, deliver: Callable[[V], V]) -> None:
        super().__init__(name, meter)
        self._deliver = deliver
        self.outcome: V | None = None

    def _result(self) -> V:
        assert self.outcome is not None
        return self._deliver(self.outcome)


class TorchGroup(Exchange):
    """One member of a process group: meets the others at the store and forms the group with them.

    Args:
        store_address: ``host:port`` of the :class:`~training.exchange.store_server.StoreServer`; on this machine.
        token: of that store, see :func:`~training.exchange.store_server.read_token`.
        rank: of this member.
        world_size: members of the group, at least 2.
        device: where the contributions are.
        interface: network interface that reaches the others; empty for loopback.
        timeout: seconds to wait for the others, and that one exchange may take. Lost members are found out much
            sooner by their missing signs of life.
        run_id: keeps groups on one store apart; a second attempt needs another id or another store.
        beside: ranks on this member's machine, whose signs of life may be late.

    Raises:
        ExchangeError: the store, the interface or a member is missing, or the members do not fit together.
    """

    engine = "torch"

    def __init__(
        self,
        store_address: str,
        token: str,
        rank: int,
        world_size: int,
        device: torch.device,
        interface: str,
        timeout: float,
        run_id: str,
        beside: Collection[int] = (),
    ) -> None:
        self.rank = rank
        self._device = device
        self._store = StoreClient(store_address, token, timeout, prefix=f"{run_id}/")
        introduced = introduce(self._store, rank, world_size, device, timeout)
        self.backend = choose_backend(introduced)
        self._links = form_group(self.backend, self._store, rank, world_size, device, interface, timeout)
        self._meter = Meter()
        self.traffic = self._meter.traffic
        self._wire = Wire(rank, world_size, device if self.backend == "nccl" else torch.device("cpu"), self._meter)
        self._members = tuple(range(world_size))
        self._names = [str(member) for member in introduced]
        self._residuals = MeanResiduals()
        self._failure = ""
        self._closed = False
        self._lock = threading.Lock()
        self._liveness = Liveness(self._store.clone(), self._names, rank, self._fail, beside)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._thread.start()
        self._liveness.start()

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    def _start_mean(
        self, name: str, values: torch.Tensor, weight: float, codec: Codec, flags: bytes, stream: str
    ) -> Pending[MeanResult]:
        copy = values.detach().to(self._wire.device, torch.float32, copy=True)
        ready = torch.cuda.current_stream(copy.device).record_event() if copy.is_cuda else None

        def operation() -> MeanResult:
            if ready is not None:
                torch.cuda.current_stream(copy.device).wait_event(ready)
            task = WeightedMean(self._wire, name, copy, weight, codec, flags, stream, self._residuals)
            task.run()
            if ready is not None:
                torch.cuda.current_stream(copy.device).synchronize()
            fit = self.rank not in task.refused
            left_out = () if fit else ((0, copy.numel()),)
            return MeanResult(copy, task.total_weight, self._members, left_out, task.refused, task.flags, fit)

        return self._start(name, operation, self._to_device)

    def _start_gather(self, name: str, payload: bytes) -> Pending[dict[int, bytes]]:
        if len(payload) > MAX_GATHER:
            raise ExchangeError(f"'{name}' has {len(payload)} bytes, more than the {MAX_GATHER} that may be gathered")
        return self._start(name, lambda: gather(self._wire, name, payload), lambda result: result)

    def residual(self, stream: str, elements: int) -> torch.Tensor | None:
        return self._residuals.part(stream, 0, elements)

    def restore_residual(self, stream: str, values: torch.Tensor) -> None:
        self._residuals.restore(stream, 0, values)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._liveness.leave()
        if self._meter.busy:
            self._break_off()
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if dist.is_initialized() and not self._thread.is_alive():
            # Otherwise torch ends the process with "terminate called" when it exits.
            dist.destroy_process_group()
        self._store.close()

    # ------------------------------------------------------------------------------------------- communication thread

    def _start(self, name: str, operation: Callable[[], V], deliver: Callable[[V], V]) -> Pending[V]:
        if self._failure or self._closed:
            raise ExchangeError(self._failure or "the group is closed")
        started = _Started(name, self._meter, deliver)

        def run() -> None:
            try:
                if self._failure:
                    raise ExchangeError(self._failure)
                started.outcome = operation()
                started.finish()
            except Exception as error:  # noqa: BLE001 - whoever waits for the outcome must get it, whatever it is
                started.finish(self._explain(error))

        self._queue.put(run)
        return started

    def _work(self) -> None:
        if self._wire.device.type == "cuda":
            # A stream of its own, or the exchange would queue behind the training's kernels.
            torch.cuda.set_device(self._wire.device)
            torch.cuda.set_stream(torch.cuda.Stream(self._wire.device))  # type: ignore[no-untyped-call]
        while (run := self._queue.get()) is not None:
            run()

    def _to_device(self, result: MeanResult) -> MeanResult:
        """Hand a result to the waiting thread's device and stream."""
        if result.mean.is_cuda:
            result.mean.record_stream(torch.cuda.current_stream(result.mean.device))
        if result.mean.device.type == self._device.type:
            return result
        return replace(result, mean=result.mean.to(self._device))

    # ------------------------------------------------------------------------------------------------------- failures

    def _explain(self, error: Exception) -> str:
        """Turn what went wrong in an exchange into the group's one failure and return it."""
        if self._closed:
            return "the group was closed before the exchange was complete"
        if not self._failure:
            # torch raises RuntimeError when a connection breaks, which is mostly somebody else's fault.
            blame = self._liveness.verdict(_VERDICT_SECONDS) if isinstance(error, RuntimeError) else ""
            self._fail(self._liveness.report(blame or f"{self._names[self.rank]}: {first_line(error)}"))
        return self._failure

    def _fail(self, text: str) -> None:
        """The group cannot go on: remember why and let every exchange under way end."""
        with self._lock:
            if self._failure or self._closed:
                return
            self._failure = text
        self._break_off()

    def _break_off(self) -> None:
        if self.backend == "nccl":
            dist.distributed_c10d._abort_process_group()
        self._links.cut()
