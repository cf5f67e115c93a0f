"""What strategies share that train for some steps and then merge their weights by an outer step, whole or in parts."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from training.events import SyncEvent
from training.exchange.base import Exchange, Traffic
from training.exchange.codecs import Codec, codec_by_name
from training.lazy import nn, torch
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.merged_part import MeanOfDeltas, MergedPart, PartSpec
from training.strategies.outer import OuterOptimizer
from training.strategies.weights import flatten


class OuterStrategy(Strategy):
    """Members hold weights of their own between two merges; the anchors, which are equal on all, stand for the group.

    Every part begins a round when its :attr:`~MergedPart.inner` has come to the interval, and merges the round's result
    so many steps later as the overlap says.
    """

    anchored = True
    merges_alone_at_the_end: ClassVar[bool] = False
    """Whether the last, shorter rounds move the anchors by the merged delta, and not by an outer step."""
    interval: int
    """Steps from round to round of a part."""
    delay: int
    """Steps that an exchange overlaps with."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._codec: Codec = codec_by_name(self.codec(context.settings))
        self._parts: list[MergedPart] = []
        self._rounds = 0
        self._reported = Traffic()

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._parts = self.parts(model)

    @abstractmethod
    def parts(self, model: nn.Module) -> list[MergedPart]:
        """Return the parts of a model's trainable parameters, each once and together all of them."""

    @abstractmethod
    def new_outer(self) -> OuterOptimizer:
        """Return an outer optimizer for one part."""

    @abstractmethod
    def kept(self, part: MergedPart) -> torch.Tensor:
        """Return the flat weights with which this member goes on after the anchor of a part has moved."""

    def make_part(self, place: PartSpec, merge: Callable[..., MeanOfDeltas] = MeanOfDeltas) -> MergedPart:
        """Return a part at this place, which does what the settings say.

        Args:
            merge: makes the merge of exchange, codec and stream.
        """
        settings, exchange = self.context.settings, self._exchange
        # A delta that came too late always travels with the next one; alone, nothing is encoded.
        keeps_loss = settings.error_feedback and exchange.engine != "solo" and self._codec.name != "fp32"
        how = merge(exchange, self._codec, place.name if keeps_loss else "")
        compares, warn = bool(settings.verify_interval), self.context.warn
        return MergedPart(place, how, self.new_outer(), self.interval, compares, warn, self._refusals)

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        for part in self._parts:
            part.begin_step(weight)

    @property
    def steps_to_average(self) -> int | None:
        return self.delay if any(part.inner + 1 >= self.interval for part in self._parts) else None

    def end_step(self) -> SyncEvent | None:
        for part in self._parts:
            part.inner += 1
        merged = [(part, self.merge(part)) for part in self._parts if part.under_way and part.inner >= self.delay]
        started = [part for part in self._parts if part.inner >= self.interval]
        for part in started:
            part.start()
        if not self.delay:
            merged += [(part, self.merge(part)) for part in started]
        return self._report(merged)

    def finish(self) -> SyncEvent | None:
        """Merge what is left; after it all members hold the anchors."""
        merged = [(part, self.merge(part)) for part in self._parts if part.under_way]
        left = [part for part in self._parts if not self.holds_anchor(part)]
        for part in left:
            part.start()
        merged += [(part, self.merge(part, last=True)) for part in left]
        return self._report(merged)

    def merge(self, part: MergedPart, last: bool = False) -> float | None:
        """Merge a part, at the end of the training the ``last`` time; return the drift that is told of it."""
        drift = part.collect((lambda one: one.anchor) if last else self.kept, last and self.merges_alone_at_the_end)
        self._members = part.members
        self._rounds += 1
        return drift

    def _report(self, merged: list[tuple[MergedPart, float | None]]) -> SyncEvent | None:
        """Tell of the parts that were merged; no byte is told of twice where exchanges overlap."""
        if not merged:
            return None
        part, now = merged[-1][0], self._exchange.traffic.copy()
        begun = min((one.before for one, _ in merged), key=lambda at: at.bytes_sent + at.bytes_received)
        sooner = begun.bytes_sent + begun.bytes_received >= self._reported.bytes_sent + self._reported.bytes_received
        traffic, self._reported = now.since(begun if sooner else self._reported), now
        drifts = [drift for _, drift in merged if drift is not None]
        norms = [norm for one, _ in merged if (norm := one.delta_norm) is not None]
        alike = min((found for one, _ in merged if (found := one.correlation) is not None), default=None)
        norm, drift = math.hypot(*norms) if norms else None, max(drifts, default=None)
        return sync_event(traffic, self._rounds, self._members, part.digest, drift, norm, alike)

    def holds_anchor(self, part: MergedPart) -> bool:
        """Whether the model holds the anchor of a part, and nothing of its own since."""
        return not part.inner and not part.under_way

    @property
    def synchronised(self) -> bool:
        return all(map(self.holds_anchor, self._parts))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The anchors."""
        if all(map(self.holds_anchor, self._parts)):
            yield
            return
        current = [flatten(part.place.tensors()) for part in self._parts]
        for part in self._parts:
            part.hold(part.anchor)
        try:
            yield
        finally:
            for part, values in zip(self._parts, current, strict=True):
                part.hold(values)

    for_newcomer = consensus

    # ------------------------------------------------------------------------------------------------------ snapshots

    def prefix(self, index: int) -> str:
        """Return what stands before the names of a part's tensors."""
        return f"{index}/"

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._named([part.tensors() for part in self._parts])

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return self._named([part.newcomer_tensors() for part in self._parts])

    def _named(self, tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {self.prefix(index) + name: value for index, one in enumerate(tensors) for name, value in one.items()}

    def state(self) -> dict[str, Any]:
        return self.document([part.state() for part in self._parts])

    def newcomer_state(self) -> dict[str, Any]:
        return self.document([part.newcomer_state() for part in self._parts])

    def document(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parts in one document."""
        return {"parts": parts, "rounds": self._rounds}

    def documents(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the states of the parts: :meth:`document` undone."""
        self._rounds = int(state["rounds"])
        found: list[Mapping[str, Any]] = state["parts"]
        return found

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        for index, (part, said) in enumerate(zip(self._parts, self.documents(state), strict=True)):
            prefix = self.prefix(index)
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            part.load(own, said)
