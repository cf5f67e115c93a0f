"""Makes a profile fit the memory of machines: options that the user has not set are changed, in a fixed order.

0. No gradient checkpointing, and on GPUs the samples of a step in one pass and evaluations in large batches: the same
   results in less time.
1. Smaller micro-batches, and more of them: a step has the same samples and the same result.
2. Gradient checkpointing: the same result, for about a third more compute.
3. Adapters instead of all weights (LoRA), if the model is pretrained: this trains differently. Adapters get ten times
   the learning rate, unless it was set (Schulman et al. 2025, "LoRA Without Regret").
4. The frozen weights under the adapters in 8 bits, then in 4 (nf4), if bitsandbytes is installed.

Each is tried with all smaller micro-batches before the next; the first that fits is taken. With each micro-batch the
evaluation batches are halved until they fit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from pydantic import ValidationError

from distributed.planning.memory.memory_model import need_of, need_of_shard, need_of_slices
from profiles.errors import BadInput
from profiles.files.layers import fittable_settings
from profiles.installation import package_line
from profiles.options import as_text, memory_saving_settings
from profiles.quantities import memory_text
from profiles.run_settings import FITTED
from profiles.schema import QUANTISED, Profile
from training.data.sample_order import shares_to_batch_sizes
from training.layouts.inside.checks import INSIDE_LAYOUTS
from training.layouts.stages.bounds import bounds_of
from training.records.plan import DevicePlan
from training.run.local_plan import stages_of
from training.tasks.inputs.model_size import ModelSize
from training.tasks.registry import size_for

_ADAPTERS_RATE = 10.0
_SYSTEM_BYTES = 1_000_000_000
"""Memory reserved for the operating system, besides an eighth of all memory for the user's programs."""
_LARGEST_EVALUATION = 64
"""Samples that are evaluated at once on a GPU: generating a token takes as long for one sample as for many."""
_COMFORTABLE_SHARE = 0.85
"""Largest share of usable memory that a setting may take if it only saves time: the estimate may be wrong, and other
programs may start."""
_DRIVER_BYTES = 600_000_000
"""GPU memory reserved for driver and libraries, besides a sixteenth for fragmentation."""
ESTIMATE_TOLERANCE = 1.25
"""Factor by which an estimate must exceed a machine's memory before the machine is refused."""
NO_TOLERANCE = 0.0
"""Refuse a machine if the estimate exceeds the memory that training may use."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a machine, or of one of its devices."""

    name: str
    total: int
    """Bytes; 0: unknown."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``mps``."""
    members: int = 1
    """Number of workers that share it."""
    limited: bool = False
    """Whether it is the limit of a control group: then the operating system's memory is not part of it."""
    bf16: bool = False
    """Whether ``mixed_precision = auto`` is bf16 there."""

    @property
    def usable(self) -> int:
        """Bytes that training may use."""
        if self.device == "cuda":
            return max(0, self.total - self.total // 16 - _DRIVER_BYTES)
        if self.device == "mps":  # Metal's recommended limit on machines of 8 and 16 GB
            return self.total * 2 // 3
        return self.total - self.total // 16 if self.limited else max(0, self.total - self.total // 8 - _SYSTEM_BYTES)


class FreeMemory(NamedTuple):
    """The memory of a machine, or of the smallest of its training devices, in bytes; 0: unknown."""

    free: int = 0
    total: int = 0
    device: str = "cpu"
    bf16: bool = False
    """Whether ``mixed_precision = auto`` is bf16 there."""

    def need(self, profile: Profile, size: ModelSize) -> int:
        """Return the bytes that a member needs."""
        return need_of(profile, size, on_gpu=self.device == "cuda", bf16=self.bf16).total

    def budget(self, name: str) -> MemoryBudget:
        return MemoryBudget(name, self.total, self.device, bf16=self.bf16)


class Relaxations(NamedTuple):
    """Settings that take more memory to save time, which may be tried."""

    without_checkpointing: bool = False
    """No gradient checkpointing, if activations can be estimated."""
    larger_batches: bool = False
    """Larger batches, if they save time."""


@dataclass(frozen=True)
class FitResult:
    """A profile that fits, and the changes made to it."""

    profile: Profile
    changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Values before and after by option, as in an INI file."""
    bytes_before: int = 0
    """Bytes that a member needs with the original profile."""
    bytes_after: int = 0
    """Bytes that a member needs with this profile."""
    tightest: MemoryBudget | None = None
    """The budget that decided."""

    @property
    def line(self) -> str:
        """The line shown before the start; empty if nothing was changed and everything fits."""
        if self.tightest is None:
            return ""
        budget, has = self.tightest, f"{self.tightest.name} has {memory_text(self.tightest.total)}"
        has += f" for {budget.members} workers" if budget.members > 1 else ""
        after = memory_text(self.bytes_after)
        if not self.changes:
            return f"memory is tight: about {after} a worker, {has}"
        if self.bytes_after >= self.bytes_before:
            return f"{has}: {', '.join(_relaxation_texts(self.profile, self.changes))} (about {after})"
        changes = ", ".join(f"{name} {new} instead of {old}" for name, (old, new) in self.changes.items())
        tuning = self.changes["tuning"][0] if "tuning" in self.changes else "as set it"
        tight = ", which is tight" if self.bytes_after * budget.members > budget.usable else ""
        return f"{changes}: {tuning} needs {memory_text(self.bytes_before)}, {has}; so {after}{tight}"


def fit(
    profile: Profile,
    budgets: Sequence[MemoryBudget],
    report: Callable[[str], None] = lambda line: None,
    tolerance: float = ESTIMATE_TOLERANCE,
) -> Profile:
    """Return the profile fitted to memory budgets, by the model's files on this machine.

    Args:
        report: is called with a line about the changes, if there are any.
        tolerance: see :func:`fit_to_budgets`.

    Raises:
        BadInput: the settings of the user cannot fit.
    """
    result = fit_to_budgets(profile, size_for(profile), budgets, tolerance=tolerance)
    if result.line:
        report(result.line)
    return result.profile


_CHANGEABLE = (
    "tuning",
    "base_precision",
    "gradient_checkpointing",
    "batch_size",
    "gradient_accumulation",
    "eval_batch_size",
    "learning_rate",
)
"""Options that can be changed, those with the largest effect first."""


def has_bitsandbytes() -> bool:
    """Whether bitsandbytes is installed here, and so on machines that are prepared from here."""
    return importlib.util.find_spec("bitsandbytes") is not None


def fit_to_budgets(
    profile: Profile,
    size: ModelSize | None,
    budgets: Sequence[MemoryBudget],
    alone: bool | None = None,
    with_bitsandbytes: Callable[[], bool] = has_bitsandbytes,
    tolerance: float = ESTIMATE_TOLERANCE,
) -> FitResult:
    """Return the profile fitted to all memory budgets.

    Args:
        alone: whether one member trains by itself, without exchanges; by default whether the budgets have one member.
        with_bitsandbytes: whether the frozen weights can be held in 8 or 4 bits.
        tolerance: multiple of a machine's memory that the smallest estimate may reach; what exceeds the part that
            training may use is tight. :data:`NO_TOLERANCE`: nothing may be tight.

    Raises:
        BadInput: the model with the settings of the user cannot fit; says by how much, and which settings would.
    """
    known_budgets = [budget for budget in budgets if budget.total]
    if size is None or not known_budgets:
        return FitResult(profile)
    alone = sum(budget.members for budget in budgets) == 1 if alone is None else alone
    is_estimated = size.activations > 0 and len(known_budgets) == len(budgets)
    has_gpu = any(budget.device != "cpu" for budget in known_budgets)
    relaxations = Relaxations(is_estimated, is_estimated and size.teacher is None and has_gpu)
    is_inside = profile.run.layout in INSIDE_LAYOUTS  # which quantised weights cannot be divided into
    with_bitsandbytes = bool if is_inside else with_bitsandbytes
    candidates = partial(_candidates, profile, fittable_settings(profile), with_bitsandbytes, relaxations)
    devices = max(profile.run.workers, sum(budget.members for budget in budgets))
    need = partial(_member_bytes, size=size, alone=alone, devices=devices)

    def fullest(candidate: Profile) -> tuple[float, MemoryBudget]:
        """Return the largest share of a budget that would be used, and the budget."""
        usages = ((need(candidate, b) * b.members / max(1, b.usable), b) for b in known_budgets)
        return max(usages, key=lambda usage: usage[0])

    def result(candidate: Profile, budget: MemoryBudget) -> FitResult:
        before, after = need(profile, budget), need(candidate, budget)
        return FitResult(candidate, changed_options(profile, candidate), before, after, budget)

    tightest = fullest(profile)[1]
    for candidate in candidates():
        if fullest(candidate)[0] <= (_COMFORTABLE_SHARE if need(candidate, tightest) > need(profile, tightest) else 1):
            has_fitted = fullest(profile)[0] <= 1
            first_fit = result(candidate, fullest(candidate)[1] if has_fitted else tightest)
            return first_fit if first_fit.changes else replace(first_fit, tightest=None)
    smallest = min(candidates(), key=lambda candidate: fullest(candidate)[0])
    # that of the fullest by what training may use need not be the one that lacks most: of two, both may leave nothing
    tightest = max(known_budgets, key=lambda budget: need(smallest, budget) * budget.members / budget.total)
    if need(smallest, tightest) * tightest.members > tightest.total * tolerance:
        all_changes = _candidates(profile, frozenset(FITTED), lambda: not is_inside, Relaxations())
        fitting = next((candidate for candidate in all_changes if fullest(candidate)[0] <= 1), None)
        raise _too_large(profile, tightest, need(smallest, tightest), fitting, need, with_bitsandbytes())
    return result(smallest, tightest)


def _member_bytes(profile: Profile, budget: MemoryBudget, size: ModelSize, alone: bool, devices: int) -> int:
    """Return the bytes that the member with the largest share, or each device of one, needs of such memory."""
    batch, shares = profile.training.batch_size, [float(share) for share in profile.run.shares.split(",") if share]
    sizes = shares_to_batch_sizes(shares, batch) if shares else [batch]
    on_gpu = budget.device == "cuda"
    if profile.run.layout in INSIDE_LAYOUTS:
        need_of_part = need_of_slices if profile.run.layout == "tensor" else need_of_shard
        return need_of_part(profile, size, devices, on_gpu=on_gpu, bf16=budget.bf16)
    parts = _parts(profile, size)
    alone |= 1 < len(parts) == profile.run.workers  # the stages of the only member exchange no gradients
    return max(need_of(profile, part, alone, max(sizes), on_gpu=on_gpu, bf16=budget.bf16).total for part in parts)


def _parts(profile: Profile, size: ModelSize) -> list[ModelSize]:
    """Return the sizes of what the workers of this machine hold: the whole model, or the stages of a pipeline."""
    stages = stages_of(profile, profile.run.workers)
    if stages < 2 or len(size.blocks) < stages:
        return [size]
    return [size.stage(*ends) for ends in pairwise(bounds_of([DevicePlan()] * stages, len(size.blocks)))]


def memory_saving_profiles(
    profile: Profile, with_bitsandbytes: Callable[[], bool] = has_bitsandbytes
) -> Iterator[Profile]:
    """Yield the profile, then changed ones that need less memory, in the fixed order."""
    return _candidates(profile, fittable_settings(profile), with_bitsandbytes, Relaxations())


def _candidates(
    profile: Profile, open_: frozenset[str], with_bitsandbytes: Callable[[], bool], relaxations: Relaxations
) -> Iterator[Profile]:
    """Yield the changed profiles to try, in the fixed order.

    Args:
        open_: options that may be changed.
    """
    for step in _steps(profile, open_, with_bitsandbytes, relaxations.without_checkpointing):
        for batch in _batches(step, open_, relaxations.larger_batches):
            changed = _with_batch(step, batch, open_)
            eval_batches = _eval_batches(changed, open_, relaxations.larger_batches)
            yield from (_with_eval_batch(changed, eval_batch) for eval_batch in eval_batches)


def _steps(
    profile: Profile, open_: frozenset[str], with_bitsandbytes: Callable[[], bool], without_checkpointing: bool
) -> Iterator[Profile]:
    model = profile.model
    memory_options = memory_saving_settings(model.task)
    if without_checkpointing and "gradient_checkpointing" in open_ and model.gradient_checkpointing:
        yield _changed(profile, "model", gradient_checkpointing=False)
    yield profile
    if "gradient_checkpointing" in open_ and not model.gradient_checkpointing and memory_options:
        profile = _changed(profile, "model", gradient_checkpointing=True)
        yield profile
    if "tuning" in open_ and model.tuning == "full" and not model.from_scratch and memory_options:
        rate = min(10.0, profile.training.learning_rate * _ADAPTERS_RATE)
        changed = _changed(profile, "model", tuning="lora")
        if changed is not profile:
            profile = _changed(changed, "training", learning_rate=rate) if "learning_rate" in open_ else changed
            yield profile
    if "base_precision" in open_ and profile.model.tuning == "lora" and memory_options and with_bitsandbytes():
        yield from (_changed(profile, "model", base_precision=precision) for precision in QUANTISED)


def _batches(profile: Profile, open_: frozenset[str], larger_batches: bool) -> list[int]:
    """Return the micro-batches to try, the largest first; a step has the same samples with each."""
    training = profile.training
    if "batch_size" not in open_ or profile.run.shares:
        return [training.batch_size]
    step_samples = training.batch_size * training.gradient_accumulation
    largest = step_samples if larger_batches else training.batch_size
    may_recompute = "gradient_checkpointing" in open_ and not profile.model.gradient_checkpointing
    # a GPU waits for kernel launches with one sample
    smallest = 2 if larger_batches and may_recompute and training.batch_size > 1 else 1
    return [size for size in range(largest, smallest - 1, -1) if step_samples % size == 0]


def _with_batch(profile: Profile, batch: int, open_: frozenset[str]) -> Profile:
    """Return the profile with other micro-batches; smaller ones also limit the evaluation batch."""
    training, eval_batch = profile.training, profile.evaluation.eval_batch_size
    if batch == training.batch_size:
        return profile
    accumulation = training.gradient_accumulation * training.batch_size // batch
    is_smaller = batch < training.batch_size
    profile = _changed(profile, "training", batch_size=batch, gradient_accumulation=accumulation)
    if not is_smaller:
        return profile
    return _with_eval_batch(profile, min(eval_batch, batch)) if "eval_batch_size" in open_ else profile


def _eval_batches(profile: Profile, open_: frozenset[str], larger_batches: bool) -> list[int]:
    """Return the evaluation batches to try, the largest first; they do not change the results."""
    eval_batch = profile.evaluation.eval_batch_size
    if "eval_batch_size" not in open_:
        return [eval_batch]
    size = eval_batch or profile.training.batch_size
    larger = [_LARGEST_EVALUATION >> halvings for halvings in range(_LARGEST_EVALUATION.bit_length())]
    smaller = [size >> halvings for halvings in range(1, size.bit_length())]
    return [*(batch for batch in larger if larger_batches and batch > size), eval_batch, *smaller]


def _with_eval_batch(profile: Profile, eval_batch: int) -> Profile:
    is_unchanged = eval_batch == profile.evaluation.eval_batch_size
    return profile if is_unchanged else _changed(profile, "evaluation", eval_batch_size=eval_batch)


def _changed(profile: Profile, section: str, **values: Any) -> Profile:
    """Return the profile with other values of a section; unchanged if they contradict other settings."""
    settings = getattr(profile, section)
    try:
        changed = type(settings).model_validate({**settings.model_dump(), **values})
    except ValidationError:
        return profile
    return profile.model_copy(update={section: changed})


def changed_options(before: Profile, after: Profile) -> dict[str, tuple[str, str]]:
    """Return the values before and after of the options that differ, as in an INI file."""
    changes = {}
    for name in _CHANGEABLE:
        section = next(s for s in ("model", "training", "evaluation") if hasattr(getattr(before, s), name))
        old, new = (as_text(getattr(getattr(profile, section), name)) for profile in (before, after))
        if old != new:
            changes[name] = (old, new)
    if changes.get("eval_batch_size", ("",))[0] == "0":  # 0 stands for the batch size
        changes["eval_batch_size"] = (as_text(before.training.batch_size), changes["eval_batch_size"][1])
        if len(set(changes["eval_batch_size"])) == 1:
            del changes["eval_batch_size"]
    return changes


def _relaxation_texts(profile: Profile, changes: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield descriptions of changes that save time because there is enough memory."""
    if "gradient_checkpointing" in fittable_settings(profile):
        yield f"checkpointing {'on' if profile.model.gradient_checkpointing else 'off'}"
    if "batch_size" in changes:
        passes = profile.training.gradient_accumulation
        yield f"batch {profile.training.batch_size} in {'one pass' if passes == 1 else f'{passes} passes'}"
    if "eval_batch_size" in changes:
        yield f"evaluations by {profile.evaluation.eval_batch_size}"


def _too_large(
    profile: Profile, budget: MemoryBudget, needs: int, alternative: Profile | None, need: _Need, has_bitsandbytes: bool
) -> BadInput:
    """Return the error, with the settings that would fit, and the package that they need."""
    shared = f" for {budget.members} workers" if budget.members > 1 else ""
    has = f"{memory_text(budget.total)}{shared}"
    message = f"{profile.name} needs about {memory_text(needs)} a worker, {budget.name} has {has}"
    if alternative is not None:
        settings = [f"{name} = {after}" for name, (_, after) in changed_options(profile, alternative).items()]
        hint = f"set {', '.join(settings)} (about {memory_text(need(alternative, budget))}), or take a smaller model"
        lacks_package = alternative.model.base_precision in QUANTISED and not has_bitsandbytes
        return BadInput(message, f"{package_line('bitsandbytes')}, then {hint}" if lacks_package else hint)
    fewer = "fewer workers, or " if budget.members > 1 else ""
    return BadInput(message, f"take {fewer}a smaller model, or a machine with more memory")


_Need = Callable[[Profile, MemoryBudget], int]
