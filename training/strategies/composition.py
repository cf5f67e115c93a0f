"""Several strategies at once: ``strategy = "sparta + diloco"``.

Each part keeps its own rhythm and its own options, and does after a step what it would do alone: first those that
exchange often, last the one with the longest interval. That one *leads*: where its members meet, those of the
composition do, and what stands for the group with it stands for the group. Where one part sends a share ``p`` of all
``N`` weights in every step and another one all of them every ``H`` steps, a member gives ``(p + 1 / H) N`` a step.

Two strategies go together where neither takes away what the other is for: gradients are made final by one at most,
members go on from an anchor of one at most, and where one keeps all weights equal, nothing is left to average.
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


def parts_of(text: str) -> list[str]:
    """Return what is put together; a file's path may hold a plus sign without blanks."""
    text = text.strip()
    return text.split("+") if _NAMES.fullmatch(text) else _AND.split(text)


def check_parts(parts: Sequence[type[Strategy]]) -> None:
    """Refuse strategies that do not go together.

    Raises:
        BadInput: says why.
    """
    names = [part.name for part in parts]
    together, hint = f"strategy '{' + '.join(names)}'", f"take one of {', '.join(dict.fromkeys(names))}"
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"{together}: {name} is there twice", f"take {name} once")
    own_pace = next((part.name for part in parts if part.costs is not None and not part.costs.waits), "")
    if own_pace and len(names) > 1:
        message = f"with {own_pace} machines make steps of their own, so that there is none in which all could exchange"
        raise BadInput(f"{together}: {message}", hint)
    anchored = [part.name for part in parts if part.anchored]
    if len(anchored) > 1:
        each = " and ".join(anchored)
        message = f"{each} each go on from weights of their own, so that one undoes what the other did"
        raise BadInput(f"{together}: {message}", hint)
    final = [part.name for part in parts if part.merges == "gradients"]
    if len(final) > 1:
        raise BadInput(f"{together}: {' and '.join(final)} both make the gradients of a step final", hint)
    equal = next((part.name for part in parts if part.equal == "always"), "")
    others = " and ".join(name for name in names if name != equal)
    if equal and others:
        message = f"{equal} keeps all members' weights equal in every step, so that {others} would average equal ones"
        raise BadInput(f"{together}: {message}", hint)


class Composition(Strategy):
    """Some strategies, each as if it were alone."""

    summary = "several strategies at once, each with its own interval and options"
    parts: ClassVar[tuple[type[Strategy], ...]]

    def __init__(self, context: StrategyContext) -> None:
        super().__init__(context)
        made = [part(replace(context, settings=self._settings_for(part, context.settings))) for part in self.parts]
        self._parts = sorted(made, key=lambda one: one.rhythm(context.settings).interval)
        self._leader = self._parts[-1]
        self._round, self._led = 0, False
        self._before = Traffic()

    @classmethod
    def no_feedback(cls, settings: StrategySettings) -> str:
        reasons = [part.no_feedback(settings) for part in cls.parts]
        return reasons[0] if all(reasons) else ""

    @classmethod
    def codec(cls, settings: StrategySettings) -> str:
        first, *_ = [part.codec(cls._settings_for(part, settings)) for part in cls.parts]
        return first

    @classmethod
    def _settings_for(cls, part: type[Strategy], settings: StrategySettings) -> StrategySettings:
        """Return the settings for a part: where some of them can feed errors back, it is left to those."""
        return settings if cls.no_feedback(settings) else part.resumed(settings)

    @classmethod
    def rhythm(cls, settings: StrategySettings) -> Rhythm:
        return min((part.rhythm(settings) for part in cls.parts), key=lambda one: one.interval)

    @classmethod
    def rehearsed(cls, settings: StrategySettings, interval: int) -> StrategySettings:
        return functools.reduce(lambda found, part: part.rehearsed(found, interval), cls.parts, settings)

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        for part in self._parts:
            part.use(optimizer)

    def attach(self, model: nn.Module, exchange: Exchange) -> None:
        super().attach(model, exchange)
        self._before = exchange.traffic.copy()
        for part in self._parts:
            part.attach(model, exchange)

    def begin_step(self, step: int, weight: float, scale: float | None = None) -> None:
        for part in self._parts:
            part.begin_step(step, weight, scale)

    def last_backward(self) -> None:
        for part in self._parts:
            part.last_backward()

    def backward_again(self) -> None:
        for part in self._parts:
            part.backward_again()

    def gradients(self) -> None:
        for part in self._parts:
            part.gradients()

    @property
    def clips(self) -> bool:
        return any(part.clips for part in self._parts)

    @property
    def gradient_norm(self) -> float | None:
        return next((norm for part in self._parts if (norm := part.gradient_norm) is not None), None)

    @property
    def steps_to_average(self) -> int | None:
        return self._leader.steps_to_average

    def end_step(self) -> SyncEvent | None:
        return self._told({part.name: part.end_step() for part in self._parts})

    def finish(self) -> SyncEvent | None:
        """The one that leads ends as if it were alone, where it makes all weights equal: of the others only what is
        under way is ended, and changes nothing then."""
        equal = self._leader.equal != "never"
        held = flatten(self._parameters) if equal else None
        said = {part.name: None if equal and part.synchronised else part.finish() for part in self._parts[:-1]}
        if held is not None:
            unflatten_into(self._parameters, held)
        return self._told({**said, self._leader.name: self._leader.finish()})

    def _told(self, said: Mapping[str, SyncEvent | None]) -> SyncEvent | None:
        """Return one report of all that ended here, with the traffic since the report before."""
        leading = said[self._leader.name]
        self._led = self._leader.meets(leading)
        reports = {name: report for name, report in said.items() if report is not None}
        if not reports:
            return None
        self._round += 1
        traffic = self._exchange.traffic.since(self._before)
        self._before = self._exchange.traffic.copy()
        drifts, norms, correlations = (
            [value for value in found if value is not None]
            for found in zip(*((one.drift, one.delta_norm, one.correlation) for one in reports.values()), strict=True)
        )
        members, digest = list(reports.values())[-1].members, leading.weight_hash if leading else ""
        most, least = max(drifts, default=None), min(correlations, default=None)
        event = sync_event(traffic, self._round, members, digest, most, max(norms, default=None), least)
        return event.model_copy(update={"rounds": {name: report.round for name, report in reports.items()}})

    @property
    def synchronised(self) -> bool:
        return all(part.synchronised for part in self._parts)

    def meets(self, report: SyncEvent | None) -> bool:
        return self._led

    @property
    def members(self) -> tuple[int, ...]:
        return self._leader.members

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{part.name}/{name}": one for part in self._parts for name, one in part.tensors().items()}

    def state(self) -> dict[str, Any]:
        return {"round": self._round, "parts": {part.name: part.state() for part in self._parts}}

    def newcomer_tensors(self) -> dict[str, torch.Tensor]:
        return {f"{part.name}/{name}": one for part in self._parts for name, one in part.newcomer_tensors().items()}

    def newcomer_state(self) -> dict[str, Any]:
        return {"round": self._round, "parts": {part.name: part.newcomer_state() for part in self._parts}}

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
        for part in self._parts:
            prefix, own = f"{part.name}/", state["parts"][part.name]
            mine = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
            if mine or own:
                part.load(mine, own)


class ComposedCosts(CostModel):
    """The sum of the parts' costs: exchanges are as far apart as the most frequent ones, and carry what all parts send
    from one to the next, on average. Where all parts merge weights, what they learn together is what the best of them
    learns alone: ``sparta + diloco`` was no worse than ``diloco`` (docs/reference/strategies.md)."""

    def __init__(self, parts: Sequence[type[Strategy]], settings: Owning | None = None) -> None:
        chosen = StrategySettings()
        chosen = chosen.model_copy(update={"owned": chosen.owned | (settings.owned if settings else {})})
        models = [part.costs for part in parts if part.costs is not None]
        self._parts = parts
        self._each = [
            (model.with_options(chosen), part.rhythm(chosen)) for part, model in zip(parts, models, strict=True)
        ]
        self._least = min(rhythm.interval for _, rhythm in self._each)
        self._own_codecs = getattr(settings, "codec", "auto") == "auto"
        common = [codec for codec in models[0].codecs if all(codec in model.codecs for model in models)]
        found = {
            "codecs": tuple(common) or models[0].codecs,
            "exact": all(model.exact for model in models),
            "vectors": sum(model.vectors for model in models),
            "uneven": any(rhythm.interval != self._least for _, rhythm in self._each),
            "on_device": any(model.on_device for model in models),
            "merge_ns": sum(model.merge_ns * self._least / rhythm.interval for model, rhythm in self._each),
            "sources": {key: said for model in models for key, said in model.sources.items()},
        }
        for name, value in found.items():
            setattr(self, name, value)

    def unsound(self, course: Course) -> str:
        return "what its parts learn together is not known"

    def refused(self, course: Course, rhythm: Rhythm) -> str:
        each = [model.refused(course, own) for model, own in self._each]
        return next((f"has {part.name}, which {why}" for part, why in zip(self._parts, each, strict=True) if why), "")

    def with_options(self, settings: Owning) -> CostModel:
        return ComposedCosts(self._parts, settings)

    def elements(self, trainable: int) -> int:
        each = (model.elements(trainable) * self._least / rhythm.interval for model, rhythm in self._each)
        return math.ceil(sum(each))

    def carried(self, trainable: int, codec: str) -> int:
        """Without a codec that is asked for, each part has its own."""
        if not self._own_codecs or codec in self.codecs[1:] or all(codec in model.codecs for model, _ in self._each):
            return self.elements(trainable)
        found = 0.0
        for model, rhythm in self._each:
            elements = model.elements(trainable)
            size = codec_by_name(model.codecs[0]).expected_bytes(elements)
            found += elements * size / codec_by_name(codec).expected_bytes(elements) * self._least / rhythm.interval
        return math.ceil(found)

    def longest(self, trainable: int) -> int:
        return max(model.longest(trainable) for model, _ in self._each)

    def rhythms(self, course: Course) -> Iterator[Rhythm]:
        if all(any(True for _ in model.rhythms(course)) for model, _ in self._each):
            yield min((rhythm for _, rhythm in self._each), key=lambda one: one.interval)

    def hidden(self, exchange: float, compute: Compute, rhythm: Rhythm, settings: Owning) -> float:
        whole = max(1, self.elements(compute.trainable))
        found = 0.0
        for model, own in self._each:
            burst = exchange * model.elements(compute.trainable) / whole
            found += model.hidden(burst, compute, own, settings) * self._least / own.interval
        return min(exchange, found)

    def learning(self, course: Course, rhythm: Rhythm, worth: float) -> Learning:
        each = [model.learning(course, own, worth) for model, own in self._each]
        sources = dict.fromkeys(source for one in each for source in one.sources)
        shares, losses = [one.share for one in each], [one.loss for one in each]
        if all(part.merges == "weights" for part in self._parts):
            return Learning(max(shares), min(losses), tuple(sources))
        return Learning(min(shares), sum(losses), tuple(sources))

    def settings(self, course: Course, rhythm: Rhythm) -> dict[str, str | int | float | bool]:
        each = [model.settings(course, own) for model, own in self._each]
        found = {name: value for one in each for name, value in one.items()}
        shared = not self._own_codecs or all(course.codec in model.codecs for model, _ in self._each)
        each_its_own = {} if shared else {"codec": "auto"}
        return found | {"error_feedback": any(one.get("error_feedback") for one in each)} | each_its_own


@functools.cache
def _composed(text: str) -> type[Composition]:
    parts = tuple(strategy_class(part) for part in parts_of(text))
    check_parts(parts)
    known = all(part.costs is not None for part in parts)
    found: dict[str, Any] = {
        "name": text,
        "parts": parts,
        "merges": "gradients" if any(part.merges == "gradients" for part in parts) else "weights",
        "raises_rate": tuple(set.intersection(*(set(part.raises_rate) for part in parts))),
        "updates": any(part.updates for part in parts),
        "equal": "never" if any(part.equal == "never" for part in parts) else "synchronised",
        "costs": ComposedCosts(parts) if known else None,
        "__doc__": f"{' and '.join(part.name for part in parts)}, each as if it were alone.",
    }
    return type("Composition", (Composition,), found)


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
    names = [check_strategy(part) for part in parts_of(text)]
    check_parts([strategies()[name] for name in names if name in strategies()])
    return " + ".join(names)


register_form(Form("A + B", lambda text: len(parts_of(text)) > 1, written, composed))
