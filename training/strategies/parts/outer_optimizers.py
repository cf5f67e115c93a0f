"""Outer optimizers: how the averaged pseudo-gradient of a round moves the anchor.

All work in place on flat fp32 vectors, on the host or on a device. Products, sums, roots and quotients stay separate
operations (no fused multiply-add), so that members on different hardware compute the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import field_validator, model_validator

from profiles.declarations import OptionError, Section, option
from profiles.errors import BadInput, RunFailed
from training.exchange.codecs import all_finite
from training.exchange.staging import moved
from training.lazy import torch
from training.strategies.costs import Start
from training.tasks.user_code import call_factory, find_factory

MANY_ROUNDS = 100
_TILE = 1 << 18
"""Elements a tile of an outer step, whose four vectors fit into a processor's cache."""
_TILE_OF_A_DEVICE = 1 << 22
"""The same for a device, where each tile costs several kernel launches."""
_ADAM_RATE, _ADAM_MOMENTUM, _ADAM_SECOND, _ADAM_EPSILON = 0.3, 0.9, 0.99, 0.1
"""The large epsilon is what DiLoCo (arXiv 2311.08105) needed for an outer Adam; the second beta is FedAdam's."""


def rate_option(alias: str = "") -> Any:
    """Declare the outer learning rate."""
    return option(0.0, "outer learning rate; 0: automatic", ge=0, advanced=True, alias=alias)


def momentum_option(alias: str = "") -> Any:
    """Declare the outer momentum."""
    help_text = "outer momentum, of adamw its first beta; -1: automatic"
    return option(-1.0, help_text, ge=-1, lt=1, advanced=True, alias=alias)


class OuterOptions(Section):
    """Options of a strategy with an outer optimizer."""

    outer_optimizer: str = option(
        "nesterov",
        "outer optimizer: nesterov, sgd (heavy ball), adamw, or file.py:function of your own",
        kind="location",
        advanced=True,
    )
    outer_lr: float = rate_option()
    outer_momentum: float = momentum_option()
    outer_weight_decay: float = option(0.0, "weight decay of the outer adamw", ge=0, lt=1, advanced=True)

    @field_validator("outer_optimizer")
    @classmethod
    def _known_optimizer(cls, name: str) -> str:
        file, _, function = name.rpartition(":")
        if name in _OPTIMIZERS or (file.endswith(".py") and function.isidentifier()):
            return name
        raise OptionError("outer_optimizer", f"one of {', '.join(_OPTIMIZERS)}, or file.py:function")

    @model_validator(mode="after")
    def _decay_is_used(self) -> OuterOptions:
        if self.outer_weight_decay and self.outer_optimizer != "adamw":
            raise OptionError("outer_weight_decay", f"outer_optimizer = {self.outer_optimizer} has none; adamw has")
        return self

    def outer_rates(self, rounds: int, start: Start, alone: bool = False) -> tuple[float, float]:
        """Return outer learning rate and momentum of a run with this many rounds.

        With the defaults, a member that trains alone trains as without a strategy.

        A trained model takes the plain mean (1.0 / 0): momentum adds to a learning rate that is right already, and a
        published Whisper ended worse with it than on one machine (docs/inside/planning.md). From scratch the paper's
        0.7 / 0.9 needs many rounds for its momentum to pay: with 30, 1.0 / 0.5 kept 43 % of the gain of per-step
        averaging and 0.7 / 0.9 kept 6 % (docs/reference/strategies.md, three seeds). Both assume Nesterov momentum.
        """
        rate, momentum = 1.0, 0.0
        if self.outer_optimizer == "adamw":
            rate, momentum = _ADAM_RATE, _ADAM_MOMENTUM
        elif self.outer_optimizer == "nesterov" and start == "scratch" and not alone:
            rate, momentum = (0.7, 0.9) if rounds >= MANY_ROUNDS else (1.0, 0.5)
        return self.outer_lr or rate, self.outer_momentum if self.outer_momentum >= 0 else momentum

    def make_outer(self, rounds: int, start: Start, alone: bool = False) -> OuterOptimizer:
        """Return a new outer optimizer for one flat vector."""
        rate, momentum = self.outer_rates(rounds, start, alone)
        if self.outer_optimizer not in _OPTIMIZERS:
            return UserOuterOptimizer(self.outer_optimizer, rate, momentum)
        return _OPTIMIZERS[self.outer_optimizer](rate, momentum, self.outer_weight_decay)


class OuterOptimizer(ABC):
    """Base class: the outer optimizer of one flat vector.

    Args:
        rate: outer learning rate.
        momentum: below 1.
        decay: decoupled weight decay; ignored by optimizers without one.
    """

    names: tuple[str, ...]
    """Names of its state vectors in a snapshot."""
    works_on_devices: ClassVar[bool] = True
    """Whether all devices compute the same bits."""

    def __init__(self, rate: float, momentum: float, decay: float = 0.0) -> None:
        self.rate, self.momentum, self.decay = rate, momentum, decay
        self._vectors: tuple[torch.Tensor, ...] = ()

    def attach(self, anchor: torch.Tensor) -> None:
        """Allocate zero state for ``anchor``."""
        self._vectors = tuple(torch.zeros_like(anchor) for _ in self.names)

    def keep_on(self, device: torch.device) -> None:
        """Move the state to the device of the anchor, or to the host."""
        self._vectors = tuple(moved(vector, device) for vector in self._vectors)

    @abstractmethod
    def step(self, anchor: torch.Tensor, mean: torch.Tensor, round_: int) -> None:
        """Move ``anchor`` in place by the averaged pseudo-gradient.

        Args:
            anchor: flat fp32.
            mean: pseudo-gradient (anchor minus weights, mean over the members), flat fp32; not modified.
            round_: number of the round, from 1.
        """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the state vectors by name."""
        return dict(zip(self.names, self._vectors, strict=True))

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`tensors` returned."""
        for name, vector in self.tensors().items():
            vector.copy_(tensors[name])


class Nesterov(OuterOptimizer):
    """``m = mu m + d``, ``anchor -= rate (d + mu m)`` (Sutskever et al. 2013, eq. 4), as in DiLoCo."""

    names = ("momentum",)

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, round_: int) -> None:
        tile = _tile_of(anchor)
        scratch = torch.empty_like(anchor[:tile])
        for start in range(0, anchor.numel(), tile):
            anchor_tile, velocity, delta = (vector[start : start + tile] for vector in (anchor, self._vectors[0], mean))
            velocity.mul_(self.momentum).add_(delta)
            buffer = scratch[: anchor_tile.numel()]
            anchor_tile.sub_(torch.mul(self._direction(velocity, delta, buffer), self.rate, out=buffer))

    def _direction(self, velocity: torch.Tensor, delta: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return torch.mul(velocity, self.momentum, out=buffer).add_(delta)


class HeavyBall(Nesterov):
    """``m = mu m + d``, ``anchor -= rate m`` (Polyak 1964); with ``mu = 0`` averaging with a step size."""

    def _direction(self, velocity: torch.Tensor, delta: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        return velocity


class AdamW(OuterOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2); as an outer
    optimizer FedAdam (Reddi et al. 2021, arXiv 2003.00295).

    ``m = b1 m + (1 - b1) d``, ``v = b2 v + (1 - b2) d^2``,
    ``anchor -= rate (decay anchor + m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps))``.
    """

    names = ("first", "second")

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, round_: int) -> None:
        beta1, beta2 = self.momentum, _ADAM_SECOND
        correction1, correction2 = 1.0 / (1.0 - _power(beta1, round_)), 1.0 / (1.0 - _power(beta2, round_))
        tile = _tile_of(anchor)
        for start in range(0, anchor.numel(), tile):
            anchor_tile, delta = anchor[start : start + tile], mean[start : start + tile]
            first_moment, second_moment = (vector[start : start + tile] for vector in self._vectors)
            first_moment.mul_(beta1).add_(delta * (1.0 - beta1))
            second_moment.mul_(beta2).add_((delta * delta).mul_(1.0 - beta2))
            root = (second_moment * correction2).sqrt_().add_(_ADAM_EPSILON)
            anchor_tile.mul_(1.0 - self.rate * self.decay).sub_((first_moment * correction1).div_(root).mul_(self.rate))


class UserOuterOptimizer(OuterOptimizer):
    """A user-defined outer optimizer: ``function(anchor, mean, state, rate, momentum)``.

    The function moves ``anchor`` in place and may keep flat fp32 vectors in ``state`` (at first empty) for the next
    round. Members stay bit-equal if it is elementwise, without fused operations and without random numbers.
    """

    names = ()
    works_on_devices: ClassVar[bool] = False

    def __init__(self, path: str, rate: float, momentum: float) -> None:
        super().__init__(rate, momentum)
        self._path, self._function = path, find_factory(path, "outer_optimizer")
        self._state: dict[str, torch.Tensor] = {}

    def step(self, anchor: torch.Tensor, mean: torch.Tensor, round_: int) -> None:
        """See :meth:`OuterOptimizer.step`.

        Raises:
            BadInput: the function raised, or kept something other than flat fp32 tensors.
            RunFailed: it made weights that are not finite.
        """
        with torch.no_grad():
            call_factory(self._function, self._path, anchor, mean, self._state, self.rate, self.momentum)
        for name, value in self._state.items():
            if not (isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.dim() == 1):
                raise BadInput(f"{self._path} keeps something else as '{name}'", "keep flat fp32 tensors")
        if not all_finite(anchor):
            raise RunFailed(f"{self._path} made weights that are not finite in round {round_}", "lower outer_lr")

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"own/{name}": value for name, value in self._state.items()}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        tensors_of_function = {name: value.clone() for name, value in tensors.items() if name.startswith("own/")}
        self._state = {name.removeprefix("own/"): value for name, value in tensors_of_function.items()}


_OPTIMIZERS: dict[str, type[OuterOptimizer]] = {"nesterov": Nesterov, "sgd": HeavyBall, "adamw": AdamW}


def _tile_of(vector: torch.Tensor) -> int:
    """Return the elements of a tile where a vector is."""
    return _TILE if vector.device.type == "cpu" else _TILE_OF_A_DEVICE


def _power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` by repeated multiplication: math libraries differ in the last bit."""
    product = 1.0
    for _ in range(exponent):
        product *= base
    return product
