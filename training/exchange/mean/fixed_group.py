"""The exchange of a group whose members stay the same: means and gathers over one mesh, without a coordinator."""

from __future__ import annotations

from typing import TypeVar

from training.exchange.base import Contribution, Exchange, ExchangeError, Group, MeanResult, Pending
from training.exchange.mean.mesh import Mesh
from training.exchange.mean.mesh_operations import MeshGather, MeshMean, MeshOperation, Meter
from training.exchange.residuals import MeanResiduals, Residual

R = TypeVar("R")


class FixedGroup(Exchange):
    """A member of a group that nobody joins, and that ends for all when one of them is lost.

    Args:
        mesh: of this exchange alone, whoever formed it closes it.
    """

    engine = "mesh"

    def __init__(self, mesh: Mesh) -> None:
        self.rank, self._mesh, self._meter = mesh.rank, mesh, Meter()
        self.traffic = self._meter.traffic
        self._residuals = MeanResiduals()

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._mesh.members)

    def residual(self, stream: str) -> Residual | None:
        return self._residuals.whole_vector(stream)

    def restore_residual(self, stream: str, residual: Residual) -> None:
        self._residuals.restore(stream, residual)

    def _start_mean(self, contribution: Contribution, waits: bool = False) -> Pending[MeanResult]:
        buffers = self._mesh.buffer_pool
        mean = MeshMean(self.operations, contribution, self._meter, self._residuals, {}, buffers, borrows=waits)
        return self._start(mean, waits)

    def _start_gather(
        self, name: str, payload: bytes, group: Group = (), waits: bool = False
    ) -> Pending[dict[int, bytes]]:
        return self._start(MeshGather(self.operations, name, payload, self._meter, group), waits)

    def _start(self, operation: MeshOperation[R], waits: bool) -> MeshOperation[R]:
        def end(error: Exception | None) -> None:
            self._meter.update(self._mesh.bytes_sent, self._mesh.bytes_received)
            try:
                if error is None:
                    operation.complete()
            except Exception as problem:  # noqa: BLE001 - raised where the operation is waited for
                error = problem
            operation.finish(None if error is None else ExchangeError(str(error)))

        operation.transfer = operation.begin(self._mesh, end)
        operation.transfer.submit(start=not waits)
        return operation
