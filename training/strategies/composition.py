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

from profiles.declarations import Owning
from profiles.errors import BadInput
from profiles.schema import StrategySettings
from training.events import SyncEvent
from training.exchange.base import Exchange, Traffic
from training.exchange.codecs import codec_by_name
from training.lazy import nn, torch
from training.strategies.base import Strategy, StrategyContext, sync_event
from training.strategies.costs import Compute, CostModel, Course, Learning, Rhythm
from training.strategies.registry import Form, check_strategy, register_form, strategies, strategy_class
from training.strategies.weights import flatten, unflatten_into

_AND = re.compile(r"\s+\+\s+")
_NAMES = re.compile(r"\w+(\+\w+)+")


def component_names(text: str) -> list[str]:
    """Return what is put together; a file's path may hold a plus sign without blanks."""
    text = text.strip()
    return text.split("+") if _NAMES.fullmatch(text) else _AND.split(text)


def check_components(components: Sequence[type[Strategy]]) -> None:
    """Refuse strategies that do not go together.

    Raises:
        BadInput: says why.
    """
    names = [component.name for component in components]
    together, hint = f"strategy '{' + '.join(names)}'", f"take one of {', '.join(dict.fromkeys(names))}"
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{together}: {name} is there twice", f"take {name} once")
    own_pace = next(
        (component.name for component in components if component.costs is not None and not component.costs.waits), ""
    )
    if own_pace and len(names) > 1:
        message = f"with {own_pace} machines make steps of their own, so that there is none in which all could exchange"
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
    """Some strategies, each as if it were alone."""

    summary = "several strategies at once, each with its own interval and options"
    components: ClassVar[tuple[type[Strategy], ...]]

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        components = [
            component(replace(context, settings=self._settings_for(component, context.settings)))
            for component in self.components
        ]
        self._components = sorted(components, key=lambda one: one.rhythm(context.settings).interval)
        self._leader = self._components[-1]
        self._round, self._led = 0, False
        self._before = Traffic()

    @classmethod
    def no_feedback(cls, settings: StrategySettings) -> str:
        reasons = [component.no_feedback(settings) for component in cls.components]
        return reasons[0] if all(reasons) else ""

    @classmethod
    def codec(cls, settings: StrategySettings) -> str:
        codec, *_ = [component.codec(cls._settings_for(component, settings)) for component in cls.components]
        return codec

    @classmethod
    def _settings_for(cls, component: type[Strategy], settings: StrategySettings) -> StrategySettings:
        """Return the settings for a component: where some of them can feed errors back, it is left to those."""
        return settings if cls.no_feedback(settings) else component.resumed(settings)

    @classmethod
    def rhythm(cls, settings: StrategySettings) -> Rhythm:
        return min((component.rhythm(settings) for component in cls.components), key=lambda one: one.interval)

    @classmethod
    def rehearsed(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return functools.reduce(lambda found, component: component.rehearsed(found, interval), cls.components, settings)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        for component in self._components:
            component.use(optimizer)

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

    def backward_again(self) -> None:
        for component in self._components:
            component.backward_again()

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
        """The one that leads ends as if it were alone, where it makes all weights equal: of the others only what is
        under way is ended, and changes nothing then."""
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
        """Return one report of all that ended here, with the traffic since the report before."""
        leader_report = reports[self._leader.name]
        self._led = self._leader.meets(leader_report)
        ended = {name: report for name, report in reports.items() if report is not None}
        if not ended:
            return None
        self._round += 1
        traffic = self._exchange.traffic.since(self._before)
        self._before = self._exchange.traffic.copy()
        drifts, norms, correlations = (
            [value for value in column if value is not None]
            for column in zip(
                *((report.drift, report.delta_norm, report.correlation) for report in ended.values()), strict=True
            )
        )
        members, digest = list(ended.values())[-1].members, leader_report.weight_hash if leader_report else ""
        max_drift, min_correlation = max(drifts, default=None), min(correlations, default=None)
        event = sync_event(traffic, self._round, members, digest, max_drift, max(norms, default=None), min_correlation)
        return event.model_copy(update={"rounds": {name: report.round for name, report in ended.items()}})

    @property
    def synchronised(self) -> bool:
        return all(component.synchronised for component in self._components)

    def meets(self, report: SyncEvent | None) -> bool:
        return self._led

    @property
    def members(self) -> tuple[int, ...]:
        return self._leader.members

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{component.name}/{name}": tensor
            for component in self._components
            for name, tensor in component.tensors().items()
        }

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "parts": {component.name: component.state() for component in self._components}}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{component.name}/{name}": tensor
            for component in self._components
            for name, tensor in component.newcomer_tensors().items()
        }

    def newcomer_state(self) -> dict[str, Any]:
        return {
            "round": self._round,
            "parts": {component.name: component.newcomer_state() for component in self._components},
        }

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """What leads says which weights stand for the group."""
        with self._leader.consensus():
            yield

    @contextmanager
    def for_newcomer(self) -> Iterator[None]:
        """As in :meth:`consensus`."""
        with self._leader.for_newcomer():
            yield

    def load(self, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
        self._round = int(state["round"])
        for component in self._components:
            prefix, component_state = f"{component.name}/", state["parts"][component.name]
            component_tensors = {
                name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)
            }
            if component_tensors or component_state:
                component.load(component_tensors, component_state)


class ComposedCosts(CostModel):
    """The sum of the parts' costs: exchanges are as far apart as the most frequent ones, and carry what all parts send
    from one to the next, on average. Where all parts merge weights, what they learn together is what the best of them
    learns alone: ``sparta + diloco`` was no worse than ``diloco`` (docs/reference/strategies.md)."""

    def __init__(self, components: Sequence[type[Strategy]], settings: Owning | None = None) -> None:
        settings_of_components = StrategySettings()
        settings_of_components = settings_of_components.model_copy(
            update={"owned": settings_of_components.owned | (settings.owned if settings else {})}
        )
        models = [component.costs for component in components if component.costs is not None]
        self._components = components
        self._models = [
            (model.with_options(settings_of_components), component.rhythm(settings_of_components))
            for component, model in zip(components, models, strict=True)
        ]
        self._shortest_interval = min(rhythm.interval for _, rhythm in self._models)
        self._own_codecs = getattr(settings, "codec", "auto") == "auto"
        common = [codec for codec in models[0].codecs if all(codec in model.codecs for model in models)]
        totals = {
            "codecs": tuple(common) or models[0].codecs,
            "exact": all(model.exact for model in models),
            "vectors": sum(model.vectors for model in models),
            "uneven": any(rhythm.interval != self._shortest_interval for _, rhythm in self._models),
            "on_device": any(model.on_device for model in models),
            "merge_ns": sum(
                model.merge_ns * self._shortest_interval / rhythm.interval for model, rhythm in self._models
            ),
            "sources": {key: source for model in models for key, source in model.sources.items()},
        }
        for name, value in totals.items():
            setattr(self, name, value)

    def unsound(self, course: Course) -> str:
        return "what its parts learn together is not known"

    def refused(self, course: Course, rhythm: Rhythm) -> str:
        reasons = [model.refused(course, component_rhythm) for model, component_rhythm in self._models]
        return next(
            (
                f"has {component.name}, which {why}"
                for component, why in zip(self._components, reasons, strict=True)
                if why
            ),
            "",
        )

    def with_options(self, settings: Owning) -> CostModel:
        return ComposedCosts(self._components, settings)

    def elements(self, trainable: int) -> int:
        elements_a_round = (
            model.elements(trainable) * self._shortest_interval / rhythm.interval for model, rhythm in self._models
        )
        return math.ceil(sum(elements_a_round))

    def carried(self, trainable: int, codec: str) -> int:
        """Without a codec that is asked for, each component has its own."""
        if not self._own_codecs or codec in self.codecs[1:] or all(codec in model.codecs for model, _ in self._models):
            return self.elements(trainable)
        total = 0.0
        for model, rhythm in self._models:
            elements = model.elements(trainable)
            size = codec_by_name(model.codecs[0]).expected_bytes(elements)
            total += (
                elements
                * size
                / codec_by_name(codec).expected_bytes(elements)
                * self._shortest_interval
                / rhythm.interval
            )
        return math.ceil(total)

    def longest(self, trainable: int) -> int:
        return max(model.longest(trainable) for model, _ in self._models)

    def rhythms(self, course: Course) -> Iterator[Rhythm]:
        if all(any(True for _ in model.rhythms(course)) for model, _ in self._models):
            yield min((rhythm for _, rhythm in self._models), key=lambda one: one.interval)

    def hidden(self, exchange: float, compute: Compute, rhythm: Rhythm, settings: Owning) -> float:
        total_elements = max(1, self.elements(compute.trainable))
        hidden_seconds = 0.0
        for model, component_rhythm in self._models:
            burst = exchange * model.elements(compute.trainable) / total_elements
            hidden_seconds += (
                model.hidden(burst, compute, component_rhythm, settings)
                * self._shortest_interval
                / component_rhythm.interval
            )
        return min(exchange, hidden_seconds)

    def learning(self, course: Course, rhythm: Rhythm, worth: float) -> Learning:
        learnings = [model.learning(course, component_rhythm, worth) for model, component_rhythm in self._models]
        sources = dict.fromkeys(source for learning in learnings for source in learning.sources)
        shares, losses = [learning.share for learning in learnings], [learning.loss for learning in learnings]
        if all(component.merges == "weights" for component in self._components):
            return Learning(max(shares), min(losses), tuple(sources))
        return Learning(min(shares), sum(losses), tuple(sources))

    def settings(self, course: Course, rhythm: Rhythm) -> dict[str, str | int | float | bool]:
        options_by_component = [model.settings(course, component_rhythm) for model, component_rhythm in self._models]
        options = {
            name: value for component_options in options_by_component for name, value in component_options.items()
        }
        share_codec = not self._own_codecs or all(course.codec in model.codecs for model, _ in self._models)
        codec_option = {} if share_codec else {"codec": "auto"}
        return (
            options
            | {
                "error_feedback": any(
                    component_options.get("error_feedback") for component_options in options_by_component
                )
            }
            | codec_option
        )


@functools.cache
def _composed(text: str) -> type[Composition]:
    components = tuple(strategy_class(component) for component in component_names(text))
    check_components(components)
    costs_known = all(component.costs is not None for component in components)
    attributes: dict[str, Any] = {
        "name": text,
        "components": components,
        "merges": "gradients" if any(component.merges == "gradients" for component in components) else "weights",
        "raises_rate": tuple(set.intersection(*(set(component.raises_rate) for component in components))),
        "updates": any(component.updates for component in components),
        "equal": "never" if any(component.equal == "never" for component in components) else "synchronised",
        "costs": ComposedCosts(components) if costs_known else None,
        "__doc__": f"{' and '.join(component.name for component in components)}, each as if it were alone.",
    }
    return type("Composition", (Composition,), attributes)


def composed(text: str) -> type[Composition]:
    """Return the strategy that ``a + b`` means.

    Raises:
        BadInput: one of them is not known, or they do not go together.
    """
    return _composed(written(text))


def written(text: str) -> str:
    """Return ``text`` as it is kept.

    Raises:
        BadInput: one of them is not known, or they do not go together, as far as that is known without their code.
    """
    names = [check_strategy(name) for name in component_names(text)]
    check_components([strategies()[name] for name in names if name in strategies()])
    return " + ".join(names)


register_form(Form("A + B", lambda text: len(component_names(text)) > 1, written, composed))
