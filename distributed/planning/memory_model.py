"""Memory of a member and of the hub, in bytes."""

from __future__ import annotations

from distributed.planning.cluster import Machine
from distributed.planning.job import Job
from distributed.planning.model_size import ModelSize
from profiles.schema import Profile
from training.strategies.costs import CostModel
from training.strategies.registry import cost_model, usual_strategy

_FP32 = 4
_INPUT_SHARE = 2 / 34
"""Of a block's activations: its input (Korthikanti et al. 2022, arXiv 2205.05198, section 4: 2 sbh of 34 sbh)."""
LORA_PART = 50
"""Rank 16 on all linear layers is 1.9 % (whisper-large) to 2.8 % (whisper-tiny) of the parameters."""

RUNTIME = 600_000_000
"""Python and torch, which a measured peak has in it and an estimate from the model's files has not."""


def estimated_bytes(profile: Profile, size: ModelSize) -> int:
    """Return what a member needs before anything was measured: weights, gradients, optimizer state, what the strategy
    keeps, the activations of one micro-batch, a teacher's weights, and the process itself. A teacher that is asked once
    is gone when training begins.

    Windows that follow the clips need less, by their longest clip, which only the data tells: a short run measures it,
    as a run begins with its longest samples. A frozen encoder leaves nothing for backward.
    """
    model = profile.model
    frozen = (size.encoder, size.encoder_activations) if model.freeze_encoder else (0, 0)
    trained = max(1, size.parameters - frozen[0])
    trainable = max(1, trained // LORA_PART) if model.tuning == "lora" else trained
    job = Job(trainable=trainable, total=size.parameters, layers=size.layers, samples=1, lora=model.tuning == "lora")
    width = 2 if profile.training.mixed_precision not in ("off", "auto") else _FP32
    kept = float((size.activations - frozen[1]) * width)
    kept = checkpointed(kept, size.layers) if model.gradient_checkpointing else kept
    strategy = strategy_bytes(profile.strategy.strategy, trainable)
    own, teacher = model_bytes(job) + strategy + kept * profile.training.batch_size, _teacher_bytes(size)
    return int((max(own, teacher) if profile.asks_teacher_once else own + teacher) + RUNTIME)


def _teacher_bytes(size: ModelSize) -> int:
    """Weights of a model that only answers."""
    return _FP32 * size.teacher.parameters if size.teacher is not None else 0


def model_bytes(job: Job) -> int:
    """Weights of all parameters; gradients and optimizer state of those that are trained."""
    return job.total * job.weight_bytes + job.trainable * (job.weight_bytes + job.optimizer_bytes)


def strategy_bytes(strategy: str, trainable: int, error_feedback: bool = False) -> int:
    """What a strategy keeps beside the optimizer, nothing for a machine alone (""); error feedback keeps one more."""
    if not strategy:
        return 0
    return (_costs(strategy).vectors + error_feedback) * _FP32 * trainable


def _costs(strategy: str) -> CostModel:
    """Return what a strategy keeps; of one whose cost is not known, and of ``auto``, what the usual one does."""
    found = cost_model(strategy) or cost_model(usual_strategy())
    return found or CostModel()


def hub_bytes(trainable: int, payload: float, members: int, error_feedback: bool = False) -> int:
    """An upper bound for the hub: the mean in fp32, every member's payload if one of them is late, and what encoding
    the means has lost."""
    return int((1 + error_feedback) * _FP32 * trainable + members * payload)


def checkpointed(per_sample: float, layers: int) -> float:
    """Activations of a sample with gradient checkpointing: the input of every block, and one block's own."""
    return per_sample * min(1.0, _INPUT_SHARE + 1 / layers)


def counts_here(machine: Machine, strategy: str) -> bool:
    """Whether a strategy's vectors are in the memory that training uses; a CUDA device has its own."""
    return machine.device != "cuda" or _costs(strategy).on_device


def member_bytes(job: Job, machine: Machine, strategy: str, batch: int) -> int:
    """Return the peak of a member with a micro-batch of ``batch`` samples.

    What was measured there stands; the formula takes the place of what was not.
    """
    theory = model_bytes(job)
    measured = machine.memory_fit
    fixed = max(float(theory), measured[0]) if measured else float(theory)
    extra = strategy_bytes(strategy, job.trainable) if counts_here(machine, strategy) else 0
    return int(fixed + extra + batch * (machine.memory_per_sample(theory) or 0.0))


def largest_batch(job: Job, machine: Machine, strategy: str, reserved: int = 0) -> int:
    """Return the largest micro-batch that fits, 0 where none does; a million where nothing is known.

    Args:
        reserved: bytes that something else needs there (the hub).
    """
    most = 1_000_000
    if not machine.memory_free:
        return most
    empty = member_bytes(job, machine, strategy, 0) + reserved
    each = machine.memory_per_sample(model_bytes(job)) or 0.0
    if empty > machine.memory_free:
        return 0
    return most if not each else min(most, int((machine.memory_free - empty) / each))


def with_checkpointing(job: Job, machine: Machine, strategy: str) -> int:
    """Return the bytes of one sample's step with gradient checkpointing."""
    each = machine.memory_per_sample(model_bytes(job)) or 0.0
    return int(member_bytes(job, machine, strategy, 0) + checkpointed(each, job.layers))


def with_lora(job: Job, machine: Machine, strategy: str) -> int:
    """Return the bytes of one sample's step with adapters instead of all weights."""
    adapters = job.lora_trainable or job.trainable // LORA_PART
    saved = model_bytes(job) - model_bytes(job.model_copy(update={"trainable": adapters}))
    if counts_here(machine, strategy):
        saved += strategy_bytes(strategy, job.trainable) - strategy_bytes(strategy, adapters)
    return member_bytes(job, machine, strategy, 1) - saved
