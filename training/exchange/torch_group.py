"""The torch engine: stock ``torch.distributed``, NCCL where all members are CUDA, else gloo on the CPU.

Everything a group does runs on one communication thread in the order it was started, so an exchange overlaps with the
training and members cannot get out of step. A group is fixed: nobody joins later, and the loss of a member ends it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from training.exchange.base import ANCHOR_DEADLINE, Anchor, Exchange, ExchangeError, MeanResult, Pending, Traffic
from training.exchange.codecs import Codec
from training.exchange.error_feedback import MeanResiduals
from training.exchange.store_server import serve_store
from training.exchange.torch_liveness import Liveness
from training.exchange.torch_mean import WeightedMean, gather
from training.exchange.torch_operation import Clock, Operation
from training.exchange.torch_rendezvous import Links, choose_backend, first_line, form_group, introduce
from training.exchange.torch_store import StoreClient
from training.exchange.torch_wire import Wire

__all__ = ["TorchGroup", "serve_store"]

MAX_GATHER = 4 << 20
_VERDICT_SECONDS = 5.0
"""How long a failed exchange waits to learn who is to blame."""
_CLOSE_SECONDS = 10.0
_NO_ANCHOR = "the torch engine accepts no new members while it trains; use engine = hub for that"

V = TypeVar("V")


class TorchGroup(Exchange):
    """One member of a process group. Make it with :meth:`connect`."""

    engine = "torch"

    def __init__(
        self,
        device: torch.device,
        wire: Wire,
        store: StoreClient,
        names: list[str],
        links: Links,
        beside: Collection[int] = (),
    ) -> None:
        self.rank = wire.rank
        self.backend = dist.get_backend()
        self.traffic = wire.traffic
        self._device = device
        self._wire = wire
        self._store = store
        self._links = links
        self._members = tuple(range(wire.world_size))
        self._names = names
        self._clock = Clock(wire.traffic)
        self._residuals = MeanResiduals()
        self._failure = ""
        self._closed = False
        self._lock = threading.Lock()
        self._liveness = Liveness(store.clone(), names, wire.rank, self._fail, beside)
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="exchange", daemon=True)
        self._thread.start()
        self._liveness.start()

    @classmethod
    def connect(
        cls,
        store_address: str,
        token: str,
        rank: int,
        world_size: int,
        device: torch.device,
        interface: str,
        timeout: float,
        run_id: str,
        beside: Collection[int] = (),
    ) -> TorchGroup:
        """Meet the other members at the store and form the group with them.

        Args:
            store_address: ``host:port`` of :func:`serve_store`, always loopback on this machine.
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
        store = StoreClient(store_address, token, timeout, prefix=f"{run_id}/")
        members = introduce(store, rank, world_size, device, timeout)
        backend = choose_backend(members)
        links = form_group(backend, store, rank, world_size, device, interface, timeout)
        wire = Wire(rank, world_size, device if backend == "nccl" else torch.device("cpu"), Traffic())
        return cls(device, wire, store, [str(member) for member in members], links, beside)

    @property
    def members(self) -> tuple[int, ...]:
        return self._members

    @property
    def is_newcomer(self) -> bool:
        return False

    @property
    def anchor_wanted(self) -> bool:
        return False

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

        return self._start(operation, self._to_device)

    def _start_gather(self, name: str, payload: bytes) -> Pending[dict[int, bytes]]:
        if len(payload) > MAX_GATHER:
            raise ExchangeError(f"'{name}' has {len(payload)} bytes, more than the {MAX_GATHER} that may be gathered")
        return self._start(lambda: gather(self._wire, name, payload), lambda result: result)

    def residual(self, stream: str, elements: int) -> torch.Tensor | None:
        return self._residuals.part(stream, 0, elements)

    def restore_residual(self, stream: str, values: torch.Tensor) -> None:
        self._residuals.restore(stream, 0, values)

    def publish_anchor(self, anchor: Anchor) -> None:
        raise ExchangeError(_NO_ANCHOR)

    def fetch_anchor(self, timeout: float = ANCHOR_DEADLINE) -> Anchor:
        raise ExchangeError(_NO_ANCHOR)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._liveness.leave()
        if self._clock.busy:
            self._break_off()
        self._queue.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if dist.is_initialized() and not self._thread.is_alive():
            # Otherwise torch ends the process with "terminate called" when it exits.
            dist.destroy_process_group()
        self._store.close()

    # ------------------------------------------------------------------------------------------- communication thread

    def _start(self, operation: Callable[[], V], deliver: Callable[[V], V]) -> Pending[V]:
        if self._failure or self._closed:
            raise ExchangeError(self._failure or "the group is closed")
        future: Future[V] = Future()
        self._clock.begin()

        def run() -> None:
            try:
                if self._failure:
                    raise ExchangeError(self._failure)
                result = operation()
            except Exception as error:  # noqa: BLE001 - whoever waits for the outcome must get it, whatever it is
                failure = ExchangeError(self._explain(error))
                self._clock.end()
                future.set_exception(failure)
            else:
                self._clock.end()
                future.set_result(result)

        self._queue.put(run)
        return Operation(future, deliver, self._clock)

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
