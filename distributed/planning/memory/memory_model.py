"""Predicts the memory of a member, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distributed.planning.documents.cluster import ClusterMachine
from distributed.planning.documents.document import Job
from profiles.declarations import OptionsByOwner
from profiles.locations import user_code_in
from profiles.schema import QUANTISED, ModelSettings, Profile, StrategySettings
from training.exchange.mean.reduction import AT_ONCE, KEPT_BYTES
from training.optimization.optimizers import state_bytes
from training.strategies.costs import CostModel
from training.strategies.registry import cost_model, default_strategy
from training.tasks.inputs.model_size import ModelSize

_FP32 = 4
_BASE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "nf4": 0.5625}
"""Bytes of a weight under adapters; with nf4, 64 weights share a scale in fp32."""
_INPUT_SHARE = 2 / 34
"""Share of a block's input in its activations (Korthikanti et al. 2022, arXiv 2205.05198, section 4: 2 of 34 sbh)."""
_UNDIVIDED_SHARE = 10 / 34
"""Share of a block's activations that every device has whole if each computes a slice of every matrix (there, section
4.2.1)."""
LORA_DIVISOR = 50
"""Parameters over those of adapters: rank 16 on all linear layers is 1.9 % (whisper-large) to 2.8 % (whisper-tiny)."""

RUNTIME_BYTES = 600_000_000
"""Memory of Python and torch, which a measured peak includes and an estimate from the model's files does not."""
_BF16_SHARE, _BF16_INPUTS_SHARE = 0.65, 0.95
"""Saved activations over those in fp32: norms and residual streams stay in fp32. So do the inputs of blocks, which are
all that checkpointing saves, and those of adapters."""
_DROPOUT_SHARE = 1.48
"""Saved activations with LoRA dropout over those without: each adapter has its own copy of its input, and the mask."""
_EIGHT_BITS_SHARE = 1.15
"""Saved activations with 8-bit weights over those without: bitsandbytes copies the inputs of layers to 16 bits."""
_LARGEST_POOLED = 1 << 25
"""Bytes below which the C library keeps freed blocks, which fragments its memory (mallopt(3), M_MMAP_THRESHOLD)."""
_FRAGMENTED, _ADAPTERS_FRAGMENTED, _UNFRAGMENTED = 1.45, 1.9, 1.1
"""Memory of activations over their size: in pooled blocks, with the many small blocks of adapters, and in mapped blocks
(measured)."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a member needs, by purpose."""

    runtime: int
    weights: int
    optimizer: int
    """Optimizer state, with the state of the strategy and its exchange."""
    step: int
    """Peak of activations and gradients in a step."""
    evaluation: int
    """Activations of one evaluation batch; nothing is saved for backward."""
    teacher: int
    teacher_unloaded: bool
    """Whether the teacher is unloaded before training begins."""

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        training = self.weights + self.optimizer + max(self.step, self.evaluation)
        return self.runtime + (max(training, self.teacher) if self.teacher_unloaded else training + self.teacher)


def need_of(
    profile: Profile,
    size: ModelSize,
    alone: bool = False,
    batch: int = 0,
    *,
    on_gpu: bool = False,
    bf16: bool = False,
    under_way: int = 1,
    embedding: int = 0,
) -> MemoryNeed:
    """Estimate the memory of a member without measurements: weights, optimizer state, state of the strategy and its
    exchange, activations of one micro-batch with the gradients (or of an evaluation), a teacher, and the process.

    A frozen encoder saves nothing for backward. Backward begins at the end of the decoder: the gradients of the decoder
    exist while the activations of the encoder do; with several micro-batches all gradients do.

    Args:
        size: of the model, or of the stage of a pipeline that a device of the member holds
            (:meth:`~training.tasks.inputs.model_size.ModelSize.stage`).
        alone: whether the member trains by itself, without exchanges.
        batch: samples of its micro-batch; 0: that of the profile.
        on_gpu: estimate the memory of a CUDA device: without the process and the exchanges over the mesh, and with an
            allocator that fragments little.
        bf16: whether ``mixed_precision = auto`` is bf16 there.
        under_way: micro-batches whose activations a stage holds at the same time: those between their forward and their
            backward (Narayanan et al. 2021, arXiv 2006.09503, section 2.2).
        embedding: gradients of an embedding that a micro-batch adds to those of the earlier ones behind the decoder's
            backward, while the activations of the encoder exist.
    """
    model, count = profile.model, batch or profile.training.batch_size
    frozen = size.encoder if model.freeze_encoder else 0
    trained = max(1, size.parameters - frozen)
    trainable = max(1, trained // LORA_DIVISOR) if model.tuning == "lora" else trained
    precision = profile.training.mixed_precision
    is_half = precision in ("bf16", "fp16") or (bf16 and precision == "auto")
    return MemoryNeed(
        runtime=0 if on_gpu else RUNTIME_BYTES,
        weights=_weight_bytes(model, size, trainable, precision == "bf16" or (bf16 and precision == "auto")),
        optimizer=state_bytes(profile.training, trainable, _matrix_parameters(model, size, trainable))
        + _strategy_state(profile.strategy, trainable, alone, on_gpu),
        step=_step_bytes(profile, size, trainable, count, on_gpu, is_half, under_way, embedding),
        evaluation=_FP32 * size.evaluation * (profile.evaluation.eval_batch_size or count),
        teacher=_FP32 * size.teacher.parameters if size.teacher is not None else 0,
        teacher_unloaded=profile.caches_teacher_outputs,
    )


def need_of_shard(
    profile: Profile, size: ModelSize, devices: int, batch: int = 0, *, on_gpu: bool = False, bf16: bool = False
) -> int:
    """Return the bytes at the peak of a device that holds one of equal shards of all weights, computes a part of each
    micro-batch, and gathers the weights and gradients of one block at a time.

    Args:
        batch: samples of a micro-batch of all devices; 0: those of the profile.
    """
    share = _divided(size, devices if not (on_gpu and profile.run.offload) else max(1, size.parameters))
    samples = -(-(batch or profile.training.batch_size) // devices)
    gathered = 2 * _FP32 * max((block.parameters for block in size.blocks), default=size.parameters)
    return need_of(profile, share, alone=True, batch=samples, on_gpu=on_gpu, bf16=bf16).total + gathered


def need_of_slices(
    profile: Profile, size: ModelSize, devices: int, batch: int = 0, *, on_gpu: bool = False, bf16: bool = False
) -> int:
    """Return the bytes at the peak of a device that holds one of equal slices of all matrices, and computes every
    sample with the others.

    Of the activations, what is between a pair of divided layers is divided (Korthikanti et al. 2022, section 4.2.1:
    24 of 34 sbh); the inputs of blocks and the logits are whole.

    Args:
        batch: samples of a micro-batch; 0: those of the profile.
    """
    held = _UNDIVIDED_SHARE + (1 - _UNDIVIDED_SHARE) / devices
    if profile.model.gradient_checkpointing:
        inputs = _INPUT_SHARE / (_INPUT_SHARE + 1 / max(1, size.layers))
        held = inputs + (1 - inputs) * held
    share = replace(
        _divided(size, devices),
        activations=size.outputs + int(held * (size.activations - size.outputs)),
        encoder_activations=int(held * size.encoder_activations),
    )
    return need_of(profile, share, alone=True, batch=batch, on_gpu=on_gpu, bf16=bf16).total


def _divided(size: ModelSize, parts: int) -> ModelSize:
    """Return the size of a model of which a device has one of so many equal parts of the weights."""
    return replace(
        size, parameters=size.parameters // parts, encoder=size.encoder // parts, matrices=size.matrices // parts
    )


def _strategy_state(settings: StrategySettings, trainable: int, alone: bool, on_gpu: bool) -> int:
    """Return the bytes of the strategy's state and of its exchange in the memory that training uses."""
    if alone:
        return 0
    vectors = strategy_bytes(settings.strategy, trainable, settings)
    exchange = exchange_bytes(settings.strategy, trainable, settings)
    if not on_gpu:
        return vectors + exchange
    vectors = device_bytes(settings.strategy, trainable, settings, settings.error_feedback)
    return vectors + (exchange if settings.engine == "nccl" else 0)


def _matrix_parameters(model: ModelSettings, size: ModelSize, trainable: int) -> int:
    """Return how many trained parameters are in hidden matrices: all of adapters; with a frozen encoder, the same share
    as of the whole model."""
    return trainable if model.tuning == "lora" else size.matrices * trainable // max(1, size.parameters)


def _weight_bytes(model: ModelSettings, size: ModelSize, trainable: int, bf16: bool) -> int:
    """Return the bytes of the weights and adapters; ``bf16``: whether steps compute in it."""
    adapters = trainable if model.tuning == "lora" else 0
    auto_precision = "bf16" if bf16 and adapters else "fp32"
    base_bytes = _BASE_BYTES[auto_precision if model.base_precision == "auto" else model.base_precision]
    return int(_FP32 * (size.parameters + adapters - size.matrices) + base_bytes * size.matrices)


def _step_bytes(
    profile: Profile,
    size: ModelSize,
    trainable: int,
    batch: int,
    on_gpu: bool,
    is_half: bool,
    under_way: int,
    embedding: int,
) -> int:
    """Return the peak of the activations of the micro-batches under way and the gradients that exist at the same
    time."""
    model, training = profile.model, profile.training
    share = _saved_share(model, is_half) * (_UNFRAGMENTED if on_gpu else _fragmentation(model, size, batch))
    encoder = 0.0 if model.freeze_encoder else size.encoder_activations * share
    decoder = (size.activations - size.encoder_activations - size.outputs) * share
    if model.gradient_checkpointing:
        in_front = 0.0 if model.freeze_encoder or model.tuning == "lora" else _before_blocks(size) * share
        encoder = checkpointed(encoder - in_front, size.encoder_layers, under_way) + under_way * in_front
        decoder = checkpointed(decoder, size.layers - size.encoder_layers, under_way)
    else:
        encoder, decoder = under_way * encoder, under_way * decoder
    behind_decoder = batch * (encoder + decoder * (under_way - 1) / under_way) + trainable + embedding
    decoder += size.outputs
    working = 0 if encoder else size.working
    gradients = trainable
    decoder_gradients = gradients * (
        1 - size.encoder / size.parameters if size.encoder and not model.freeze_encoder else 1
    )
    if training.gradient_accumulation > 1 or not size.encoder:
        numbers = batch * (encoder + decoder) + gradients
    else:
        numbers = max(batch * (encoder + decoder), batch * encoder + decoder_gradients, gradients)
    if embedding:
        numbers = max(numbers, behind_decoder)
    copies = trainable // 2 if is_half else 0  # of the weights, in 16 bits
    return int(_FP32 * (numbers + batch * working + copies))


def _before_blocks(size: ModelSize) -> int:
    """Return the activations of a sample before the first block of an encoder, which checkpointing saves as well."""
    encoder = [block.activations for block in size.blocks if block.in_encoder]
    return encoder[0] - min(encoder) if len(encoder) > 1 else 0


def _saved_share(model: ModelSettings, is_half: bool) -> float:
    """Return the activations saved for backward, over those saved with all weights in fp32."""
    inputs_only = model.tuning == "lora" or model.gradient_checkpointing
    dropout = _DROPOUT_SHARE if model.tuning == "lora" and model.lora_dropout else 1.0
    eight_bits = _EIGHT_BITS_SHARE if model.base_precision in QUANTISED else 1.0
    return dropout * eight_bits * (1.0 if not is_half else _BF16_INPUTS_SHARE if inputs_only else _BF16_SHARE)


def _fragmentation(model: ModelSettings, size: ModelSize, batch: int) -> float:
    """Return the memory of activations over their size, which depends on the size of one of them if it is known."""
    activation_bytes = _FP32 * batch * size.working // 7  # a block holds seven widths at once
    if not size.working or activation_bytes >= _LARGEST_POOLED:
        return _UNFRAGMENTED
    return _ADAPTERS_FRAGMENTED if model.tuning == "lora" else _FRAGMENTED


def model_bytes(job: Job) -> int:
    """Return the bytes of all weights, and of gradients and optimizer state of the trained ones."""
    return job.total * job.weight_bytes + job.trainable * (job.weight_bytes + job.optimizer_bytes)


def strategy_bytes(strategy: str, trainable: int, settings: OptionsByOwner | None = None) -> int:
    """Return the bytes of a strategy's vectors; 0 without a strategy ("").

    Args:
        settings: holds the strategy's own options, here and below; ``None``: their defaults.
    """
    return _costs(strategy, settings).vectors * _FP32 * trainable if strategy else 0


def _costs(strategy: str, settings: OptionsByOwner | None = None) -> CostModel:
    """Return the cost model of a strategy; that of the default strategy for ``auto`` and strategies without one."""
    is_user_code = bool(user_code_in(strategy))  # it may not be approved yet, so it is not imported for this
    costs = (None if is_user_code else cost_model(strategy, settings)) or cost_model(default_strategy())
    return costs or CostModel()


def mesh_bytes(strategy: str, trainable: int, owns: bool = True, settings: OptionsByOwner | None = None) -> int:
    """Return the most bytes that the mesh holds besides the mean (counted with the strategy) and an owner's buffers:
    received results, for members that miss one, and the contribution of a vector up to
    :data:`~training.exchange.mean.reduction.AT_ONCE`, which a longer mean overwrites.

    Args:
        owns: whether the member owns a share of the vector. Without one it learns late that all members have the last
            result, and may hold that while the next one arrives.
    """
    longest = _FP32 * _costs(strategy, settings).longest(trainable)
    results = min(_FP32 * trainable, max(longest, KEPT_BYTES))
    return results + (longest if longest <= AT_ONCE or not owns else 0)


def exchange_bytes(strategy: str, trainable: int, settings: OptionsByOwner | None = None) -> int:
    """Return the most bytes that the mesh holds during an exchange with equal shares: an owner buffers the others'
    contributions until all have arrived, ``(n - 1) / n`` of the longest vector in fp32."""
    owned = _FP32 * _costs(strategy, settings).longest(trainable)
    return owned + mesh_bytes(strategy, trainable, settings=settings)


def checkpointed(per_sample: float, layers: int, under_way: int = 1) -> float:
    """Return the activations of a sample with gradient checkpointing: the inputs of all blocks, for each micro-batch
    under way, and one whole block, whose backward runs."""
    return per_sample * min(under_way, under_way * _INPUT_SHARE + 1 / max(1, layers))


def device_bytes(
    strategy: str, trainable: int, settings: OptionsByOwner | None = None, error_feedback: bool = False
) -> int:
    """Return the bytes of a strategy's vectors in the memory of a CUDA device; 0 without a strategy ("")."""
    vectors = _costs(strategy, settings).device_vectors(error_feedback) if strategy else 0
    return int(vectors * _FP32 * trainable)


def member_bytes(job: Job, machine: ClusterMachine, strategy: str, batch: int) -> int:
    """Return the peak memory of a member with a micro-batch of ``batch`` samples.

    Measured values are used where they exist, the formula for the rest.
    """
    estimated = model_bytes(job)
    measured = machine.memory_fit
    fixed = max(float(estimated), measured[0]) if measured else float(estimated)
    in_training_memory = device_bytes if machine.device == "cuda" else strategy_bytes
    vectors = in_training_memory(strategy, job.trainable, job)
    return int(fixed + vectors + batch * (machine.memory_per_sample(estimated) or 0.0))


def largest_batch(job: Job, machine: ClusterMachine, strategy: str, reserved: int = 0) -> int:
    """Return the largest micro-batch that fits; 0 if none does, a million if the memory is not known.

    Args:
        reserved: bytes that are needed for the exchange.
    """
    unlimited = 1_000_000
    if not machine.memory_free:
        return unlimited
    empty = member_bytes(job, machine, strategy, 0) + reserved
    per_sample = machine.memory_per_sample(model_bytes(job)) or 0.0
    if empty > machine.memory_free:
        return 0
    return unlimited if not per_sample else min(unlimited, int((machine.memory_free - empty) / per_sample))


def with_checkpointing(job: Job, machine: ClusterMachine) -> int:
    """Return the bytes of a step of one sample with gradient checkpointing."""
    per_sample = machine.memory_per_sample(model_bytes(job)) or 0.0
    return int(member_bytes(job, machine, "", 0) + checkpointed(per_sample, job.layers))


def with_lora(job: Job, machine: ClusterMachine) -> int:
    """Return the bytes of a step of one sample with adapters instead of all weights."""
    adapters = job.lora_trainable or job.trainable // LORA_DIVISOR
    saved = model_bytes(job) - model_bytes(job.model_copy(update={"trainable": adapters}))
    return member_bytes(job, machine, "", 1) - saved
