"""Moving encoded frames between the members of a process group, with accounting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training.exchange.base import Traffic
from training.exchange.codecs import CHUNK_ELEMENTS, CastCodec, Codec


@dataclass(frozen=True)
class Transfer:
    """Frames under way."""

    work: dist.Work
    received: torch.Tensor
    sizes: list[int]

    def wait(self) -> list[torch.Tensor]:
        """Return one frame of every peer, in rank order.

        Raises:
            RuntimeError: a peer is gone, or the group's time-out passed.
        """
        self.work.wait()
        return list(torch.split(self.received, self.sizes))


class Wire:
    """The process group as a way for bytes.

    All transfers are ``all_to_all_single`` with unequal splits: the one collective that gloo and NCCL both carry out
    without copies of their own, whose size on the wire is exactly what is given to it.

    Args:
        device: CPU for gloo, this member's GPU for NCCL.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, traffic: Traffic) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.peers = [peer for peer in range(world_size) if peer != rank]
        self.traffic = traffic

    def piece_elements(self, codec: Codec) -> int:
        """Elements of one frame: small enough to overlap its arithmetic with the next transfer on a CPU.

        A collective ends with its slowest flow. Between more than two members smaller frames leave links idle for a
        shorter time then; two have one flow each way, and each frame costs processor time (docs/performance.md).
        """
        usual = CHUNK_ELEMENTS if self.world_size < 3 else CHUNK_ELEMENTS // 2
        return max(usual, codec.block) if self.device.type == "cpu" else 256 * CHUNK_ELEMENTS

    def exchange(self, frames: Sequence[torch.Tensor], receive: Sequence[int]) -> Transfer:
        """Start to send one frame to every peer and to receive one of ``receive`` bytes of each, in rank order."""
        data = torch.cat(list(frames)) if len(frames) != 1 else frames[0]
        received = torch.empty(sum(receive), dtype=torch.uint8, device=self.device)
        send = [frame.numel() for frame in frames]
        work = dist.all_to_all_single(received, data, self._splits(receive), self._splits(send), async_op=True)
        assert work is not None
        self.traffic.bytes_sent += sum(send)
        self.traffic.bytes_received += sum(receive)
        return Transfer(work, received, list(receive))

    def encode(self, codec: Codec, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` of this wire's device as bytes on it; fp32 shares memory with ``values``."""
        if values.numel() == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if isinstance(codec, CastCodec):
            return values.to(codec.dtype).view(torch.uint8)
        return codec.encode(values).to(self.device)

    def decode(self, codec: Codec, data: torch.Tensor, elements: int) -> torch.Tensor:
        """Return the fp32 values of :meth:`encode`; may share memory with ``data``."""
        if elements == 0:
            return torch.empty(0, device=self.device)
        if isinstance(codec, CastCodec) and data.is_cuda:
            return data.clone().view(codec.dtype).to(torch.float32)
        return codec.decode(data.to("cpu"), elements).to(self.device)

    def size(self, codec: Codec, elements: int) -> int:
        """Return the bytes of :meth:`encode`."""
        return codec.max_encoded_bytes(elements) if elements else 0

    def _splits(self, sizes: Sequence[int]) -> list[int]:
        return [*sizes[: self.rank], 0, *sizes[self.rank :]]
