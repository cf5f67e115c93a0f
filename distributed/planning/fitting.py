"""Makes a profile fit the memory of machines: options that nobody has set are changed, in a fixed order.

0. No gradient checkpointing, and on GPUs the samples of a step in one pass and evaluations in large batches: the same
   results, in less time.
1. A smaller micro-batch, and as many more of them: a step has the same samples, and its result is the same.
2. Gradient checkpointing: the same result, for about a third more compute.
3. Adapters instead of all weights (LoRA), where the model is trained already: another way to train. They are given ten
   times the learning rate, unless that was set (Schulman et al. 2025, "LoRA Without Regret").
4. The other weights in 8 bits under the adapters, where bitsandbytes is installed.

Each is tried with all smaller micro-batches before the next; the first that fits is taken. With each micro-batch the
batches of evaluations are halved until they fit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from distributed.planning.memory_model import need_of
from distributed.planning.model_size import ModelSize, size_for
from profiles.errors import BadInput
from profiles.layers import open_settings
from profiles.options import as_text, less_memory
from profiles.schema import FITTED, Profile
from training.data import shares_to_batch_sizes

_GB = 2**30
_ADAPTERS_RATE = 10.0
_SYSTEM = 1_000_000_000
"""Bytes that the system of a machine needs, and an eighth of its memory for what a person has open."""
_LARGEST_EVALUATION = 64
"""Samples that are evaluated at once on a GPU: a token of a generated text takes as long for one as for many."""
_ROOMY = 0.85
"""Of a machine's usable memory what a setting takes that is chosen because there is room for it: an estimate may be
wrong, and other programs come."""
_DRIVER = 600_000_000
"""Bytes of a GPU that its driver and libraries take, and a sixteenth for holes between allocations."""
DOUBT = 1.25
"""An estimate must be so much above a machine's memory before it keeps the machine out."""


@dataclass(frozen=True)
class MemoryBudget:
    """The memory of a machine, or of one of its devices."""

    name: str
    total: int
    """Bytes; 0: unknown."""
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``mps``."""
    members: int = 1
    """Workers that share it."""
    limited: bool = False
    """Whether it is what a control group allows: the system has its own beside it."""
    bf16: bool = False
    """Whether ``mixed_precision = auto`` is bf16 there."""

    @property
    def usable(self) -> int:
        """Bytes that training may take."""
        if self.device == "cuda":
            return max(0, self.total - self.total // 16 - _DRIVER)
        if self.device == "mps":  # what Metal recommends to stay under on machines of 8 and 16 GB
            return self.total * 2 // 3
        return self.total - self.total // 16 if self.limited else max(0, self.total - self.total // 8 - _SYSTEM)


class FreeMemory(NamedTuple):
    """The memory of a machine, or of the smallest of its devices that trains, in bytes; 0: unknown."""

    free: int = 0
    total: int = 0
    device: str = "cpu"
    bf16: bool = False
    """Whether ``mixed_precision = auto`` is bf16 there."""

    def need(self, profile: Profile, size: ModelSize) -> int:
        """Return what a member needs of it."""
        return need_of(profile, size, on_gpu=self.device == "cuda", bf16=self.bf16).total

    def budget(self, name: str) -> MemoryBudget:
        return MemoryBudget(name, self.total, self.device, bf16=self.bf16)


class Looser(NamedTuple):
    """What may be tried beyond the settings as they are."""

    keeps_activations: bool = False
    """No gradient checkpointing, where activations can be estimated."""
    widens: bool = False
    """Larger batches, where they save time."""


@dataclass(frozen=True)
class Fitted:
    """A profile, and what was changed in it."""

    profile: Profile
    changes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Values before and after, as an INI file has them, by option."""
    needed: int = 0
    """Bytes of a member as the profile was."""
    needs: int = 0
    """Bytes of a member as it is."""
    tightest: MemoryBudget | None = None
    """The machine that decided."""

    @property
    def line(self) -> str:
        """The line shown before the start; empty where nothing was changed and everything fits."""
        if self.tightest is None:
            return ""
        room, has = self.tightest, f"{self.tightest.name} has {_gb(self.tightest.total)}"
        shared = f" for {room.members} workers" if room.members > 1 else ""
        if not self.changes:
            return f"memory is tight: about {_gb(self.needs)} a worker, {has}{shared}"
        if self.needs >= self.needed:
            return f"{has}{shared}: {', '.join(_loosened(self.profile, self.changes))} (about {_gb(self.needs)})"
        said = [f"{name} {after} instead of {before}" for name, (before, after) in self.changes.items()]
        before = self.changes["tuning"][0] if "tuning" in self.changes else "as set it"
        tight = ", which is tight" if self.needs * room.members > room.usable else ""
        return f"{', '.join(said)}: {before} needs {_gb(self.needed)}, {has}{shared}; so {_gb(self.needs)}{tight}"


def fit(profile: Profile, rooms: Sequence[MemoryBudget], tell: Callable[[str], None] = lambda line: None) -> Profile:
    """Return the profile as it fits rooms, by the model's files here; ``tell`` hears what was changed.

    Raises:
        BadInput: what was set cannot fit.
    """
    found = fitted(profile, size_for(profile), rooms)
    if found.line:
        tell(found.line)
    return found.profile


_IN_ORDER = (
    "tuning",
    "base_precision",
    "gradient_checkpointing",
    "batch_size",
    "gradient_accumulation",
    "eval_batch_size",
    "learning_rate",
)
"""What can be changed, the gravest first."""


def has_8_bits() -> bool:
    """Whether bitsandbytes is installed here, and so on machines that are prepared from here."""
    return importlib.util.find_spec("bitsandbytes") is not None


def fitted(
    profile: Profile,
    size: ModelSize | None,
    rooms: Sequence[MemoryBudget],
    alone: bool | None = None,
    with_8_bits: Callable[[], bool] = has_8_bits,
) -> Fitted:
    """Return the profile as it fits all rooms.

    Args:
        alone: whether one member trains by itself, which keeps nothing for exchanges; by default if the rooms have one.
        with_8_bits: whether the frozen weights can be kept in 8 bits.

    Raises:
        BadInput: what was set, or the model itself, cannot fit; says by how much, and what would.
    """
    known = [room for room in rooms if room.total]
    if size is None or not known:
        return Fitted(profile)
    alone = sum(room.members for room in rooms) == 1 if alone is None else alone
    loosens = size.activations > 0 and len(known) == len(rooms)
    widens = loosens and size.teacher is None and any(room.device != "cpu" for room in known)
    tried = partial(_candidates, profile, open_settings(profile), with_8_bits, Looser(loosens, widens))
    need = partial(_needed, size=size, alone=alone)

    def fullest(candidate: Profile) -> tuple[float, MemoryBudget]:
        """Return the largest part of a room that would be taken, and the room."""
        parts = ((need(candidate, room) * room.members / max(1, room.usable), room) for room in known)
        return max(parts, key=lambda found: found[0])

    def result(candidate: Profile, room: MemoryBudget) -> Fitted:
        return Fitted(candidate, _changes(profile, candidate), need(profile, room), need(candidate, room), room)

    tightest = fullest(profile)[1]
    for candidate in tried():
        if fullest(candidate)[0] <= (_ROOMY if need(candidate, tightest) > need(profile, tightest) else 1):
            roomy = fullest(profile)[0] <= 1
            found = result(candidate, fullest(candidate)[1] if roomy else tightest)
            return found if found.changes else replace(found, tightest=None)
    least = min(tried(), key=lambda candidate: fullest(candidate)[0])
    tightest = fullest(least)[1]
    if need(least, tightest) * tightest.members > tightest.total * DOUBT:
        whatever = _candidates(profile, frozenset(FITTED), with_8_bits, Looser())
        fitting = (candidate for candidate in whatever if fullest(candidate)[0] <= 1)
        raise _too_large(profile, tightest, need(least, tightest), next(fitting, None), need)
    return result(least, tightest)


def _needed(profile: Profile, room: MemoryBudget, size: ModelSize, alone: bool) -> int:
    """Return the bytes of the member with the largest share in such memory."""
    batch, parts = profile.training.batch_size, [float(part) for part in profile.run.shares.split(",") if part]
    sizes = shares_to_batch_sizes(parts, batch) if parts else [batch]
    return need_of(profile, size, alone, max(sizes), on_gpu=room.device == "cuda", bf16=room.bf16).total


def _candidates(
    profile: Profile, open_: frozenset[str], with_8_bits: Callable[[], bool], looser: Looser
) -> Iterator[Profile]:
    """Yield the profile with what may be changed, in the fixed order."""
    for step in _steps(profile, open_, with_8_bits, looser.keeps_activations):
        for batch in _batches(step, open_, looser.widens):
            changed = _with_batch(step, batch, open_)
            yield from (_with_evaluations(changed, size) for size in _evaluations(changed, open_, looser.widens))


def _steps(
    profile: Profile, open_: frozenset[str], with_8_bits: Callable[[], bool], keeps_activations: bool
) -> Iterator[Profile]:
    model = profile.model
    ways = less_memory(model.task)
    if keeps_activations and "gradient_checkpointing" in open_ and model.gradient_checkpointing:
        yield _changed(profile, "model", gradient_checkpointing=False)
    yield profile
    if "gradient_checkpointing" in open_ and not model.gradient_checkpointing and ways:
        profile = _changed(profile, "model", gradient_checkpointing=True)
        yield profile
    if "tuning" in open_ and model.tuning == "full" and not model.from_scratch and ways:
        rate = min(10.0, profile.training.learning_rate * _ADAPTERS_RATE)
        changed = _changed(profile, "model", tuning="lora")
        if changed is not profile:
            profile = _changed(changed, "training", learning_rate=rate) if "learning_rate" in open_ else changed
            yield profile
    if "base_precision" in open_ and profile.model.tuning == "lora" and ways and with_8_bits():
        yield _changed(profile, "model", base_precision="int8")


def _batches(profile: Profile, open_: frozenset[str], widens: bool) -> list[int]:
    """Return the micro-batches to try, the largest first; all make steps of the same samples."""
    training = profile.training
    if "batch_size" not in open_ or profile.run.shares:
        return [training.batch_size]
    whole = training.batch_size * training.gradient_accumulation
    largest = whole if widens else training.batch_size
    may_recompute = "gradient_checkpointing" in open_ and not profile.model.gradient_checkpointing
    least = 2 if widens and may_recompute and training.batch_size > 1 else 1  # a GPU waits for launches with one
    return [size for size in range(largest, least - 1, -1) if whole % size == 0]


def _with_batch(profile: Profile, batch: int, open_: frozenset[str]) -> Profile:
    """Return the profile with other micro-batches, and no larger batches in evaluations than smaller ones."""
    training, heard = profile.training, profile.evaluation.eval_batch_size
    if batch == training.batch_size:
        return profile
    more = training.gradient_accumulation * training.batch_size // batch
    smaller = batch < training.batch_size
    profile = _changed(profile, "training", batch_size=batch, gradient_accumulation=more)
    if not smaller:
        return profile
    return _with_evaluations(profile, min(heard, batch)) if "eval_batch_size" in open_ else profile


def _evaluations(profile: Profile, open_: frozenset[str], widens: bool) -> list[int]:
    """Return the batches of evaluations to try, the largest first. They hear whole windows, and change no result."""
    heard = profile.evaluation.eval_batch_size
    if "eval_batch_size" not in open_:
        return [heard]
    size = heard or profile.training.batch_size
    larger = [_LARGEST_EVALUATION >> halvings for halvings in range(_LARGEST_EVALUATION.bit_length())]
    smaller = [size >> halvings for halvings in range(1, size.bit_length())]
    return [*(more for more in larger if widens and more > size), heard, *smaller]


def _with_evaluations(profile: Profile, heard: int) -> Profile:
    same = heard == profile.evaluation.eval_batch_size
    return profile if same else _changed(profile, "evaluation", eval_batch_size=heard)


def _changed(profile: Profile, section: str, **values: Any) -> Profile:
    """Return the profile with other values; as it is where they do not go with what is set."""
    own = getattr(profile, section)
    try:
        changed = type(own).model_validate({**own.model_dump(), **values})
    except ValidationError:
        return profile
    return profile.model_copy(update={section: changed})


def _changes(before: Profile, after: Profile) -> dict[str, tuple[str, str]]:
    found = {}
    for name in _IN_ORDER:
        section = next(part for part in ("model", "training", "evaluation") if hasattr(getattr(before, part), name))
        values = tuple(as_text(getattr(getattr(one, section), name)) for one in (before, after))
        if values[0] != values[1]:
            found[name] = (values[0], values[1])
    if found.get("eval_batch_size", ("",))[0] == "0":  # which stands for the batch size
        found["eval_batch_size"] = (as_text(before.training.batch_size), found["eval_batch_size"][1])
        if len(set(found["eval_batch_size"])) == 1:
            del found["eval_batch_size"]
    return found


def _loosened(profile: Profile, changes: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Yield in words what was changed because there is room for it."""
    if "gradient_checkpointing" in open_settings(profile):
        yield f"checkpointing {'on' if profile.model.gradient_checkpointing else 'off'}"
    if "batch_size" in changes:
        passes = profile.training.gradient_accumulation
        yield f"batch {profile.training.batch_size} in {'one pass' if passes == 1 else f'{passes} passes'}"
    if "eval_batch_size" in changes:
        yield f"evaluations by {profile.evaluation.eval_batch_size}"


def _too_large(profile: Profile, room: MemoryBudget, needs: int, would: Profile | None, need: _Need) -> BadInput:
    """Return the refusal, with the settings that would fit."""
    shared = f" for {room.members} workers" if room.members > 1 else ""
    message = f"{profile.name} needs about {_gb(needs)} a worker, {room.name} has {_gb(room.total)}{shared}"
    if would is not None:
        settings = [f"{name} = {after}" for name, (_, after) in _changes(profile, would).items()]
        return BadInput(message, f"set {', '.join(settings)} (about {_gb(need(would, room))}), or take a smaller model")
    fewer = "fewer workers, or " if room.members > 1 else ""
    return BadInput(message, f"take {fewer}a smaller model, or a machine with more memory")


_Need = Callable[[Profile, MemoryBudget], int]


def _gb(size: int) -> str:
    return f"{size / _GB:.1f} GB"
