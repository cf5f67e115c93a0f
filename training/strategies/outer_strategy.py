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
        self._fragments: list[MergedPart] = []
        self._rounds = 0
        self._reported = Traffic()

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._fragments = self.parts(model)

    @abstractmethod
    def parts(self, model: nn.Module) -> list[MergedPart]:
        """Return the parts of a model's trainable parameters, each once and together all of them."""

    @abstractmethod
    def new_outer(self) -> OuterOptimizer:
        """Return an outer optimizer for one part."""

    @abstractmethod
    def kept(self, fragment: MergedPart) -> torch.Tensor:
        """Return the flat weights with which this member goes on after the anchor of a part has moved."""

    def make_part(self, spec: PartSpec, make_mean: Callable[..., MeanOfDeltas] = MeanOfDeltas) -> MergedPart:
        """Return a part at this place, which does what the settings say.

        Args:
            merge: makes the merge of exchange, codec and stream.
        """
        settings, exchange = self.context.settings, self._exchange
        # A delta that came too late always travels with the next one; alone, nothing is encoded.
        keeps_loss = settings.error_feedback and exchange.engine != "solo" and self._codec.name != "fp32"
        mean = make_mean(exchange, self._codec, spec.name if keeps_loss else "")
        compares, warn = bool(settings.verify_interval), self.context.warn
        return MergedPart(spec, mean, self.new_outer(), self.interval, compares, warn, self._refusals)

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        for fragment in self._fragments:
            fragment.begin_step(weight)

    @property
    def steps_to_average(self) -> int | None:
        return self.delay if any(fragment.inner + 1 >= self.interval for fragment in self._fragments) else None

    def end_step(self) -> SyncEvent | None:
        for fragment in self._fragments:
            fragment.inner += 1
        merged = [
            (fragment, self.merge(fragment))
            for fragment in self._fragments
            if fragment.under_way and fragment.inner >= self.delay
        ]
        started = [fragment for fragment in self._fragments if fragment.inner >= self.interval]
        for fragment in started:
            fragment.start()
        if not self.delay:
            merged += [(fragment, self.merge(fragment)) for fragment in started]
        return self._report(merged)

    def finish(self) -> SyncEvent | None:
        """Merge what is left; after it all members hold the anchors."""
        merged = [(fragment, self.merge(fragment)) for fragment in self._fragments if fragment.under_way]
        remaining = [fragment for fragment in self._fragments if not self.holds_anchor(fragment)]
        for fragment in remaining:
            fragment.start()
        merged += [(fragment, self.merge(fragment, is_final=True)) for fragment in remaining]
        return self._report(merged)

    def merge(self, fragment: MergedPart, is_final: bool = False) -> float | None:
        """Merge a part, at the end of the training the ``last`` time; return the drift that is told of it."""
        drift = fragment.collect(
            (lambda fragment: fragment.anchor) if is_final else self.kept, is_final and self.merges_alone_at_the_end
        )
        self._members = fragment.members
        self._rounds += 1
        return drift

    def _report(self, merged: list[tuple[MergedPart, float | None]]) -> SyncEvent | None:
        """Tell of the parts that were merged; no byte is told of twice where exchanges overlap."""
        if not merged:
            return None
        last_fragment, now = merged[-1][0], self._exchange.traffic.copy()
        begun = min((fragment.before for fragment, _ in merged), key=lambda at: at.bytes_sent + at.bytes_received)
        sooner = begun.bytes_sent + begun.bytes_received >= self._reported.bytes_sent + self._reported.bytes_received
        traffic, self._reported = now.since(begun if sooner else self._reported), now
        drifts = [drift for _, drift in merged if drift is not None]
        norms = [norm for fragment, _ in merged if (norm := fragment.delta_norm) is not None]
        min_correlation = min(
            (correlation for fragment, _ in merged if (correlation := fragment.correlation) is not None), default=None
        )
        norm, drift = math.hypot(*norms) if norms else None, max(drifts, default=None)
        return sync_event(traffic, self._rounds, self._members, last_fragment.digest, drift, norm, min_correlation)

    def holds_anchor(self, fragment: MergedPart) -> bool:
        """Whether the model holds the anchor of a part, and nothing of its own since."""
        return not fragment.inner and not fragment.under_way

    @property
    def synchronised(self) -> bool:
        return all(map(self.holds_anchor, self._fragments))

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """The anchors."""
        if all(map(self.holds_anchor, self._fragments)):
            yield
            return
        current = [flatten(fragment.spec.tensors()) for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.hold(fragment.anchor)
        try:
            yield
        finally:
            for fragment, values in zip(self._fragments, current, strict=True):
                fragment.hold(values)

    for_newcomer = consensus

    # ------------------------------------------------------------------------------------------------------ snapshots

    def prefix(self, index: int) -> str:
        """Return what stands before the names of a part's tensors."""
        return f"{index}/"

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._named([fragment.tensors() for fragment in self._fragments])

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return self._named([fragment.newcomer_tensors() for fragment in self._fragments])

    def _named(self, tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            self.prefix(index) + name: value
            for index, fragment_tensors in enumerate(tensors)
            for name, value in fragment_tensors.items()
        }

    def state(self) -> dict[str, Any]:
        return self.document([fragment.state() for fragment in self._fragments])

    def newcomer_state(self) -> dict[str, Any]:
        return self.document([fragment.newcomer_state() for fragment in self._fragments])

    def document(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parts in one document."""
        return {"parts": states, "rounds": self._rounds}

    def documents(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the states of the parts: :meth:`document` undone."""
        self._rounds = int(state["rounds"])
        states: list[Mapping[str, Any]] = state["parts"]
        return states

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        for index, (fragment, fragment_state) in enumerate(zip(self._fragments, self.documents(state), strict=True)):
            prefix = self.prefix(index)
            fragment_tensors = {
                name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)
            }
            fragment.load(fragment_tensors, fragment_state)
