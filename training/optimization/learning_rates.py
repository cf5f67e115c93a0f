"""The learning rate of each step: by the options, or by a schedule of the user's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, SupportsFloat

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from profiles.errors import BadInput, where_it_failed
from profiles.optimisation import TrainingSettings
from training.numerics.schedule import learning_rate_at, warm_up_of

_HINT = "give (step, total_steps) -> share of learning_rate, or (optimizer), (optimizer, total_steps) -> scheduler"


class LearningRates:
    """The rates of a run, which depend on the step alone: so they are the same on all members, and after a resume.

    Args:
        peak: the rate that the options give for this batch.
        scheduler: ``scheduler(step, total_steps)`` returns the share of the peak for a step, from 0; or a class or
            function of an optimizer, or of ``optimizer`` and ``total_steps``, that returns one of
            ``torch.optim.lr_scheduler``; ``None``: as the options say.

    Raises:
        BadInput: the scheduler is neither, or needs figures of the training.
    """

    def __init__(
        self, settings: TrainingSettings, total_steps: int, peak: float, scheduler: Callable[..., Any] | None = None
    ) -> None:
        self._settings, self._total_steps, self._peak = settings, total_steps, peak
        self._warm_up = warm_up_of(settings, total_steps)
        self._share = scheduler if scheduler is not None and _is_of_step(scheduler) else None
        self._name = getattr(scheduler, "__name__", type(scheduler).__name__)
        self._scheduler: LRScheduler | None = None
        if scheduler is not None and self._share is None:
            self._scheduler = _made(scheduler, self._name, peak, total_steps)
        self._rates: list[float] = []
        """Of the scheduler, which computes one from the other."""

    def at(self, step: int) -> float:
        """Return the rate of a step, from 0.

        Raises:
            BadInput: the user's schedule gives none.
        """
        try:
            if self._scheduler is not None:
                return self._of_scheduler(self._scheduler, step)
            if self._share is not None:
                return self._peak * _checked(self._share(step, self._total_steps), step)
        except BadInput:
            raise
        except Exception as error:  # the user's own code may raise anything
            moment = f"step {step + 1} of {self._total_steps}"
            raise BadInput(f"lr_scheduler {self._name} fails in {moment}: {where_it_failed(error)}", _HINT) from error
        shape, decay = self._settings.lr_schedule, self._settings.lr_decay_share
        return self._peak * learning_rate_at(step, self._total_steps, self._warm_up, shape, 1.0, decay)

    def _of_scheduler(self, scheduler: LRScheduler, step: int) -> float:
        while len(self._rates) <= step:
            self._rates.append(_checked(scheduler.optimizer.param_groups[0]["lr"], len(self._rates)))
            scheduler.optimizer.step()
            scheduler.step()
        return self._rates[step]


def _is_of_step(function: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments, of which the first is no optimizer."""
    needed = _needed(function)
    return len(needed) == 2 and not needed[0].startswith("opt")


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [parameter.name for parameter in parameters if parameter.default is parameter.empty]


def _made(scheduler: Callable[..., Any], name: str, peak: float, total_steps: int) -> LRScheduler:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=peak)
    known = {"total_steps": total_steps} if "total_steps" in _needed(scheduler) else {}
    try:
        made = scheduler(optimizer, **known)
    except Exception as error:  # the user's own code may raise anything
        raise BadInput(f"lr_scheduler {name}: {error}", _HINT) from error
    if isinstance(made, ReduceLROnPlateau):
        hint = "take early_stopping_patience, or a loop of your own: muster.session()"
        raise BadInput("lr_scheduler ReduceLROnPlateau follows a figure of the training, which members lack", hint)
    if not isinstance(made, LRScheduler):
        raise BadInput(f"lr_scheduler {name} returned {type(made).__name__}, not a scheduler of torch", _HINT)
    return made


def _checked(rate: Any, step: int) -> float:
    try:
        value = float(rate) if isinstance(rate, SupportsFloat) else math.nan  # also a number of numpy
    except (TypeError, ValueError, RuntimeError):  # of several elements
        value = math.nan
    if math.isfinite(value) and value >= 0:
        return value
    raise BadInput(f"lr_scheduler gave {rate} in step {step + 1}, not a rate", _HINT)
