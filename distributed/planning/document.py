"""What is to be trained as the planner sees it, and the result of planning, as documents: all candidates in order, the
one that was chosen, and why.

``plan --out`` writes it and ``distributed-train --plan`` reads it: :attr:`Planning.settings` is what changes in the
profile, :attr:`Planning.made_for` tells whether it is still the same job.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from distributed.planning.cluster import Bytes, Cluster, Document, DocumentFile, Name, Text
from profiles.declarations import Owning
from profiles.errors import BadInput
from profiles.options import less_memory, options_by_name
from profiles.schema import AskedEngine, Profile
from training.optimizers import state_bytes
from training.schedule import AskedRule, steps_in
from training.strategies.costs import Start, start_of

Preference = Literal["fastest", "closest-to-exact", "least-traffic"]
Count = Bytes


class ModelCounts(Document):
    """How large the model is."""

    trainable: Annotated[int, Field(ge=1, le=2**60)]
    """Trainable parameters: what is exchanged."""
    total: Annotated[int, Field(ge=1, le=2**60)]
    """All parameters."""
    layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Blocks that gradient checkpointing would recompute."""
    lora_trainable: Count = 0
    """Trainable parameters if the profile's adapters were used instead; 0: unknown."""


class Workload(ModelCounts):
    """What only the loaded model and data can tell."""

    model_path: Text = ""
    """The profile's model; empty: not checked against the profile."""
    tuning: Literal["full", "lora"] = "full"
    samples: Annotated[int, Field(ge=1, le=2**60)]
    """Training samples of one epoch."""


class Job(Owning, ModelCounts):
    """What is to be trained, and what the person wants of it."""

    weight_bytes: Annotated[int, Field(ge=1, le=16)] = 4
    """Of one parameter in memory; gradients have the same type."""
    optimizer_bytes: Annotated[int, Field(ge=0, le=64)] = 8
    """Of one trainable parameter: AdamW keeps two fp32 moments, and Muon at most as much."""
    samples: Annotated[int, Field(ge=1, le=2**60)]
    """Of the whole run, all epochs."""
    epochs: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Passes over the data in which these are seen."""
    drop_last: bool = False
    """Whether an epoch has no smaller step at its end."""
    steps: Count = 0
    """Optimizer steps; 0: as many as the samples need."""
    batch: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Samples of one forward pass of one device."""
    accumulation: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    global_batch: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Samples of one optimizer step whatever the number of members; 0: ``batch * accumulation`` for each of them."""
    start: Start = "pretrained"
    texts: bool = False
    """Whether it is a language model."""
    lora: bool = False
    gradient_checkpointing: bool = False
    adaptable: bool = True
    """Whether its task can recompute activations and train adapters."""
    lr_scaling: AskedRule = "auto"
    strategy: Text = "auto"
    engine: AskedEngine = "auto"
    codec: Text = "auto"
    preference: Preference = "fastest"
    max_loss_increase: Annotated[float, Field(ge=0, le=1)] = 0.02
    """How much higher than with per-step averaging the loss may be expected to end, as a share."""

    @property
    def reference_batch(self) -> int:
        """Samples of one optimizer step of one member alone."""
        return self.batch * self.accumulation

    def global_batch_of(self, members: int) -> int:
        """Return the samples of one optimizer step of a group."""
        return self.global_batch or members * self.reference_batch

    def steps_of(self, members: int) -> int:
        """Return the optimizer steps of the whole run."""
        each = max(1, round(self.samples / self.epochs)) / self.global_batch_of(members)
        return self.steps or steps_in(each, self.epochs, self.drop_last)


class Figures(DocumentFile):
    """One file of figures."""

    when_missing: ClassVar[str] = "name a file of measured figures with --figures FILE"
    when_broken: ClassVar[str] = "measure again, or fix the file"

    version: Literal[1] = 1
    cluster: Cluster
    workload: Workload
    measured_at: Annotated[float, Field(ge=0)] = 0.0
    """Unix time."""


def job_of(profile: Profile, workload: Workload, preference: Preference = "fastest", bound: float = 0.02) -> Job:
    """Return the job of a profile.

    Args:
        bound: see :attr:`Job.max_loss_increase`.

    Raises:
        BadInput: the figures are of another model.
    """
    model, training, strategy = profile.model, profile.training, profile.strategy
    other_model = workload.model_path and workload.model_path != model.model_path
    if other_model or workload.tuning != model.tuning:
        was = f"{workload.model_path or 'this model'} ({workload.tuning})"
        raise BadInput(
            f"the figures were measured for {was}, not for {model.model_path} ({model.tuning})", "measure this profile"
        )
    return Job(
        **workload.model_dump(include=set(ModelCounts.model_fields)),
        samples=max(1, round(workload.samples * training.epochs)),
        epochs=training.epochs,
        drop_last=training.drop_last,
        steps=training.max_steps,
        batch=training.batch_size,
        accumulation=training.gradient_accumulation,
        optimizer_bytes=state_bytes(training, 1),
        start=start_of(profile),
        texts=model.trait == "texts",
        lora=model.tuning == "lora",
        weight_bytes={"bf16": 2, "int8": 1, "nf4": 1}.get(model.base_precision, 4),
        gradient_checkpointing=model.gradient_checkpointing,
        adaptable=bool(less_memory(model.task)),
        lr_scaling=training.lr_scaling,
        owned=strategy.owned,
        strategy=strategy.strategy,
        engine=strategy.engine,
        codec=strategy.codec,
        preference=preference,
        max_loss_increase=bound,
    )


Engine = Literal["mesh", "nccl"]
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


class PredictedOutcome(Document):
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


class Candidate(PredictedOutcome):
    """One choice and what it should cost."""

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
    coordinator_at: Text = ""
    """Address of the coordinator on its best path; empty: the one on the route to it."""
    share: Annotated[float, Field(ge=0)] = 1.0
    """How much of every vector it owns, relative to the others."""
    addresses: tuple[Text, ...] = ()
    """Where the others reached it when links were measured, the fastest way first."""


class Settings(Document):
    """What the chosen candidate changes in a profile and its run."""

    options: dict[str, str | int | float | bool]
    """Options of the profile by name."""

    members: tuple[MemberSetting, ...]
    engine: Engine
    coordinator: Text = ""
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
