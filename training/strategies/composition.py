"""Several strategies at once: ``strategy = "sparta + diloco"``.

Each component keeps its own schedule and options, and acts after a step as it would alone: those that exchange often
first, the one with the longest interval last. That one is the *leader*: members of the composition meet where its
members do, and the weights it calls the consensus are the consensus. If one component sends a share ``p`` of all ``N``
weights in every step and another all of them every ``H`` steps, a member sends ``(p + 1 / H) N`` a step.

Two strategies can be combined if neither undoes the other: at most one makes gradients final, at most one makes members
continue from an anchor, and next to one that keeps all weights equal there is nothing left to average.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from profiles.declarations import OptionsByOwner
from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.exchange.base import Exchange, Traffic
from training.exchange.codecs import codec_by_name
from training.lazy import nn, torch
from training.records.events import SyncEvent
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import Compute, CostModel, Learning, RunSpec, SyncSchedule
from training.strategies.registry import Form, check_strategy, register_form, strategies, strategy_class
from training.strategies.weights import flatten, unflatten_into

_AND = re.compile(r"\s+\+\s+")
_NAMES = re.compile(r"\w+(\+\w+)+")


def component_names(text: str) -> list[str]:
    """Return the names in ``a + b``; a file's path may contain a plus sign without blanks."""
    text = text.strip()
    return text.split("+") if _NAMES.fullmatch(text) else _AND.split(text)


def check_components(components: Sequence[type[Strategy]]) -> None:
    """Reject strategies that cannot be combined.

    Raises:
        BadInput: says why.
    """
    names = [component.name for component in components]
    together, hint = f"strategy '{' + '.join(names)}'", f"take one of {', '.join(dict.fromkeys(names))}"
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{together}: {name} is there twice", f"take {name} once")
    asynchronous = next((kind.name for kind in components if kind.costs is not None and not kind.costs.waits), "")
    if asynchronous and len(names) > 1:
        message = (
            f"with {asynchronous} machines make steps of their own, so that there is none in which all could exchange"
        )
        raise BadInput(f"{together}: {message}", hint)
    anchored = [component.name for component in components if component.anchored]
    if len(anchored) > 1:
        anchored_names = " and ".join(anchored)
        message = f"{anchored_names} each go on from weights of their own, so that one undoes what the other did"
        raise BadInput(f"{together}: {message}", hint)
    gradient_names = [component.name for component in components if component.merges == "gradients"]
    if len(gradient_names) > 1:
        raise BadInput(f"{together}: {' and '.join(gradient_names)} both make the gradients of a step final", hint)
    equal = next((component.name for component in components if component.equal == "always"), "")
    others = " and ".join(name for name in names if name != equal)
    if equal and others:
        message = f"{equal} keeps all members' weights equal in every step, so that {others} would average equal ones"
        raise BadInput(f"{together}: {message}", hint)


class Composition(Strategy):
    """Base class of combined strategies; each component works as if it were alone."""

    summary = "several strategies at once, each with its own interval and options"
    components: ClassVar[tuple[type[Strategy], ...]]

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        settings = context.settings
        components = [kind(replace(context, settings=self._settings_for(kind, settings))) for kind in self.components]
        self._components = sorted(components, key=lambda component: component.sync_schedule(settings).interval)
        self._leader = self._components[-1]
        self._round, self._leader_has_met = 0, False
        self._before = Traffic()

    @classmethod
    def why_not_in_parts(cls, settings: StrategySettings) -> str:
        return next(filter(None, (component.why_not_in_parts(settings) for component in cls.components)), "")

    @classmethod
    def acts_elementwise(cls, settings: StrategySettings) -> bool:
        return all(component.acts_elementwise(settings) for component in cls.components)

    @classmethod
    def why_no_feedback(cls, settings: StrategySettings) -> str:
        reasons = [component.why_no_feedback(settings) for component in cls.components]
        return reasons[0] if all(reasons) else ""

    @classmethod
    def codec(cls, settings: StrategySettings) -> str:
        codec, *_ = [component.codec(cls._settings_for(component, settings)) for component in cls.components]
        return codec

    @classmethod
    def _settings_for(cls, component: type[Strategy], settings: StrategySettings) -> StrategySettings:
        """Return the settings for a component: only components that support error feedback get it, if any does."""
        return settings if cls.why_no_feedback(settings) else component.settings_for_resume(settings)

    @classmethod
    def sync_schedule(cls, settings: StrategySettings) -> SyncSchedule:
        return min(
            (component.sync_schedule(settings) for component in cls.components), key=lambda schedule: schedule.interval
        )

    @classmethod
    def shortened_for_trial(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return functools.reduce(
            lambda shortened, kind: kind.shortened_for_trial(shortened, interval), cls.components, settings
        )

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for component in self._components:
            component.set_optimizer(optimizer)

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._before = exchange.traffic.copy()
        for component in self._components:
            component.attach(model, exchange)

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        for component in self._components:
            component.begin_step(step, weight, scale)

    def last_backward(self) -> None:
        for component in self._components:
            component.last_backward()

    def restart_backward(self) -> None:
        for component in self._components:
            component.restart_backward()

    def release_memory(self) -> bool:
        return sum(component.release_memory() for component in self._components) > 0

    def gradients(self) -> None:
        for component in self._components:
            component.gradients()

    @property
    def clips(self) -> bool:
        return any(component.clips for component in self._components)

    @property
    def gradient_norm(self) -> float | None:
        return next((norm for component in self._components if (norm := component.gradient_norm) is not None), None)

    @property
    def steps_to_average(self) -> int | None:
        return self._leader.steps_to_average

    def end_step(self) -> SyncEvent | None:
        return self._combine_reports({component.name: component.end_step() for component in self._components})

    def finish(self) -> SyncEvent | None:
        """Finish the leader as if it were alone, if it makes all weights equal; the others then only end what is in
        flight, without changing weights."""
        equal = self._leader.equal != "never"
        weights = flatten(self._parameters) if equal else None
        reports = {
            component.name: None if equal and component.synchronised else component.finish()
            for component in self._components[:-1]
        }
        if weights is not None:
            unflatten_into(self._parameters, weights)
        return self._combine_reports({**reports, self._leader.name: self._leader.finish()})

    def _combine_reports(self, reports: Mapping[str, SyncEvent | None]) -> SyncEvent | None:
        """Return one report of all synchronisations that ended, with the traffic since the last report."""
        leader_report = reports[self._leader.name]
        self._leader_has_met = self._leader.meets(leader_report)
        ended = {name: report for name, report in reports.items() if report is not None}
        if not ended:
            return None
        self._round += 1
        traffic = self._exchange.traffic.since(self._before)
        self._before = self._exchange.traffic.copy()
        drifts, norms, correlations = (
            [value for value in column if value is not None]
            for column in zip(*((one.drift, one.delta_norm, one.correlation) for one in ended.values()), strict=True)
        )
        members, digest = list(ended.values())[-1].members, leader_report.weight_hash if leader_report else ""
        max_drift, min_correlation = max(drifts, default=None), min(correlations, default=None)
        event = sync_event(traffic, self._round, members, digest, max_drift, max(norms, default=None), min_correlation)
        return event.model_copy(update={"rounds": {name: report.round for name, report in ended.items()}})

    @property
    def synchronised(self) -> bool:
        return all(component.synchronised for component in self._components)

    def meets(self, report: SyncEvent | None) -> bool:
        return self._leader_has_met

    @property
    def members(self) -> tuple[int, ...]:
        return self._leader.members

    @property
    def unsent_steps(self) -> int:
        return self._leader.unsent_steps

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._by_name([component.tensors() for component in self._components])

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return self._by_name([component.newcomer_tensors() for component in self._components])

    def _by_name(self, tensors: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        pairs = zip(self._components, tensors, strict=True)
        return {f"{component.name}/{name}": tensor for component, own in pairs for name, tensor in own.items()}

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "parts": {component.name: component.state() for component in self._components}}

    def newcomer_state(self) -> dict[str, Any]:
        states = {component.name: component.newcomer_state() for component in self._components}
        return {"round": self._round, "parts": states}

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Hold the consensus of the leader."""
        with self._leader.consensus():
            yield

    @contextmanager
    def for_newcomer(self) -> Iterator[None]:
        """Hold the leader's weights for newcomers."""
        with self._leader.for_newcomer():
            yield

    def rounds_held(self, state: Mapping[str, Any]) -> int:
        return sum(component.rounds_held(state["parts"][component.name]) for component in self._components)

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._round = int(state["round"])
        for component in self._components:
            prefix, component_state = f"{component.name}/", state["parts"][component.name]
            named = (item for item in tensors.items() if item[0].startswith(prefix))
            component_tensors = {name.removeprefix(prefix): tensor for name, tensor in named}
            if component_tensors or component_state:
                component.load(component_tensors, component_state)


class ComposedCosts(CostModel):
    """The sum of the components' costs.

    The interval is that of the most frequent exchange, which carries what all components send in it on average. If all
    merge weights, they learn as well as the best of them alone: ``sparta + diloco`` was no worse than ``diloco``
    (docs/reference/strategies.md).
    """

    def __init__(self, components: Sequence[type[Strategy]], settings: OptionsByOwner | None = None) -> None:
        own_settings = StrategySettings()
        own_settings = own_settings.model_copy(
            update={"owned": own_settings.owned | (settings.owned if settings else {})}
        )
        models = [component.costs for component in components if component.costs is not None]
        self._components = components
        self._models = [
            (model.with_options(own_settings), component.sync_schedule(own_settings))
            for component, model in zip(components, models, strict=True)
        ]
        self._interval = min(schedule.interval for _, schedule in self._models)
        self._own_codecs = getattr(settings, "codec", "auto") == "auto"
        common = [codec for codec in models[0].codecs if all(codec in model.codecs for model in models)]
        totals = {
            "codecs": tuple(common) or models[0].codecs,
            "exact": all(model.exact for model in models),
            "vectors": sum(model.vectors for model in models),
            "uneven": any(schedule.interval != self._interval for _, schedule in self._models),
            "on_device": any(model.on_device for model in models),
            "merge_ns": sum(model.merge_ns * self._interval / schedule.interval for model, schedule in self._models),
            "sources": {key: source for model in models for key, source in model.sources.items()},
        }
        for name, value in totals.items():
            setattr(self, name, value)

    def why_not_ranked(self, run: RunSpec) -> str:
        return "what its parts learn together is not known"

    def why_unsupported(self, run: RunSpec, schedule: SyncSchedule) -> str:
        reasons = [model.why_unsupported(run, own_schedule) for model, own_schedule in self._models]
        pairs = zip(self._components, reasons, strict=True)
        return next((f"has {component.name}, which {reason}" for component, reason in pairs if reason), "")

    def with_options(self, settings: OptionsByOwner) -> CostModel:
        return ComposedCosts(self._components, settings)

    def elements(self, trainable: int) -> int:
        return math.ceil(
            sum(model.elements(trainable) * self._interval / schedule.interval for model, schedule in self._models)
        )

    def carried(self, trainable: int, codec: str) -> int:
        """See :meth:`CostModel.carried`; if no codec is configured, each component uses its own."""
        if not self._own_codecs or codec in self.codecs[1:] or all(codec in model.codecs for model, _ in self._models):
            return self.elements(trainable)
        total = 0.0
        for model, schedule in self._models:
            elements = model.elements(trainable)
            size = codec_by_name(model.codecs[0]).expected_bytes(elements)
            values = elements * size / codec_by_name(codec).expected_bytes(elements)
            total += values * self._interval / schedule.interval
        return math.ceil(total)

    def longest(self, trainable: int) -> int:
        return max(model.longest(trainable) for model, _ in self._models)

    def sync_schedules(self, run: RunSpec) -> Iterator[SyncSchedule]:
        if all(any(True for _ in model.sync_schedules(run)) for model, _ in self._models):
            yield min((schedule for _, schedule in self._models), key=lambda schedule: schedule.interval)

    def hidden(self, exchange: float, compute: Compute, schedule: SyncSchedule, settings: OptionsByOwner) -> float:
        total_elements = max(1, self.elements(compute.trainable))
        hidden_seconds = 0.0
        for model, own_schedule in self._models:
            burst = exchange * model.elements(compute.trainable) / total_elements
            hidden_seconds += (
                model.hidden(burst, compute, own_schedule, settings) * self._interval / own_schedule.interval
            )
        return min(exchange, hidden_seconds)

    def learning(self, run: RunSpec, schedule: SyncSchedule, effective_members: float) -> Learning:
        learnings = [model.learning(run, own_schedule, effective_members) for model, own_schedule in self._models]
        sources = dict.fromkeys(source for learning in learnings for source in learning.sources)
        shares, losses = [learning.share for learning in learnings], [learning.loss for learning in learnings]
        if all(component.merges == "weights" for component in self._components):
            return Learning(max(shares), min(losses), tuple(sources))
        return Learning(min(shares), sum(losses), tuple(sources))

    def settings(self, run: RunSpec, schedule: SyncSchedule) -> dict[str, str | int | float | bool]:
        options: dict[str, str | int | float | bool] = {}
        feeds_back = False
        for model, own_schedule in self._models:
            own_options = model.settings(run, own_schedule)
            feeds_back |= bool(own_options.get("error_feedback"))
            options |= own_options
        share_codec = not self._own_codecs or all(run.codec in model.codecs for model, _ in self._models)
        return options | {"error_feedback": feeds_back} | ({} if share_codec else {"codec": "auto"})


@functools.cache
def _composed(text: str) -> type[Composition]:
    components = tuple(strategy_class(component) for component in component_names(text))
    check_components(components)
    costs_known = all(component.costs is not None for component in components)
    attributes: dict[str, Any] = {
        "name": text,
        "components": components,
        "merges": "gradients" if any(component.merges == "gradients" for component in components) else "weights",
        "scales_learning_rate": tuple(
            set.intersection(*(set(component.scales_learning_rate) for component in components))
        ),
        "replaces_optimizer": any(component.replaces_optimizer for component in components),
        "equal": "never" if any(component.equal == "never" for component in components) else "synchronised",
        "costs": ComposedCosts(components) if costs_known else None,
        "__doc__": f"{' and '.join(component.name for component in components)}, each as if it were alone.",
    }
    return type("Composition", (Composition,), attributes)


def composed_class(text: str) -> type[Composition]:
    """Return the class of the combined strategy ``a + b``.

    Raises:
        BadInput: one of them is unknown, or they cannot be combined.
    """
    return _composed(normalized(text))


def normalized(text: str) -> str:
    """Return the normalized ``text``.

    Raises:
        BadInput: one of them is unknown, or they cannot be combined, as far as that is known without user code.
    """
    names = [check_strategy(name) for name in component_names(text)]
    check_components([strategies()[name] for name in names if name in strategies()])
    return " + ".join(names)


register_form(Form("A + B", lambda text: len(component_names(text)) > 1, normalized, composed_class))
