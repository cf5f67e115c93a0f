"""Validation of a strategy's cost model before the planner uses it, since anyone may write a strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import TypeVar

from profiles.declarations import OptionsByOwner
from profiles.errors import BadInput, MusterError, where_it_failed
from profiles.quantities import time_text
from training.exchange.codecs import codec_by_name
from training.strategies.costs import Compute, CostModel, Learning, RunSpec, SyncSchedule

T = TypeVar("T")

MAX_SCHEDULES = 1000


class CheckedCosts(CostModel):
    """A cost model whose answers are checked to be possible.

    A complaint but possible guess passes: the run measures the real figure, which corrects the next plan.

    Args:
        stated: the strategy's cost model.
        name: of the strategy, for messages.

    Raises:
        BadInput: (from every function) it raised, or returned an impossible value: a share above 1, an interval of 0,
            NaN.
    """

    def __init__(self, stated: CostModel, name: str) -> None:
        self._stated, self._name = stated, name
        for attribute in CostModel.__annotations__:
            setattr(self, attribute, getattr(stated, attribute))
        for codec in self.codecs:
            self._checked("codecs", partial(codec_by_name, codec), lambda _: True, "")
        self._checked("codecs", lambda: self.codecs, bool, "none")
        for attribute in ("vectors", "merge_ns", "group"):
            self._checked(attribute, partial(getattr, self, attribute), _is_amount, "no finite number of at least 0")

    def _checked(self, attribute: str, ask: Callable[[], T], is_valid: Callable[[T], bool], complaint: str) -> T:
        problem = f"strategy '{self._name}': its costs cannot be used: {attribute}"
        hint = f"correct its cost model, or set costs = None: then '{self._name}' is used only when it is asked for"
        try:
            answer = ask()
            valid = is_valid(answer)
        except Exception as error:  # user code may raise anything
            reason = error.message if isinstance(error, MusterError) else where_it_failed(error)
            raise BadInput(f"{problem}: {reason}", hint) from error
        if not valid:
            raise BadInput(f"{problem} gives {answer}: {complaint}", hint)
        return answer

    def with_options(self, settings: OptionsByOwner) -> CostModel:
        stated = self._checked("with_options", lambda: self._stated.with_options(settings), lambda _: True, "")
        return self if stated is self._stated else CheckedCosts(stated, self._name)

    def device_vectors(self, error_feedback: bool) -> float:
        ask = partial(self._stated.device_vectors, error_feedback)
        return self._checked("device_vectors", ask, _is_amount, "no finite number of at least 0")

    def why_not_ranked(self, run: RunSpec) -> str:
        return self._checked(
            "why_not_ranked", lambda: self._stated.why_not_ranked(run), lambda why: isinstance(why, str), "no text"
        )

    def why_unsupported(self, run: RunSpec, schedule: SyncSchedule) -> str:
        def ask() -> str:
            return self._stated.why_unsupported(run, schedule)

        return self._checked("why_unsupported", ask, lambda why: isinstance(why, str), "no text")

    def elements(self, trainable: int) -> int:
        return self._checked(
            "elements", lambda: self._stated.elements(trainable), _is_amount, "no number of parameters"
        )

    def carried(self, trainable: int, codec: str) -> int:
        ask = partial(self._stated.carried, trainable, codec)
        return self._checked("carried", ask, _is_amount, "no number of parameters")

    def longest(self, trainable: int) -> int:
        return self._checked("longest", lambda: self._stated.longest(trainable), _is_amount, "no number of parameters")

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        def ask() -> list[SyncSchedule]:
            return list(islice(self._stated.sync_schedules(run), MAX_SCHEDULES + 1))

        complaint = f"at most {MAX_SCHEDULES}, with an interval of at least 1 and a delay of at least 0"
        schedules = self._checked("sync_schedules", ask, _are_schedules, complaint)
        return iter(schedules)

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        ask = partial(self._stated.hidden, exchange, compute, schedule, settings)
        complaint = f"no part of an exchange of {time_text(exchange)}"
        return self._checked("hidden", ask, lambda seconds: 0 <= seconds <= exchange, complaint)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        ask = partial(self._stated.learning, run, schedule, effective_members)
        complaint = "a share is at most 1, a loss at least -1, a source one of its sources"
        return self._checked("learning", ask, _is_learning, complaint)

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        return self._checked("settings", partial(self._stated.settings, run, schedule), lambda _: True, "")


def _is_amount(value: float) -> bool:
    return math.isfinite(value) and value >= 0


def _are_schedules(schedules: list[SyncSchedule]) -> bool:
    return len(schedules) <= MAX_SCHEDULES and all(one.interval >= 1 and one.delay >= 0 for one in schedules)


def _is_learning(learning: Learning) -> bool:
    return (
        math.isfinite(learning.share)
        and learning.share <= 1 + 1e-9
        and math.isfinite(learning.loss)
        and learning.loss >= -1
    )
