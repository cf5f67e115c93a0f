"""Memory of a member, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from distributed.planning.cluster import ClusterMachine
from distributed.planning.document import Job
from distributed.planning.model_size import ModelSize
from profiles.declarations import Owning
from profiles.locations import own_code_in
from profiles.schema import QUANTISED, ModelSettings, Profile
from training.exchange.reduction import AT_ONCE, KEPT_BYTES
from training.optimizers import state_bytes
from training.strategies.costs import CostModel
from training.strategies.registry import cost_model, usual_strategy

_FP32 = 4
_BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.5625}
"""Of a weight below adapters; with nf4 64 of them have a scale in fp32."""
_INPUT_SHARE = 2 / 34
"""Of a block's activations: its input (Korthikanti et al. 2022, arXiv 2205.05198, section 4: 2 sbh of 34 sbh)."""
LORA_PART = 50
"""Rank 16 on all linear layers is 1.9 % (whisper-large) to 2.8 % (whisper-tiny) of the parameters."""

RUNTIME = 600_000_000
"""Python and torch, which a measured peak has in it and an estimate from the model's files has not."""
_BF16_SHARE, _BF16_INPUTS = 0.65, 0.95
"""Of what fp32 keeps for backward: norms and what goes past the blocks stay as they are. So do inputs, of the blocks
where nothing else is kept, and of adapters."""
_DROPOUT_SHARE = 1.48
"""Of what a block keeps without it: each adapter has its own copy of its input, and what was dropped of it."""
_EIGHT_BITS_SHARE = 1.15
"""Of what a step keeps without it: bitsandbytes has a copy in 16 bits of what goes into each layer (measured)."""
_PIECE = 1 << 25
"""Bytes below which the C library keeps freed pieces, with holes between them (mallopt(3), M_MMAP_THRESHOLD)."""
_HOLES, _ADAPTED_HOLES, _NO_HOLES = 1.45, 1.9, 1.1
"""What activations take with such holes, with adapters' many pieces, and without, over what they hold: measured."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a member needs, by what they are for."""

    runtime: int
    weights: int
    optimizer: int
    """With what the strategy and its exchange keep."""
    step: int
    """Activations and gradients at the worst moment of a step."""
    evaluation: int
    """Of one batch; nothing is kept for backward there."""
    teacher: int
    once: bool
    """Whether the teacher is gone when training begins."""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        own = self.weights + self.optimizer + max(self.step, self.evaluation)
        return self.runtime + (max(own, self.teacher) if self.once else own + self.teacher)


def need_of(
    profile: Profile,
    size: ModelSize,
    alone: bool = False,
    batch: int = 0,
    *,
    on_gpu: bool = False,
    bf16: bool = False,
) -> MemoryNeed:
    """Return what a member needs before anything was measured: weights, optimizer state, what the strategy and its
    exchange keep, the activations of one micro-batch and the gradients, or an evaluation, a teacher's weights, and the
    process.

    A frozen encoder leaves nothing for backward. A text's end comes first in backward: while the activations of an
    encoder are there, the gradients of the decoder are too; with several micro-batches all gradients are.

    Args:
        alone: whether the member trains by itself, so that nothing is kept for exchanges.
        batch: samples of its micro-batch; 0: as the profile says.
        on_gpu: of a CUDA device's memory, where the process is not, nor what is exchanged over the mesh, and whose
            allocator leaves few holes.
        bf16: whether ``mixed_precision = auto`` is bf16 there.
    """
    model, count = profile.model, batch or profile.training.batch_size
    frozen = size.encoder if model.freeze_encoder else 0
    trained = max(1, size.parameters - frozen)
    trainable = max(1, trained // LORA_PART) if model.tuning == "lora" else trained
    wanted = profile.training.mixed_precision
    halves = wanted in ("bf16", "fp16") or (bf16 and wanted == "auto")
    chosen = profile.strategy
    parts = strategy_bytes, exchange_bytes
    kept = 0 if alone else sum(part(chosen.strategy, trainable, chosen) for part in parts)
    if on_gpu and not alone:
        own = _costs(chosen.strategy, chosen).on_device
        kept = strategy_bytes(chosen.strategy, trainable, chosen) if own else 0
        kept += exchange_bytes(chosen.strategy, trainable, chosen) if chosen.engine == "nccl" else 0
    return MemoryNeed(
        runtime=0 if on_gpu else RUNTIME,
        weights=_weight_bytes(model, size, trainable, wanted == "bf16" or (bf16 and wanted == "auto")),
        optimizer=state_bytes(profile.training, trainable, _hidden(model, size, trainable)) + kept,
        step=_step_bytes(profile, size, trainable, count, on_gpu, halves),
        evaluation=_FP32 * size.listening * (profile.evaluation.eval_batch_size or count),
        teacher=_FP32 * size.teacher.parameters if size.teacher is not None else 0,
        once=profile.asks_teacher_once,
    )


def _hidden(model: ModelSettings, size: ModelSize, trainable: int) -> int:
    """Return the trained weights in hidden matrices: all adapters are. Of what a frozen encoder
    leaves, as large a share as of the whole model."""
    return trainable if model.tuning == "lora" else size.matrices * trainable // max(1, size.parameters)


def _weight_bytes(model: ModelSettings, size: ModelSize, trainable: int, bf16: bool) -> int:
    """Return the weights, with adapters beside them; ``bf16``: what steps compute in."""
    adapters = trainable if model.tuning == "lora" else 0
    auto = "bf16" if bf16 and adapters else "fp32"
    each = _BASE_BYTES[auto if model.base_precision == "auto" else model.base_precision]
    return int(_FP32 * (size.parameters + adapters - size.matrices) + each * size.matrices)


def _step_bytes(profile: Profile, size: ModelSize, trainable: int, batch: int, on_gpu: bool, halves: bool) -> int:
    """Return the activations of a micro-batch with the gradients that are there at the same time."""
    model, training = profile.model, profile.training
    share = _share(model, halves) * (_NO_HOLES if on_gpu else _holes(model, size, batch))
    heard = 0.0 if model.freeze_encoder else size.encoder_activations * share
    rest = (size.activations - size.encoder_activations - size.outputs) * share
    if model.gradient_checkpointing:
        layers = max(1, size.layers // 2) if size.encoder else size.layers
        heard, rest = checkpointed(heard, layers), checkpointed(rest, layers)
    rest += size.outputs
    moment = 0 if heard else size.working
    gradients = trainable
    first = gradients * (1 - size.encoder / size.parameters if size.encoder and not model.freeze_encoder else 1)
    if training.gradient_accumulation > 1 or not size.encoder:
        numbers = batch * (heard + rest) + gradients
    else:
        numbers = max(batch * (heard + rest), batch * heard + first, gradients)
    copies = trainable // 2 if halves else 0  # of the weights, in 16 bits
    return int(_FP32 * (numbers + batch * moment + copies))


def _share(model: ModelSettings, halves: bool) -> float:
    """Return what is kept for backward, over what is kept with all weights in fp32."""
    inputs = model.tuning == "lora" or model.gradient_checkpointing
    dropped = _DROPOUT_SHARE if model.tuning == "lora" and model.lora_dropout else 1.0
    eight = _EIGHT_BITS_SHARE if model.base_precision in QUANTISED else 1.0
    return dropped * eight * (1.0 if not halves else _BF16_INPUTS if inputs else _BF16_SHARE)


def _holes(model: ModelSettings, size: ModelSize, batch: int) -> float:
    """Return what activations take, over what they hold: by the size of one of them, where it is known."""
    one = _FP32 * batch * size.working // 7  # a block holds seven widths at once
    if not size.working or one >= _PIECE:
        return _NO_HOLES
    return _ADAPTED_HOLES if model.tuning == "lora" else _HOLES


def model_bytes(job: Job) -> int:
    """Weights of all parameters; gradients and optimizer state of those that are trained."""
    return job.total * job.weight_bytes + job.trainable * (job.weight_bytes + job.optimizer_bytes)


def strategy_bytes(strategy: str, trainable: int, settings: Owning | None = None) -> int:
    """What a strategy keeps beside the optimizer, nothing for a machine alone ("").

    Args:
        settings: with the strategy's own options, here and below; ``None``: their defaults.
    """
    return _costs(strategy, settings).vectors * _FP32 * trainable if strategy else 0


def _costs(strategy: str, settings: Owning | None = None) -> CostModel:
    """Return what a strategy keeps; of one whose cost is not known, and of ``auto``, what the usual one does."""
    own = bool(own_code_in(strategy))  # which may not be approved yet, and is not run to know this
    found = (None if own else cost_model(strategy, settings)) or cost_model(usual_strategy())
    return found or CostModel()


def mesh_bytes(strategy: str, trainable: int, owns: bool = True, settings: Owning | None = None) -> int:
    """What the mesh keeps at most beside the mean, which the strategy counts, and what an owner keeps: outcomes as they
    came, for those who miss one, and of a vector up to :data:`~training.exchange.reduction.AT_ONCE` the contribution,
    whose place the mean of a longer one takes.

    Args:
        owns: the member has a share of the vector. Who has none hears too late that all have the last outcome, and may
            keep it while the next one comes.
    """
    longest = _FP32 * _costs(strategy, settings).longest(trainable)
    outcomes = min(_FP32 * trainable, max(longest, KEPT_BYTES))
    return outcomes + (longest if longest <= AT_ONCE or not owns else 0)


def exchange_bytes(strategy: str, trainable: int, settings: Owning | None = None) -> int:
    """What the mesh keeps at most of an exchange with equal shares: an owner keeps the others' contributions until all
    are there, ``(n - 1) / n`` of the longest vector in fp32."""
    owned = _FP32 * _costs(strategy, settings).longest(trainable)
    return owned + mesh_bytes(strategy, trainable, settings=settings)


def checkpointed(per_sample: float, layers: int) -> float:
    """Activations of a sample with gradient checkpointing: the input of every block, and one block's own."""
    return per_sample * min(1.0, _INPUT_SHARE + 1 / layers)


def counts_here(machine: ClusterMachine, strategy: str) -> bool:
    """Whether a strategy's vectors are in the memory that training uses; a CUDA device has its own."""
    return machine.device != "cuda" or _costs(strategy).on_device


def member_bytes(job: Job, machine: ClusterMachine, strategy: str, batch: int) -> int:
    """Return the peak of a member with a micro-batch of ``batch`` samples.

    What was measured there stands; the formula takes the place of what was not.
    """
    theory = model_bytes(job)
    measured = machine.memory_fit
    fixed = max(float(theory), measured[0]) if measured else float(theory)
    extra = strategy_bytes(strategy, job.trainable, job) if counts_here(machine, strategy) else 0
    return int(fixed + extra + batch * (machine.memory_per_sample(theory) or 0.0))


def largest_batch(job: Job, machine: ClusterMachine, strategy: str, reserved: int = 0) -> int:
    """Return the largest micro-batch that fits, 0 where none does; a million where nothing is known.

    Args:
        reserved: bytes that something else needs there (the exchange).
    """
    most = 1_000_000
    if not machine.memory_free:
        return most
    empty = member_bytes(job, machine, strategy, 0) + reserved
    each = machine.memory_per_sample(model_bytes(job)) or 0.0
    if empty > machine.memory_free:
        return 0
    return most if not each else min(most, int((machine.memory_free - empty) / each))


def with_checkpointing(job: Job, machine: ClusterMachine) -> int:
    """Return the bytes of one sample's step with gradient checkpointing."""
    each = machine.memory_per_sample(model_bytes(job)) or 0.0
    return int(member_bytes(job, machine, "", 0) + checkpointed(each, job.layers))


def with_lora(job: Job, machine: ClusterMachine) -> int:
    """Return the bytes of one sample's step with adapters instead of all weights."""
    adapters = job.lora_trainable or job.trainable // LORA_PART
    saved = model_bytes(job) - model_bytes(job.model_copy(update={"trainable": adapters}))
    return member_bytes(job, machine, "", 1) - saved
