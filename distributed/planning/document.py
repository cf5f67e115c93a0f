"""The result of planning as a document: all candidates in order, the one that was chosen, and why.

``plan --out`` writes it and ``distributed-train --plan`` reads it: :attr:`Planning.settings` is what changes in the
profile, :attr:`Planning.made_for` tells whether it is still the same job.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from distributed.planning.cluster import Document, DocumentFile, Name, Text
from distributed.planning.job import Job, Preference
from profiles.errors import BadInput
from profiles.options import canonical, options_by_name
from profiles.schema import Profile

Engine = Annotated[
    Literal["mesh", "nccl"],
    BeforeValidator(lambda name: "mesh" if name in ("hub", "torch") else name),  # plans of an earlier version
]
_RESULT_SECTIONS = ("model", "data", "training")


class Reason(Document):
    """Why something is so, as data; :func:`distributed.planning.reasons.sentence` says it in words."""

    code: Text
    subject: Text = ""
    other: Text = ""
    numbers: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def of(cls, code: str, subject: str = "", other: str = "", **numbers: float) -> Reason:
        """Return a reason with its numbers by name."""
        return cls(code=code, subject=subject, other=other, numbers=numbers)


class Choice(Document):
    """One way to train: everything that a prediction needs beside the figures and the job."""

    gone = ("hub",)
    strategy: Text
    codec: Text
    engine: Engine
    members: Annotated[tuple[Name, ...], Field(min_length=1)]
    interval: Annotated[int, Field(ge=1)] = 1
    """Steps between exchanges, H."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Steps that an exchange overlaps with."""

    @property
    def alone(self) -> bool:
        return len(self.members) == 1

    @property
    def name(self) -> str:
        """The way without H: ``diloco mxfp4``, or ``alone``."""
        return "alone" if self.alone else f"{self.strategy} {self.codec}"

    @property
    def over(self) -> str:
        """The machine that trains alone, ``the mesh``, or ``nccl``."""
        return self.members[0] if self.alone else "nccl" if self.engine == "nccl" else "the mesh"

    @property
    def way(self) -> tuple[object, ...]:
        """What two choices share that differ in H only."""
        return self.strategy, self.codec, self.engine, self.members


class MemberForecast(Document):
    """What one member does."""

    name: Name
    micro_batch: int
    """Samples of one forward pass."""
    seconds: float
    """Compute of one optimizer step."""
    busy: float = 0.0
    """The same with the work that exchanges take from it, on average: what a step does not wait for."""
    correction: float = 1.0
    """Factor on compute, of earlier runs; it is in ``seconds``."""
    memory: int
    """Bytes at the peak, as far as they are known."""
    memory_free: int
    """0: unknown."""
    bytes_per_hour: float
    """Sent and received together."""
    share: float = 0.0
    """Of every vector, that it owns; 0 where nothing was predicted."""


class Outcome(Document):
    """What ranks a choice."""

    choice: Choice
    fits: bool = True
    """Whether every member has the memory for it."""
    step: float = 0.0
    """Seconds of one optimizer step."""
    skew: float = 0.0
    """Seconds of a step that the slowest waits for others, because no two steps take the same time; in ``exposed``."""
    samples_per_second: float = 0.0
    speed_up: float = 0.0
    """Samples/s over those of the best single machine."""
    token_efficiency: float = 1.0
    """Share of the samples that count: as many of one machine's would bring the same loss."""
    useful_speed_up: float = 0.0
    """``speed_up * token_efficiency``: how much sooner the same loss is reached."""
    loss_increase: float = 0.0
    """Expected loss over that of per-step averaging, as a share."""
    sources: tuple[str, ...] = ()
    """Keys of :func:`training.strategies.registry.loss_sources`."""
    bytes_per_hour: float = 0.0
    """Of the machine that moves most."""


class Candidate(Outcome):
    """One choice and what it should cost."""

    gone = ("hub_memory",)
    predicted: bool = True
    """``False``: what the strategy costs is not known, so that only shares, compute and memory are."""
    members: tuple[MemberForecast, ...] = ()
    accumulation: int = 1
    global_batch: int = 0
    steps: int = 0
    rounds: int = 0
    compute: float = 0.0
    """Seconds of the slowest member's step, without any exchange."""
    exchange: float = 0.0
    """Seconds of one exchange, if nothing hid it."""
    exchange_correction: float = 1.0
    """Factor of earlier runs; it is in ``exchange``."""
    exposed: float = 0.0
    """Seconds of a step that the slowest member spends on exchanges, on average: waiting, and work for them."""
    reasons: tuple[Reason, ...] = ()

    @property
    def waiting(self) -> float:
        """Share of a step that waits for the network; 0 where its length is not known."""
        return self.exposed / self.step if self.step else 0.0


class MemberSetting(Document):
    """One member of the plan."""

    name: Name
    batch_size: int
    interface: Text = ""
    """Network interface of its best paths; empty: the one that SSH uses."""
    hub_at: Text = ""
    """Address of the coordinator on its best path; empty: the one on the route to it."""
    share: Annotated[float, Field(ge=0)] = 1.0
    """How much of every vector it owns, relative to the others."""
    addresses: tuple[Text, ...] = ()
    """Where the others reached it when links were measured, the fastest way first."""


class Settings(Document):
    """What the chosen candidate changes in a profile and its run."""

    options: dict[str, str | int | float | bool]
    """Options of the profile by name."""

    @field_validator("options")
    @classmethod
    def _by_their_names(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Plans of an earlier version say ``sync_interval`` for ``diloco.sync_interval``."""
        return {canonical(name): value for name, value in options.items()}

    members: tuple[MemberSetting, ...]
    engine: Engine
    hub: Text = ""
    """Machine of the coordinator; empty: this one."""
    left_out: tuple[Name, ...] = ()


class MadeFor(Document):
    """What a plan was made for."""

    profile: str = ""
    """Hash of what decides the result: model, data and training of the profile."""
    machines: str = ""
    """Hash of the machines' names and host keys."""
    figures: str = ""
    """Hash of all figures."""


class Planning(DocumentFile):
    """All candidates, best first, and what follows."""

    when_missing: ClassVar[str] = "make a plan with: plan PROFILE --out FILE"
    when_broken: ClassVar[str] = "make the plan again with this version"

    version: Literal[1] = 1
    job: Job
    preference: Preference
    ranking: tuple[Candidate, ...]
    chosen: int | None
    """Index in the ranking; ``None`` where nothing fits."""
    settings: Settings | None = None
    reasons: tuple[Reason, ...] = ()
    made_for: MadeFor = MadeFor()

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return None if self.chosen is None else self.ranking[self.chosen]

    def same_loss_seconds(self, candidate: Candidate) -> float:
        """Return the time of a candidate to the loss with which the whole run of the best single machine ends.

        Candidates compare by it whether the job has so many steps or so many samples: in as many steps a group sees
        more samples. 0: its speed is not known.
        """
        samples = self.job.steps_of(1) * self.job.global_batch_of(1)
        rate = candidate.samples_per_second * candidate.token_efficiency
        return samples / rate if rate else 0.0

    def overlay(self, profile: Profile) -> Profile:
        """Return the profile with the plan's options.

        Raises:
            BadInput: nothing was chosen, or the profile is another than the plan was made for.
        """
        if self.settings is None:
            raise BadInput("the plan chose nothing: the job fits no machine", "see why with: plan --explain")
        if self.made_for.profile and self.made_for.profile != profile_hash(profile):
            raise BadInput(f"the plan was made for a profile other than {profile.name}", "make it again with: plan")
        document = profile.model_dump()
        for name, value in self.settings.options.items():
            spec = options_by_name()[name]
            own = document[spec.section].setdefault("owned", {}).setdefault(spec.owner, {}) if spec.owner else {}
            (own if spec.owner else document[spec.section])[spec.field] = value
        return Profile.model_validate(document)


def digest(document: Any) -> str:
    """Return 16 hex digits of the SHA-256 of a JSON-able document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def profile_hash(profile: Profile) -> str:
    """Return a hash of what decides the result of a profile: not of what a plan changes, nor of where results go."""
    document = profile.model_dump(mode="json", include=set(_RESULT_SECTIONS))
    document["model"].pop("owned", None)
    document["model"] |= {"owned": changed} if (changed := profile.model.changed()) else {}
    return digest(document)
