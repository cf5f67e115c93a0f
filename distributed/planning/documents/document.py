"""Documents of the planner: the job that it plans, and its result with all ranked candidates, the choice and reasons.

``plan --out`` writes the result and ``distributed-train --plan`` reads it: :attr:`Planning.settings` are the changes of
the profile, :attr:`Planning.made_for` identifies the job that the plan was made for.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from distributed.planning.documents.cluster import Bytes, Cluster, Document, DocumentFile, Name, Text
from distributed.planning.documents.evaluations import EvaluationPlan, SampleCounts
from profiles.declarations import OptionsByOwner
from profiles.errors import BadInput
from profiles.installation import program
from profiles.options import memory_saving_settings, options_by_name
from profiles.schema import AskedEngine, Profile
from training.numerics.schedule import AskedRule, RunSteps, run_steps
from training.optimization.optimizers import state_bytes
from training.records.plan import MemberPlan
from training.strategies.costs import Start, start_of

Preference = Literal["fastest", "closest-to-exact", "least-traffic"]
Count = Bytes


class ModelCounts(Document):
    """Size of the model."""

    trainable: Annotated[int, Field(ge=1, le=2**60)]
    """Trainable parameters, which are exchanged."""
    total: Annotated[int, Field(ge=1, le=2**60)]
    """All parameters."""
    layers: Annotated[int, Field(ge=1, le=10_000)] = 12
    """Blocks that gradient checkpointing recomputes."""
    lora_trainable: Count = 0
    """Trainable parameters with the profile's adapters; 0: unknown."""


class Workload(ModelCounts):
    """Figures that are known once model and data are loaded."""

    model_path: Text = ""
    """The profile's model; empty: not compared with the profile."""
    tuning: Literal["full", "lora"] = "full"
    samples: Annotated[int, Field(ge=1, le=2**60)]
    """Training samples of one epoch."""
    evaluated: SampleCounts = Field(default_factory=dict)
    """Samples of one evaluation by split; empty: none, or unknown."""


class Job(OptionsByOwner, ModelCounts):
    """The training job and the user's preferences, as the planner needs them."""

    weight_bytes: Annotated[int, Field(ge=1, le=16)] = 4
    """Bytes of one parameter in memory; gradients have the same type."""
    optimizer_bytes: Annotated[int, Field(ge=0, le=64)] = 8
    """Bytes of optimizer state per trainable parameter: AdamW has two fp32 moments, Muon at most as much."""
    samples: Annotated[int, Field(ge=1, le=2**60)]
    """Samples of the whole run, all epochs."""
    epochs: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Passes over the data in the whole run."""
    drop_last: bool = False
    """Whether the smaller batch at the end of an epoch is dropped."""
    steps: Count = 0
    """Optimizer steps; 0: as many as the samples need."""
    batch: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Samples of one forward pass of one device."""
    accumulation: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    global_batch: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Samples of one optimizer step for any number of members; 0: ``batch * accumulation`` for each member."""
    evaluation: EvaluationPlan = EvaluationPlan()
    start: Start = "pretrained"
    texts: bool = False
    """Whether the model is a language model."""
    lora: bool = False
    gradient_checkpointing: bool = False
    adaptable: bool = True
    """Whether the task can recompute activations and train adapters."""
    lr_scaling: AskedRule = "auto"
    strategy: Text = "auto"
    engine: AskedEngine = "auto"
    codec: Text = "auto"
    preference: Preference = "fastest"
    max_loss_increase: Annotated[float, Field(ge=0, le=1)] = 0.02
    """Accepted increase of the expected final loss over that of per-step averaging, as a share."""

    @property
    def reference_batch(self) -> int:
        """Samples of one optimizer step of one member alone."""
        return self.batch * self.accumulation

    def global_batch_of(self, members: int) -> int:
        """Return the samples of one optimizer step of a group."""
        return self.global_batch or members * self.reference_batch

    def run_steps(self, members: int) -> RunSteps:
        """Return the optimizer steps of the whole run of a group."""
        epoch_samples = max(1, round(self.samples / self.epochs))
        return run_steps(epoch_samples, self.global_batch_of(members), self.epochs, self.drop_last, self.steps)


class Figures(DocumentFile):
    """A file of measured figures."""

    when_missing: ClassVar[str] = "name a file of measured figures with --figures FILE"
    when_broken: ClassVar[str] = "measure again, or fix the file"

    version: Literal[1] = 1
    cluster: Cluster
    workload: Workload
    measured_at: Annotated[float, Field(ge=0)] = 0.0
    """Unix time."""


def job_of(
    profile: Profile, workload: Workload, preference: Preference = "fastest", max_loss_increase: float = 0.02
) -> Job:
    """Return the job of a profile.

    Args:
        max_loss_increase: see :class:`Job`.

    Raises:
        BadInput: the figures were measured with another model.
    """
    model, training, strategy = profile.model, profile.training, profile.strategy
    is_other_model = workload.model_path and workload.model_path != model.model_path
    if is_other_model or workload.tuning != model.tuning:
        measured_model = f"{workload.model_path or 'this model'} ({workload.tuning})"
        raise BadInput(
            f"the figures were measured for {measured_model}, not for {model.model_path} ({model.tuning})",
            "measure this profile",
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
        evaluation=EvaluationPlan.of(profile.evaluation, workload.evaluated),
        start=start_of(profile),
        texts=model.trait == "texts",
        lora=model.tuning == "lora",
        weight_bytes={"bf16": 2, "int8": 1, "nf4": 1}.get(model.base_precision, 4),
        gradient_checkpointing=model.gradient_checkpointing,
        adaptable=bool(memory_saving_settings(model.task)),
        lr_scaling=training.lr_scaling,
        owned=strategy.owned,
        strategy=strategy.strategy,
        engine=strategy.engine,
        codec=strategy.codec,
        preference=preference,
        max_loss_increase=max_loss_increase,
    )


Engine = Literal["mesh", "nccl"]
_RESULT_SECTIONS = ("model", "data", "training")


class Reason(Document):
    """A reason as data; :func:`distributed.planning.reasons.sentence` makes a sentence of it."""

    code: Text
    subject: Text = ""
    other: Text = ""
    """A second name in the sentence: a peer, an option, a detail."""
    numbers: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def of(cls, code: str, subject: str = "", other: str = "", **numbers: float) -> Reason:
        """Return a reason with its numbers by name."""
        return cls(code=code, subject=subject, other=other, numbers=numbers)


class Choice(Document):
    """A candidate plan before its prediction: strategy, codec, engine, members and rhythm."""

    strategy: Text
    codec: Text
    engine: Engine
    members: Annotated[tuple[Name, ...], Field(min_length=1)]
    interval: Annotated[int, Field(ge=1)] = 1
    """Steps between exchanges, H."""
    delay: Annotated[int, Field(ge=0)] = 0
    """Steps that an exchange overlaps."""
    blocks: tuple[tuple[int, int], ...] = ()
    """What each of the members holds, where these are the devices of one member, or of several one after another: its
    first block, and the first one of the next device. Empty: each holds the whole model."""

    @property
    def alone(self) -> bool:
        return len(self.members) == 1

    @property
    def name(self) -> str:
        """Strategy and codec: ``diloco mxfp4``, or ``alone``, or ``pipeline``."""
        if self.blocks:
            return "pipeline"
        return "alone" if self.alone else f"{self.strategy} {self.codec}"

    @property
    def over(self) -> str:
        """The machine that trains alone, ``the mesh``, or ``nccl``."""
        return self.members[0] if self.alone else "nccl" if self.engine == "nccl" else "the mesh"

    @property
    def without_interval(self) -> tuple[object, ...]:
        """Key that is equal for choices which differ in their intervals only."""
        return self.strategy, self.codec, self.engine, self.members, self.blocks


class MemberForecast(Document):
    """Predicted work and memory of one member."""

    name: Name
    micro_batch: int
    """Samples of one forward pass."""
    seconds: float
    """Mean compute of an optimizer step: those that end an epoch may be smaller."""
    busy: float = 0.0
    """``seconds`` with the mean work for exchanges: the part of a step that is not waiting."""
    correction: float = 1.0
    """Factor on compute from earlier runs, included in ``seconds``."""
    memory: int
    """Peak memory in bytes, as far as it is known."""
    memory_free: int
    """0: unknown."""
    bytes_per_hour: float
    """Sent and received together."""
    shard: float = 0.0
    """Part of every vector that it owns; 0 without a prediction."""


class PredictedOutcome(Document):
    """The predicted figures by which a choice is ranked."""

    choice: Choice
    fits: bool = True
    """Whether every member has enough memory."""
    step: float = 0.0
    """Mean seconds of an optimizer step: those that end an epoch may be smaller."""
    skew: float = 0.0
    """Seconds of a step that the slowest member waits because step times vary; included in ``exposed``."""
    samples_per_second: float = 0.0
    speed_up: float = 0.0
    """Samples/s over those of the best single machine."""
    token_efficiency: float = 1.0
    """Samples with which one machine reaches the same loss, over the samples of the group."""
    useful_speed_up: float = 0.0
    """``speed_up * token_efficiency``: the speed-up to the same loss."""
    loss_increase: float = 0.0
    """Increase of the expected loss over that of per-step averaging, as a share."""
    sources: tuple[str, ...] = ()
    """Keys of :func:`training.strategies.registry.loss_sources`."""
    bytes_per_hour: float = 0.0
    """Traffic of the machine with the most."""


class Candidate(PredictedOutcome):
    """A candidate plan with its prediction."""

    predicted: bool = True
    """``False``: the costs of the strategy are not known; only batch sizes, compute and memory are predicted."""
    members: tuple[MemberForecast, ...] = ()
    accumulation: int = 1
    global_batch: int = 0
    steps: int = 0
    samples: int = 0
    """Samples of the whole run, with the smaller steps that end its epochs; 0: unknown."""
    rounds: int = 0
    compute: float = 0.0
    """Mean seconds of the slowest member's step, without exchanges."""
    exchange: float = 0.0
    """Seconds of one exchange, without overlap."""
    exchange_correction: float = 1.0
    """Factor from earlier runs, included in ``exchange``."""
    exposed: float = 0.0
    """Mean seconds of a step that the slowest member spends on exchanges: waiting, and work for them."""
    evaluating: float = 0.0
    """Seconds of all evaluations of the run; 0: unknown."""
    reasons: tuple[Reason, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of its whole run: steps and evaluations; 0: unknown."""
        return self.steps * self.step + self.evaluating if self.step else 0.0

    @property
    def has_smaller_steps(self) -> bool:
        """Whether so many steps are smaller than the others that their mean is a sample less."""
        return 0 < round(self.samples / self.steps) < self.global_batch if self.steps else False

    @property
    def waiting(self) -> float:
        """Share of the machines' time in which training stands still for exchanges, as a run measures it: the mean over
        the machines. 0 if the time of a step is not known."""
        busy = [member.busy for member in self.members]
        if self.choice.blocks or not busy or not all(0.0 < seconds <= self.step for seconds in busy):
            return self.exposed / self.step if self.step else 0.0  # stages, or machines that do not wait for each other
        return 1.0 - statistics.fmean(busy) / self.step


class Settings(Document):
    """Changes of a profile and its run by the chosen candidate."""

    options: dict[str, str | int | float | bool]
    """Options of the profile by name."""
    members: tuple[MemberPlan, ...]
    """What was chosen for each member, by its name: batch size, shard and paths."""
    engine: Engine
    coordinator: Text = ""
    """Machine of the coordinator; empty: the machine that starts the run."""
    left_out: tuple[Name, ...] = ()


class MadeFor(Document):
    """Hashes of the inputs of a plan."""

    profile: str = ""
    """Hash of the profile's sections that decide the result: model, data and training."""
    machines: str = ""
    """Hash of the machines' names and host keys."""
    figures: str = ""
    """Hash of all figures."""


class Planning(DocumentFile):
    """The result of planning: all candidates, best first, the choice, and its settings."""

    when_missing: ClassVar[str] = f"make a plan with: {program('machines', 'plan', 'PROFILE --out FILE')}"
    when_broken: ClassVar[str] = "make the plan again with this version"

    version: Literal[1] = 1
    job: Job
    ranking: tuple[Candidate, ...]
    chosen: int | None
    """Index in the ranking; ``None`` if nothing fits."""
    settings: Settings | None = None
    reasons: tuple[Reason, ...] = ()
    made_for: MadeFor = MadeFor()

    @property
    def best(self) -> Candidate | None:
        """The chosen candidate."""
        return None if self.chosen is None else self.ranking[self.chosen]

    def same_loss_seconds(self, candidate: Candidate) -> float:
        """Return the time in which a candidate reaches the final loss of the best single machine, with its part of the
        evaluations.

        It compares candidates both for a fixed number of steps (in which a group sees more samples) and for a fixed
        number of samples. 0: the speed is not known.
        """
        samples = self.job.run_steps(1).samples
        rate = candidate.samples_per_second * candidate.token_efficiency
        training = candidate.steps * candidate.step
        return samples / rate * candidate.seconds / training if rate and training else 0.0

    def overlay(self, profile: Profile) -> Profile:
        """Return the profile with the plan's options.

        Raises:
            BadInput: nothing was chosen, or the plan was made for another profile.
        """
        if self.settings is None:
            hint = f"see why with: {program('machines', 'plan', 'PROFILE --explain')}"
            raise BadInput("the plan chose nothing: the job fits no machine", hint)
        if self.made_for.profile and self.made_for.profile != profile_hash(profile):
            hint = f"make it again with: {program('machines', 'plan', profile.name, '--out FILE')}"
            raise BadInput(f"the plan was made for a profile other than {profile.name}", hint)
        document = profile.model_dump()
        for name, value in self.settings.options.items():
            spec = options_by_name()[name]
            section = document[spec.section]
            options = section.setdefault("owned", {}).setdefault(spec.owner, {}) if spec.owner else section
            options[spec.field] = value
        return Profile.model_validate(document)


def digest(document: Any) -> str:
    """Return 16 hex digits of the SHA-256 of a JSON-able document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]


def profile_hash(profile: Profile) -> str:
    """Return a hash of the sections that decide a profile's result, without what a plan changes and output paths."""
    document = profile.model_dump(mode="json", include=set(_RESULT_SECTIONS))
    document["model"].pop("owned", None)
    document["model"] |= {"owned": changed} if (changed := profile.model.changed()) else {}
    return digest(document)
