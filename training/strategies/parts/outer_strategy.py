"""What DiLoCo-like strategies need besides their algorithm: fragments, reports, consensus and snapshots."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from training.exchange.base import Exchange, Traffic
from training.exchange.codecs import Codec, codec_by_name
from training.exchange.staging import common_async_device, free_memory_of, is_asynchronous
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.parts.outer_fragment import FragmentSpec, OuterFragment, PseudoGradientMean
from training.strategies.parts.outer_optimizers import OuterOptimizer
from training.strategies.weights import flatten


class OuterStrategy(Strategy):
    """Base class of strategies with an outer step: weights differ between rounds, the anchors are equal on all members.

    The anchors are what is evaluated and saved, and what newcomers start from.
    """

    anchored = True
    numbers_fragments: ClassVar[bool] = True
    """Whether a snapshot has a numbered list of fragments, or the state of the only fragment itself."""
    interval: int
    """Inner steps from round to round of a fragment, H."""
    delay: int
    """Inner steps that the mean of a round overlaps with, tau."""

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        self._codec: Codec = codec_by_name(self.codec(context.settings))
        self._fragments: list[OuterFragment] = []
        self._rounds = self._unsent_steps = 0
        self._has_taken_room = False
        self._reported = Traffic()

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._fragments = self.make_fragments(model)

    @abstractmethod
    def make_fragments(self, model: nn.Module) -> list[OuterFragment]:
        """Return the fragments: together all trainable parameters of the model, each once."""

    @abstractmethod
    def make_outer(self) -> OuterOptimizer:
        """Return an outer optimizer for one fragment."""

    def make_fragment(
        self, spec: FragmentSpec, make_mean: Callable[..., PseudoGradientMean] = PseudoGradientMean
    ) -> OuterFragment:
        """Return a fragment of these weights, with the settings of the run.

        Args:
            make_mean: called with exchange, codec and stream.
        """
        settings, exchange = self.context.settings, self._exchange
        # A delta that came too late is always carried over; a member alone encodes nothing.
        keeps_loss = settings.error_feedback and exchange.engine != "solo" and self._codec.name != "fp32"
        mean = make_mean(exchange, self._codec, spec.name if keeps_loss else "")
        compares, warn = bool(settings.verify_interval), self.context.warn
        outer = self.make_outer()
        fragment = OuterFragment(spec, mean, outer, self.interval, compares, warn, self._non_finite_counter)
        fragment.before_round = self._take_room
        return fragment

    def _take_room(self) -> None:
        """Keep anchors and outer state on the device from the first round on, by when training has taken what it needs,
        if they take at most half of what is left: no member needs them there, and longer batches may come."""
        if self._has_taken_room:
            return
        self._has_taken_room, device = True, common_async_device(self._parameters)
        state_bytes = [fragment.state_bytes for fragment in self._fragments]
        if device is not None and all(state_bytes) and 2 * sum(state_bytes) <= free_memory_of(device):
            for fragment in self._fragments:
                fragment.keep_on(device)

    def release_memory(self) -> bool:
        on_device = [fragment for fragment in self._fragments if is_asynchronous(fragment.anchor.device)]
        for fragment in on_device:
            fragment.keep_on(torch.device("cpu"))
        return bool(on_device)

    def _report(self, merged: list[tuple[OuterFragment, float | None]]) -> SyncEvent | None:
        """Return the event of the merged fragments; no byte is reported twice if their rounds overlap.

        Args:
            merged: fragments and their drifts.
        """
        if not merged:
            return None
        last_fragment, now = merged[-1][0], self._exchange.traffic.copy()
        starts = (fragment.traffic_at_start for fragment, _ in merged)
        earliest = min(starts, key=lambda traffic: traffic.bytes_sent + traffic.bytes_received)
        starts_after_report = (
            earliest.bytes_sent + earliest.bytes_received >= self._reported.bytes_sent + self._reported.bytes_received
        )
        traffic, self._reported = now.since(earliest if starts_after_report else self._reported), now
        drifts = [drift for _, drift in merged if drift is not None]
        norms = [norm for fragment, _ in merged if (norm := fragment.delta_norm) is not None]
        correlations = [value for fragment, _ in merged if (value := fragment.correlation) is not None]
        norm, drift = math.hypot(*norms) if norms else None, max(drifts, default=None)
        correlation = min(correlations, default=None)
        return sync_event(traffic, self._rounds, self._members, last_fragment.digest, drift, norm, correlation)

    def holds_anchor(self, fragment: OuterFragment) -> bool:
        """Return whether the model holds the anchor of a fragment, and no local step since."""
        return not fragment.inner_steps and not fragment.in_flight

    @property
    def synchronised(self) -> bool:
        return all(map(self.holds_anchor, self._fragments))

    @property
    def unsent_steps(self) -> int:
        return self._unsent_steps

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the anchors in the model."""
        if all(map(self.holds_anchor, self._fragments)):
            yield
            return
        current = [flatten(fragment.spec.tensors()) for fragment in self._fragments]
        for fragment in self._fragments:
            fragment.set_weights(fragment.anchor)
        try:
            yield
        finally:
            for fragment, values in zip(self._fragments, current, strict=True):
                fragment.set_weights(values)

    for_newcomer = consensus

    # ------------------------------------------------------------------------------------------------------ snapshots

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._by_name([fragment.tensors() for fragment in self._fragments])

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return self._by_name([fragment.newcomer_tensors() for fragment in self._fragments])

    def _prefix(self, index: int) -> str:
        return f"{index}/" if self.numbers_fragments else ""

    def _by_name(self, tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            self._prefix(index) + name: tensor
            for index, fragment_tensors in enumerate(tensors)
            for name, tensor in fragment_tensors.items()
        }

    def state(self) -> dict[str, Any]:
        return self._document([fragment.state() for fragment in self._fragments])

    def newcomer_state(self) -> dict[str, Any]:
        return self._document([fragment.newcomer_state() for fragment in self._fragments])

    def _document(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        return {"parts": states, "rounds": self._rounds} if self.numbers_fragments else states[0]

    def _states(self, document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the states of the fragments in what :meth:`state` returned."""
        return list(document["parts"]) if self.numbers_fragments else [document]

    def rounds_held(self, state: Mapping[str, Any]) -> int:
        return sum(int(fragment["round"]) + ("outcome" in fragment) for fragment in self._states(state))

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        states = self._states(state)
        self._rounds = int(state["rounds" if self.numbers_fragments else "round"])
        for index, (fragment, fragment_state) in enumerate(zip(self._fragments, states, strict=True)):
            prefix = self._prefix(index)
            named = (item for item in tensors.items() if item[0].startswith(prefix))
            fragment.load({name.removeprefix(prefix): tensor for name, tensor in named}, fragment_state)
