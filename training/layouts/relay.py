"""One stage's part of a pipeline: activations come from the stage before and go to the next one, gradients back.

The works of a step follow :mod:`training.layouts.orders`. Tensors may be of any length, which may change from one
micro-batch to the next. Gradients go back only for tensors that require one, so nothing goes back into frozen parts.
Sending never waits, and threads receive a few messages ahead, so what travels hides behind what is computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from training.layouts.carrier import Carrier, PendingSend
from training.layouts.messages import HEADER_BYTES, TensorHeader, Tensors, pack_header, parse_header
from training.layouts.orders import Work, forward_order, pipeline_order
from training.optimization.backward import refuse_untrained

Forward = Callable[[int, Tensors], Any]
"""Takes the number of a micro-batch and the tensors that came from the stage before (of the first one: none); returns
the tensors that go to the next one, or of the last one the result: in training the micro-batch's share of the loss."""

_RECEIVED_AHEAD = 2
"""Messages that wait on each side until the stage comes to them; one more may be arriving."""
_SENT_AHEAD = 8
"""Buffers on their way to the next stage in an evaluation, where no gradient holds a stage back."""
_CPU = torch.device("cpu")


@dataclass
class StageTimes:
    """Wall seconds of one stage in one step or evaluation."""

    micro_batches: int = 0
    forward: float = 0.0
    backward: float = 0.0
    wait: float = 0.0
    """Training was blocked because a tensor had not arrived, or had not been sent at the end."""


class StageRelay:
    """Runs one stage's forwards and backwards.

    Args:
        wire: element type of floating-point numbers on the way; ``None``: their own. bf16 halves fp32.
        extra: see :func:`training.layouts.orders.micro_batches_under_way`.
        device: that of the stage.
    """

    def __init__(
        self,
        carrier: Carrier,
        wire: torch.dtype | None = None,
        extra: int = 0,
        device: torch.device = _CPU,
    ) -> None:
        self.times = StageTimes()
        """Of the last call."""
        self._carrier, self._wire, self._extra, self._device = carrier, wire, extra, device
        self._stage, self._last = carrier.stage, carrier.stages - 1
        self._sends: deque[PendingSend] = deque()
        self._graphs: dict[int, tuple[Tensors, Tensors]] = {}
        """Of the micro-batches under way: tensors that came, and those that went and want a gradient, or the loss."""

    def train(self, micro_batches: int, forward: Forward) -> list[torch.Tensor]:
        """Run all micro-batches forward and backward; gradients are added to ``grad`` of the parameters.

        Returns:
            The micro-batches' losses on the last stage, without gradients; empty on the others.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: a device sent something else than what belongs there, or the loss depends on no trained weight.
        """
        losses: list[torch.Tensor] = []
        order = pipeline_order(self._stage, self._last + 1, micro_batches, self._extra)
        with self._arrivals(micro_batches) as (activations, gradients):
            for work in order:
                if work.kind == "forward":
                    losses += self._forward(work, forward, activations, gradients)
                else:
                    self._backward(work, gradients)
        return losses

    @torch.no_grad()
    def evaluate(self, micro_batches: int, forward: Forward) -> list[Any]:
        """Run all micro-batches forward only; return their results on the last stage, nothing on the others.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: a device sent something else than what belongs there.
        """
        results: list[Any] = []
        with self._arrivals(micro_batches) as (activations, _):
            for work in forward_order(micro_batches):
                output = self._computed(work, forward, self._arrived(activations))
                if self._stage == self._last:
                    results.append(output)
                else:
                    self._send(work, output, self._stage + 1)
                    self._wait_for_sends(_SENT_AHEAD)
        return results

    @contextmanager
    def _arrivals(self, micro_batches: int) -> Iterator[tuple[_Arrivals, _Arrivals]]:
        """Receive from both sides: all activations of a step, and the gradients that are asked for."""
        self.times = StageTimes(micro_batches)
        self._sends.clear()
        self._graphs.clear()
        activations = _Arrivals(self._carrier, self._stage - 1, self._device)
        if self._stage:
            for work in forward_order(micro_batches):
                activations.expect(work)
        gradients = _Arrivals(self._carrier, self._stage + 1, self._device)
        try:
            yield activations, gradients
            self._wait_for_sends(0)
        finally:
            activations.close()
            gradients.close()
            self._graphs.clear()  # of a step that failed: a new one may need their memory

    # ----------------------------------------------------------------------------------------------------- computation

    def _forward(
        self, work: Work, forward: Forward, activations: _Arrivals, gradients: _Arrivals
    ) -> list[torch.Tensor]:
        """Compute one forward; return the loss, if there is one."""
        arrived = self._arrived(activations)
        output = self._computed(work, forward, arrived)
        if self._stage == self._last:
            refuse_untrained(output)
            self._graphs[work.micro_batch] = arrived, (output,)
            return [output.detach()]
        self._graphs[work.micro_batch] = arrived, tuple(tensor for tensor in output if tensor.requires_grad)
        self._send(work, output, self._stage + 1)
        if self._graphs[work.micro_batch][1]:
            gradients.expect(Work("backward", work.micro_batch))
        return []

    def _computed(self, work: Work, forward: Forward, arrived: Tensors) -> Any:
        with self._timed("forward"):
            return forward(work.micro_batch, arrived)

    def _arrived(self, activations: _Arrivals) -> Tensors:
        return self._take(activations) if self._stage else ()

    def _backward(self, work: Work, gradients: _Arrivals) -> None:
        arrived, departed = self._graphs.pop(work.micro_batch)
        if departed:
            returned = None if self._stage == self._last else self._gradients_of(departed, gradients)
            with self._timed("backward"):
                torch.autograd.backward(departed, returned)
        wanted = [tensor for tensor in arrived if tensor.requires_grad]
        if wanted:
            sums = (torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in wanted)
            self._send(work, tuple(sums), self._stage - 1)

    def _gradients_of(self, departed: Tensors, gradients: _Arrivals) -> Tensors:
        returned = self._take(gradients)
        if [tensor.shape for tensor in returned] != [tensor.shape for tensor in departed]:
            shapes, expected = (", ".join(str(list(t.shape)) for t in tensors) for tensors in (returned, departed))
            raise self._carrier.refused(self._stage + 1, f"gradients of shape {shapes}", expected)
        return tuple(gradient.to(tensor.dtype) for gradient, tensor in zip(returned, departed))

    # ---------------------------------------------------------------------------------------------------------- travel

    def _send(self, work: Work, tensors: Tensors, stage: int) -> None:
        headers = [TensorHeader.of(tensor, self._wire) for tensor in tensors]
        messages = [pack_header(work, headers), *(h.encode(tensor) for h, tensor in zip(headers, tensors))]
        self._sends.extend(self._carrier.send(stage, message) for message in messages)
        while self._sends and self._sends[0].is_done():  # whose memory is held no longer
            self._sends.popleft().wait()

    def _wait_for_sends(self, left: int) -> None:
        with self._timed("wait"):
            while len(self._sends) > left:
                self._sends.popleft().wait()

    def _take(self, arrivals: _Arrivals) -> Tensors:
        with self._timed("wait"):
            return arrivals.take()

    @contextmanager
    def _timed(self, phase: Literal["forward", "backward", "wait"]) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        setattr(self.times, phase, getattr(self.times, phase) + time.perf_counter() - begin)


class _Arrivals:
    """What one neighbour sends in a step, received by a thread in the order in which it is expected."""

    def __init__(self, carrier: Carrier, source: int, device: torch.device) -> None:
        self._carrier, self._source, self._device = carrier, source, device
        self._expected: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._arrived: queue.Queue[Tensors | Exception] = queue.Queue(_RECEIVED_AHEAD)
        self._is_closed = False
        threading.Thread(target=self._run, name=f"arrivals from stage {source}", daemon=True).start()

    def expect(self, work: Work) -> None:
        """Receive a message of ``work`` after those that are expected already."""
        self._expected.put(work)

    def close(self) -> None:
        """Expect no more. What has arrived is dropped, so the thread ends once nothing is being received."""
        self._is_closed = True
        self._expected.put(None)
        while not self._arrived.empty():
            self._arrived.get_nowait()

    def take(self) -> Tensors:
        """Wait for the next message; return its tensors, or raise why it did not come."""
        arrived = self._arrived.get()
        if isinstance(arrived, Exception):
            raise arrived
        return arrived

    def _run(self) -> None:
        while (work := self._expected.get()) is not None and not self._is_closed:
            try:
                self._arrived.put(self._receive(work))
            except Exception as error:  # noqa: BLE001 - raised in the thread that trains
                return self._arrived.put(error)

    def _receive(self, work: Work) -> Tensors:
        try:
            headers = parse_header(self._carrier.receive(self._source, HEADER_BYTES), work)
        except ValueError as error:
            expected = f"the {work.kind} of micro-batch {work.micro_batch + 1}"
            raise self._carrier.refused(self._source, str(error), expected) from error
        return tuple(h.decode(self._carrier.receive(self._source, h.size), self._device) for h in headers)
