"""The commanding side of orders: all members are asked, the largest answer is the step (:mod:`training.run.orders`).

Pure: messages in, messages out; no clock, no thread.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from training.records.events import AnswerEvent
from training.run.orders import OrderAction


@dataclass
class _Order:
    number: int
    action: OrderAction
    words: dict[str, Any]
    waits_for: set[int] = field(default_factory=set)
    answers: dict[int, int] = field(default_factory=dict)
    step: int | None = None
    done: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)


class GroupOrders:
    """The run's side.

    Args:
        present: returns the ranks that train at the moment; only these are waited for.
        send: sends a message to every worker, joining ones included: they then act like all others.
        ended: called with the number of an order that all have answered, the step, and why some could not carry it out.
        spread: largest distance of members in steps. An answer further ahead of the median is ignored: one member
            cannot postpone a stop for ever.
    """

    def __init__(
        self,
        present: Callable[[], Collection[int]],
        send: Callable[[dict[str, Any]], None],
        ended: Callable[[int, int, str], None],
        spread: float = math.inf,
    ) -> None:
        self._spread = spread
        self._present, self._send, self._ended = present, send, ended
        self.count = 0
        """Number of the newest order."""
        self._queue: deque[_Order] = deque()
        self._current: _Order | None = None

    def give(self, action: OrderAction, **words: Any) -> int:
        """Give an order and return its number; a stop replaces all earlier orders."""
        self.count += 1
        if action == "stop":
            self._queue.clear()
            self._current = None
        self._queue.append(_Order(self.count, action, words))
        self.look()
        return self.count

    def receive_answer(self, rank: int, answer: AnswerEvent) -> None:
        """Take a member's answer."""
        order = self._current
        if order is None or answer.order != order.number:
            return
        if answer.done and order.step is not None:
            order.done.add(rank)
            order.step = max(order.step, answer.step)
            if answer.failure:
                order.failures[rank] = answer.failure
        else:
            order.answers[rank] = answer.step
        self.look()

    def stop_waiting(self, number: int) -> None:
        """Stop waiting for answers; a silent member may be one step ahead of the others, which wait for it."""
        order = self._current
        if order is not None and order.number == number and order.step is None:
            self._name_step(order, self._farthest(order) + 1)
            self.look()

    def look(self) -> None:
        """Proceed if no answer is missing any more; to be called when a member has gone."""
        while self._current is not None or self._queue:
            order = self._current or self._begin(self._queue.popleft())
            missing = order.waits_for & set(self._present())
            if order.step is None:
                if missing - order.answers.keys():
                    return
                self._name_step(order, self._farthest(order))
            elif missing - order.done:
                return
            else:
                self._current = None
                if order.done:
                    self._ended(order.number, order.step, "; ".join(dict.fromkeys(order.failures.values())))

    def _begin(self, order: _Order) -> _Order:
        self._current = order
        order.waits_for = set(self._present())
        if order.action == "resume":  # all of them have paused after the same step
            self._name_step(order, 0)
        else:
            self._send({"command": "meet", "order": order.number})
        return order

    def _farthest(self, order: _Order) -> int:
        if not order.answers:
            return 0
        bound = statistics.median_low(order.answers.values()) + self._spread
        return max(step for step in order.answers.values() if step <= bound)

    def _name_step(self, order: _Order, step: int) -> None:
        order.step = step
        self._send({"command": order.action, "order": order.number, "at_step": step, **order.words})
