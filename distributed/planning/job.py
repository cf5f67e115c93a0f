"""What is to be trained, as the planner sees it, and the file of figures it stands on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from distributed.planning.cluster import Bytes, Cluster, Document, DocumentFile, Text
from profiles.declarations import Owning
from profiles.errors import BadInput
from profiles.options import less_memory
from profiles.schema import AskedEngine, Profile
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
    """Of one trainable parameter: AdamW keeps two fp32 moments."""
    samples: Annotated[int, Field(ge=1, le=2**60)]
    """Of the whole run, all epochs."""
    steps: Count = 0
    """Optimizer steps; 0: as many as the samples need."""
    batch: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Samples of one forward pass of one device."""
    accumulation: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    global_batch: Annotated[int, Field(ge=0, le=2**40)] = 0
    """Samples of one optimizer step whatever the number of members; 0: ``batch * accumulation`` for each of them."""
    start: Start = "pretrained"
    lora: bool = False
    gradient_checkpointing: bool = False
    adaptable: bool = True
    """Whether its task can recompute activations and train adapters."""
    lr_scaling: Literal["off", "sqrt", "linear"] = "sqrt"
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
        return self.steps or max(1, -(-self.samples // self.global_batch_of(members)))


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
        raise BadInput(f"the figures are of {was}, not of {model.model_path} ({model.tuning})", "measure this profile")
    return Job(
        **workload.model_dump(include=set(ModelCounts.model_fields)),
        samples=max(1, round(workload.samples * training.epochs)),
        steps=training.max_steps,
        batch=training.batch_size,
        accumulation=training.gradient_accumulation,
        start=start_of(profile),
        lora=model.tuning == "lora",
        weight_bytes=1 if model.base_precision == "int8" else 4,
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
