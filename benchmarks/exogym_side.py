"""What ``beside_exogym.py`` trains, here and with ExoGym; as a script, the side of ExoGym, run by ExoGym's Python.

ExoGym's trainer, nodes and strategies run as they are, but its members take turns in one process, and operations of
``torch.distributed`` happen in memory: on a busy machine, hundreds of small ones a step among processes take minutes.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class Rows:
    """Samples are rows of a tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Windows(Rows):
    """Every window of a text, as in ExoGym's example: so many characters, and the one after each."""

    def __init__(self, rows: torch.Tensor, length: int) -> None:
        super().__init__(rows)
        self.length = length

    def __len__(self) -> int:
        return len(self.rows) - self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index : index + self.length + 1]


class Language(nn.Module):
    """The loss of the GPT of ExoGym's example, in its shape ``small`` but for the length of the context."""

    def __init__(self, characters: int, context: int) -> None:
        super().__init__()
        gpt = import_module("nanogpt")  # lies in example/nanogpt of its repository
        shape = gpt.GPTConfig.gpt2_small()
        shape.vocab_size, shape.block_size = characters, context
        self.gpt = gpt.GPT(shape)

    def forward(self, block: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt((block[:, :-1], block[:, 1:]))
        return loss


class Digits(nn.Module):
    """The loss of a net of the layers of ExoGym's example for MNIST, for digits of 8 by 8; the label ends a row."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in ((1, 64), (64, 128)):
            for inputs in (before, width):
                layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2), nn.Dropout2d(0.25)]
        layers += [nn.Flatten(), nn.Linear(128 * 2 * 2, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)]
        self.layers = nn.Sequential(*layers)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(row[:, :64].view(-1, 1, 8, 8)), row[:, 64].long())

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Its trainer ends with weights and buffers but for the counters of batch norms."""
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def rate_at(rates: list[float], step: int) -> float:
    return rates[min(step, len(rates) - 1)]


def strategy_of(job: dict[str, Any]) -> Any:
    """Return ExoGym's strategy for a job: what its examples give to it."""
    rates = functools.partial(rate_at, job["rates"])
    options: dict[str, Any] = {"lr_scheduler": LambdaLR, "lr_scheduler_kwargs": {"lr_lambda": rates}}
    options["max_norm"] = job["norm"] or None
    inner = import_module("exogym.strategy.optim").OptimSpec(
        torch.optim.AdamW, lr=job["rate"], weight_decay=job["decay"]
    )
    strategies = import_module("exogym.strategy")
    match job["strategy"]:
        case "allreduce":
            return import_module("exogym.strategy.strategy").SimpleReduceStrategy(optim_spec=inner, **options)
        case "diloco":
            return strategies.DiLoCoStrategy(optim_spec=inner, H=job["interval"], **options)
        case "sparta":
            return strategies.SPARTAStrategy(optim_spec=inner, p_sparta=job["share"], **options)
    return strategies.DeMoStrategy(optim_spec=inner, **options)


class Turns:
    """``torch.distributed`` of members that take turns in one process; an operation happens when all have come to it.

    Each has a state of the random generator of its own, as its own process would.
    """

    def __init__(self) -> None:
        self._hub: Any = None
        self._members: list[Any] = []
        self.sent = 0
        """Bytes of the tensors that member 0 gave."""

    def spawn(self, function: Callable[..., None], args: Sequence[Any], nprocs: int, **_: Any) -> None:
        """Stand in for ``torch.multiprocessing.spawn``."""
        greenlets = import_module("greenlet")
        self._hub, (config, *rest) = greenlets.getcurrent(), args
        runs = [functools.partial(function, rank, copy.copy(config), *rest) for rank in range(nprocs)]
        self._members = [greenlets.greenlet(run) for run in runs]
        states, learns = [torch.get_rng_state()] * nprocs, [True] * nprocs
        while not all(member.dead for member in self._members):
            said = []
            for rank, member in enumerate(self._members):
                torch.set_rng_state(states[rank])
                torch.set_grad_enabled(learns[rank])
                said.append(member.switch())
                states[rank], learns[rank] = torch.get_rng_state(), torch.is_grad_enabled()
            if said[0] is not None:
                self._carry_out(said[0][0], [one[1] for one in said])

    def operation(self, name: str) -> Callable[..., Any]:
        """Return what stands in for an operation; it is done when it returns, also where it need not be."""

        def give(*tensors: Any, **_: Any) -> Any:
            self._hub.switch((name, tensors))
            return SimpleNamespace(wait=lambda: None)

        return give

    @torch.no_grad()
    def _carry_out(self, name: str, said: list[Any]) -> None:
        if name == "barrier":
            return
        own = [one[-1 if name == "all_gather" else 0] for one in said]
        self.sent += own[0].nbytes
        if name == "all_gather":
            for places, *_ in said:
                for place, value in zip(places, own, strict=True):
                    place.copy_(value)
            return
        found = torch.stack(own).sum(0) if name == "all_reduce" else own[0].clone()
        for tensor in own:
            tensor.copy_(found)


def prepare(members: int, apart: bool) -> Turns:
    """Put what is needed around ExoGym; ``apart``: with the mend of :func:`copy_master`."""
    turns, node, trainer = Turns(), import_module("exogym.train_node").TrainNode, import_module("exogym.trainer")
    for name in ("all_reduce", "broadcast", "all_gather", "barrier"):
        setattr(dist, name, turns.operation(name))
    dist.get_world_size = lambda: members  # type: ignore[assignment]  # members take turns
    dist.destroy_process_group = lambda: None  # type: ignore[assignment]  # there is none
    vars(trainer).update(_build_connection=lambda config: None)
    trainer.mp.spawn = turns.spawn
    whole = node.train

    def train(self: Any) -> Any:
        turns.sent = 0  # the first weights were broadcast
        return whole(self)

    node.train = train
    if apart:
        import_module("exogym.strategy.diloco").DiLoCoCommunicator._synchronize_master_model = copy_master
    return turns


def copy_master(self: Any, model: nn.Module) -> None:
    """What its DiLoCo does on a GPU. On a CPU, member 0 and the master share memory from the first exchange on, so that
    the difference of the two is zero in all others."""
    with torch.no_grad():
        for weight, master in zip(model.parameters(), self.master_model.parameters(), strict=True):
            weight.copy_(master)


def main(folder: Path) -> None:
    job = torch.load(folder / "job.pt", weights_only=True)
    model = Digits() if job["kind"] == "digits" else Language(job["characters"], job["context"])
    nn.Module.load_state_dict(model, job["first"])
    turns = prepare(job["members"], job["apart"])
    trainer = import_module("exogym").Trainer(model, Rows(job["rows"]), Rows(job["rows"][:1]), device="cpu")
    done = trainer.fit(
        num_epochs=1,
        strategy=strategy_of(job),
        num_nodes=job["members"],
        max_steps=job["steps"],
        batch_size=job["batch"],
        minibatch_size=job["batch"],
        shuffle=False,  # the rows come in order
        val_size=0,
        run_name="run",
    )
    torch.save({"state": done.state_dict(), "sent": turns.sent}, folder / "last.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
