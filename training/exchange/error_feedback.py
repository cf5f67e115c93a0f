"""Error feedback: what a lossy codec dropped is added to the next vector of the same stream (Seide et al. 2014;
Karimireddy et al. 2019, arXiv 1901.09847, algorithm 2).

A mean is encoded twice: every member encodes its contribution, and the averaging owner encodes the mean
(:mod:`training.exchange.residuals`). Each keeps what its own encoding lost, so the sum of what was applied differs from
the sum of what was intended by the loss of the last round only, however many rounds there were (DoubleSqueeze: Tang et
al. 2019, arXiv 1905.05957).
"""

from __future__ import annotations

from collections.abc import Mapping

from training.exchange.base import Exchange, MeanResult
from training.exchange.codecs import Codec, EncodedVector, roundtrip
from training.exchange.residuals import Residual
from training.exchange.staging import decoded_on_device, is_asynchronous, to_device, to_host
from training.lazy import torch


class ErrorFeedback:
    """A member's residual, for its contributions to one stream.

    Args:
        exchange: computes the means.
        stream: empty: what the codec drops is not kept; contributions that arrived too late always are.
    """

    def __init__(self, codec: Codec, exchange: Exchange, stream: str) -> None:
        self._codec, self._exchange = codec, exchange
        self.stream = stream
        self.residual: torch.Tensor | None = None
        """Flat fp32 on the device of the values; ``None`` for zero. Part of a snapshot."""

    def compensate(self, values: torch.Tensor) -> torch.Tensor:
        """Add the residual to ``values`` in place and return them: the vector to send."""
        return values if self.residual is None else values.add_(to_device(self.residual, values.device))

    def settle(self, sent: torch.Tensor | EncodedVector, weight: float, result: MeanResult) -> None:
        """Keep the part of ``sent`` that is not in the mean, according to the mean's result.

        Args:
            sent: what :meth:`compensate` returned; encoded, where what the codec drops is not kept.
        """
        if not result.is_finite:
            return  # the residual stays as it was
        if not isinstance(sent, torch.Tensor):
            if weight and not result.left_out:
                self.residual = None
                return
            sent = sent.decode()
        if weight == 0.0:
            self.residual = sent
            return
        decoded = self._decoded(sent) if self.stream else None
        lost = None if decoded is None else torch.sub(sent, decoded, out=decoded)
        if result.left_out and lost is None:
            lost = torch.zeros_like(sent)
        for start, stop in result.left_out:
            assert lost is not None
            lost[start:stop] = sent[start:stop]
        self.residual = lost

    def _decoded(self, sent: torch.Tensor) -> torch.Tensor:
        """Return what the other members decode from ``sent``."""
        if not is_asynchronous(sent.device):
            return roundtrip(self._codec, sent)
        if self._codec.works_on_devices:
            return decoded_on_device(sent, self._codec)
        return to_device(roundtrip(self._codec, to_host([sent], torch.float32)), sent.device)

    def tensors(self, suffix: str = "") -> dict[str, torch.Tensor]:
        """Return the residuals for a snapshot: this member's own, and the one it keeps as an owner of means.

        Args:
            suffix: of the names, to distinguish streams.
        """
        tensors = {} if self.residual is None else {f"residual{suffix}": self.residual}
        mean_residual = self._exchange.residual(self.stream) if self.stream else None
        return tensors if mean_residual is None else tensors | mean_residual.tensors(f"mean_residual{suffix}")

    def load(self, tensors: Mapping[str, torch.Tensor], suffix: str = "") -> None:
        """Restore what :meth:`tensors` returned."""
        self.residual = tensors.get(f"residual{suffix}")
        if self.stream and (mean_residual := Residual.of(tensors, f"mean_residual{suffix}")) is not None:
            self._exchange.restore_residual(self.stream, mean_residual)
