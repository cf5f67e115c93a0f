"""Stock ways of training in parallel on a small transformer: what one member does, with any backend.

``single`` is one process with the whole batch; all others must have its losses.
"""

from __future__ import annotations

import copy
import importlib
import os
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

STEPS, BATCH, WORDS, WIDTH, HEAD, LENGTH = 3, 24, 97, 48, 4, 12
"""The third loss follows from how large gradients were: Adam's first step does not. Twelve heads and a length that two,
three and four ranks divide; 97 words leave the last one less."""


class Block(nn.Module):
    """Pre-norm attention and a feed-forward layer.

    As in Whisper the keys have no bias. It would move all scores of a query alike, so its gradient would be zero but
    for rounding, and Adam makes whole steps of what is left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=name != "k") for name in "qkvo")
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return out


class Model(nn.Module):
    """Four blocks, a stage each for two ranks with two; embedding and head may be on other machines."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.emb: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS)
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.emb(x) if self.emb is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


device = torch.device("cpu")
"""Where the models are."""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)).to(device)
    return words[:, :-1].contiguous(), words[:, 1:]


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW that takes a gradient's rounding (1e-9) for what it is, not for a whole step."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, foreach=False)  # which takes no mixture with DTensors


def train(model: nn.Module, rank: int = 0, parts: int = 1) -> list[float]:
    """Train on this member's part of each batch; return the mean losses of all."""
    optimizer, losses = adam(model), []
    mine = slice(rank * BATCH // parts, (rank + 1) * BATCH // parts)
    for step in range(STEPS):
        x, y = batch(step)
        loss = loss_of(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().float().clone()
        if parts > 1:
            dist.all_reduce(total)
        losses.append(total.item() / parts)
    return losses


def single(rank: int, world: int) -> Any:
    return train(Model())


def single_state(rank: int, world: int) -> Any:
    train(model := Model())
    return {name: value.numpy() for name, value in model.state_dict().items()}


def single_bf16(rank: int, world: int, parts: str) -> Any:
    """As ``fsdp2_bf16`` on so many ranks: weights and gradients of a part in bf16, the rest in fp32."""
    model, losses = Model(), []
    optimizer = adam(model)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        told, sums = [], [torch.zeros_like(parameter) for parameter in model.parameters()]
        for piece, words in zip(x.chunk(int(parts)), y.chunk(int(parts))):
            low = copy.deepcopy(model).to(torch.bfloat16)
            loss = loss_of(low(piece), words)
            loss.backward()
            for total, parameter in zip(sums, low.parameters()):
                assert parameter.grad is not None
                total += parameter.grad.float()
            told.append(float(loss))
        for parameter, total in zip(model.parameters(), sums):
            parameter.grad = total / int(parts)
        optimizer.step()
        losses.append(sum(told) / int(parts))
    return losses


def ddp(rank: int, world: int) -> Any:
    return train(nn.parallel.DistributedDataParallel(Model(), bucket_cap_mb=0.2), rank, world)


def _sharded(rank: int, world: int, shape: tuple[int, ...], **options: Any) -> tuple[Model, list[float]]:
    model, mesh = Model(), init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model, train(model, rank, world)


def fsdp2(rank: int, world: int) -> Any:
    return _sharded(rank, world, (world,))[1]


def fsdp2_state(rank: int, world: int) -> Any:
    """The state dict of the first one, where the whole weights are put together."""
    model, _ = _sharded(rank, world, (world,))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {name: value.cpu().numpy() for name, value in whole.items()}


def fsdp2_bf16(rank: int, world: int) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _sharded(rank, world, (world,), mp_policy=policy)[1]


def hsdp(rank: int, world: int) -> Any:
    return _sharded(rank, world, (2, world // 2))[1]


def tp(rank: int, world: int) -> Any:
    model, mesh = Model(), init_device_mesh(device.type, (world,))
    for block in model.blocks:
        plan = {
            **dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()),
            "o": RowwiseParallel(),
            "down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)
    return train(model)


def tp_sp(rank: int, world: int) -> Any:
    """Tensor and sequence parallel, with sharded embedding and head."""
    model, mesh = Model(), init_device_mesh(device.type, (world,))
    for block in model.blocks:
        plan: dict[str, Any] = {
            **{name: SequenceParallel(use_local_output=False) for name in ("ln1", "ln2")},
            **{name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")},
            **{name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")},
        }
        parallelize_module(block, mesh, plan)
    ends: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends)
    return train(model)


def _pipeline(rank: int, world: int, schedule: Any, stages_each: int = 1) -> list[float]:
    total = world * stages_each
    parts, stages = [], []
    state = Model().state_dict()
    for index in range(rank, total, world):
        part = Model()
        part.load_state_dict(state)
        cut = [round(number * len(part.blocks) / total) for number in range(total + 1)]
        part.blocks = nn.ModuleList(list(part.blocks)[cut[index] : cut[index + 1]])
        part.emb = part.emb if index == 0 else None
        part.head = part.head if index == total - 1 else None
        parts.append(part)
        stages.append(PipelineStage(part, index, total, device))
    runner = schedule(stages if stages_each > 1 else stages[0], n_microbatches=6, loss_fn=loss_of)
    optimizer, losses = adam(*parts), []
    for step in range(STEPS):
        x, y = batch(step)
        told: list[torch.Tensor] = []
        optimizer.zero_grad()
        last = rank == world - 1
        runner.step(*([x] if rank == 0 else []), **({"target": y, "losses": told} if last else {}))
        optimizer.step()
        if last:
            losses.append(float(torch.stack(told).mean()))
    return losses


def gpipe(rank: int, world: int) -> Any:
    return _pipeline(rank, world, ScheduleGPipe)


def one_f_one_b(rank: int, world: int) -> Any:
    return _pipeline(rank, world, Schedule1F1B)


def interleaved(rank: int, world: int) -> Any:
    return _pipeline(rank, world, ScheduleInterleaved1F1B, stages_each=2)


def as_on_mps(rank: int, world: int, case: str) -> Any:
    """Another case, where the device's module has no more than that of MPS."""
    from training.exchange.torch_backend.mps import complete

    whole, lacking = torch.cpu, ModuleType("lacking")
    for name in torch.mps.__all__:
        setattr(lacking, name, getattr(whole, name, getattr(torch.mps, name)))
    complete(lacking)
    torch.cpu = lacking
    try:
        return globals()[case](rank, world)
    finally:
        torch.cpu = whole


def on_cuda(rank: int, world: int, case: str) -> Any:
    """Another case with all members' tensors on one GPU."""
    global device
    device = torch.device("cuda", 0)
    try:
        return globals()[case](rank, world)
    finally:
        device = torch.device("cpu")


def strided(rank: int, world: int) -> Any:
    """A reduction of memory with gaps; gloo gets it wrong."""
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))
    parts = [torch.empty(8, 6) for _ in range(world)]
    dist.all_gather(parts, whole.clone())
    dist.all_reduce(whole[::2, 1:4].t())
    return whole.tolist(), torch.stack(parts).sum(0).tolist(), parts[rank].tolist()


_kept: list[Any] = []
"""Groups of gloo. A callback of a hook may hold the last reference to its group in a thread of that group, which would
end the process as it cannot wait for itself."""


def run(case: str, backend: str, rank: int, world: int, store: str, certificates: str) -> Any:
    """Carry a case out as one member; the members meet at the file ``store``.

    Args:
        case: a function of this module, or ``module:function``, or ``module:function:argument``.
    """
    torch.manual_seed(0)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if Path("/sys/class/net/lo").exists() else "lo0")
    if backend == "muster":
        os.environ.update(MUSTER_CERTIFICATES=f"{certificates}/member-{rank}", MUSTER_RUN_ID="run")
        import training.exchange.torch_backend.process_group  # noqa: F401 - registers the backend
    module, name, *arguments = case.split(":") if ":" in case else (__name__, case)
    function = getattr(importlib.import_module(module), name)
    meeting = dist.FileStore(store, world)
    dist.init_process_group(backend, store=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    if backend == "gloo":
        _kept.append(dist.group.WORLD)
    try:
        result = function(rank, world, *arguments)
        if backend == "gloo":  # its groups fail to start where a member that has started leaves before the others have
            meeting.set(f"ended-{rank}", "")
            meeting.wait([f"ended-{member}" for member in range(world)])
        return result
    finally:
        dist.destroy_process_group()
