"""What a peer of the torch engine says of itself has bounds."""

from __future__ import annotations

import struct
import zlib
from typing import Any, cast

import pytest
import torch

from training.exchange.base import ExchangeError
from training.exchange.codecs import codec_by_name
from training.exchange.error_feedback import MeanResiduals
from training.exchange.operations import Meter
from training.exchange.torch_mean import WeightedMean, Wire, gather


class Peer(Wire):
    """The way to one peer that sends what it was told to."""

    def __init__(self, said: bytes) -> None:
        super().__init__(0, 2, torch.device("cpu"), Meter())
        self._said = said

    def exchange(self, frames: Any, receive: Any) -> Any:
        assert receive == [len(self._said)]
        return self

    def wait(self) -> list[torch.Tensor]:
        return [torch.frombuffer(bytearray(self._said), dtype=torch.uint8)]


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0, 1e19])
def test_a_weight_that_cannot_be_names_its_sender(weight: float) -> None:
    said = bytes(8) + struct.pack("<dQ?", weight, zlib.crc32(b"x"), False)
    mean = WeightedMean(
        cast(Wire, Peer(said)), "x", torch.ones(2), 1.0, codec_by_name("fp32"), b"", "", MeanResiduals()
    )
    with pytest.raises(ExchangeError, match="rank 1 gave its values in 'x' the impossible weight"):
        mean.run()


def test_a_length_that_cannot_be_takes_no_memory() -> None:
    said = struct.pack("<IQ", 0xFFFFFFFF, zlib.crc32(b"x")) + bytes(500)
    with pytest.raises(ExchangeError, match="rank 1 has 4294967295 bytes"):
        gather(cast(Wire, Peer(said)), "x", b"")
