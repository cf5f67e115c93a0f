"""What a device needs for a stage of a pipeline: time and memory, from the job's profile and the size of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import mul, truediv

from distributed.planning.documents.cluster import ClusterMachine
from distributed.planning.layouts.cut import Boundary, StageDevice
from distributed.planning.memory.fitting import MemoryBudget
from distributed.planning.memory.memory_model import LORA_DIVISOR, need_of
from profiles.schema import Profile
from training.layouts.stages.bounds import micro_batch_size
from training.tasks.inputs.model_size import ModelSize

FP32_BYTES = 4
"""Bytes of a number, in memory and between two stages."""
_MESSAGES = 4
"""Tensors of each boundary that a stage holds in main memory, while they are sent or received ahead
(:mod:`training.layouts.relay`)."""


@dataclass(frozen=True)
class StagedJob:
    """A job whose model is divided into stages."""

    profile: Profile
    size: ModelSize
    """Of the model, with its blocks."""
    measured_profile: Profile
    """That of the measurements: with another one, a block takes as much longer as it has more work."""
    measured: Mapping[str, Sequence[float]]
    """Seconds in which a device computes forward and backward of one sample in each block, by its name. One that is
    missing takes its measured time of a step, divided like the work of the blocks."""

    stage_size: Callable[[int, int], ModelSize]
    """Returns the size of a stage (:meth:`~training.tasks.inputs.model_size.ModelSize.stage`)."""
    stages: int = 0
    """Of a member; 0: it is divided otherwise, and a step is ``gradient_accumulation`` batches."""

    @cached_property
    def batch(self) -> int:
        """Samples of a micro-batch."""
        training = self.profile.training
        if not self.stages:
            return training.batch_size
        return micro_batch_size(training.batch_size, training.gradient_accumulation, self.stages)

    @property
    def micro_batches(self) -> int:
        """Of each member in a step."""
        training = self.profile.training
        return -(-training.batch_size * training.gradient_accumulation // self.batch)

    @cached_property
    def _profile_in_stages(self) -> Profile:
        """The profile with the micro-batches that pass through the stages."""
        training, evaluation = self.profile.training, self.profile.evaluation
        in_stages = {"batch_size": self.batch, "gradient_accumulation": self.micro_batches}
        evaluated = {"eval_batch_size": evaluation.eval_batch_size or training.batch_size}
        return self.profile.model_copy(
            update={
                "training": training.model_copy(update=in_stages),
                "evaluation": evaluation.model_copy(update=evaluated),
            }
        )

    def work(self, profile: Profile) -> list[float]:
        """Return the multiplications of forward and backward of a sample in each block.

        Backward multiplies twice as often as forward, for the gradients of inputs and of weights (Kaplan et al. 2020,
        arXiv 2001.08361, section 2.1); with adapters only the former. Checkpointing computes the forward once more; a
        frozen encoder has no backward.
        """
        model = profile.model
        trained = (2 if model.tuning == "lora" else 3) + model.gradient_checkpointing
        return [
            block.multiplications * (1 if block.in_encoder and model.freeze_encoder else trained)
            for block in self.size.blocks
        ]

    def seconds(self, machine: ClusterMachine) -> tuple[float, ...]:
        """Return the seconds in which a device computes forward and backward of a micro-batch in each block."""
        measured_work = self.work(self.measured_profile)
        blocks = [self.batch * seconds for seconds in self.measured.get(machine.name, ())]
        if not blocks:
            total = machine.overhead + self.batch / machine.speed
            blocks = [total * work / sum(measured_work) for work in measured_work]
        ratios = map(truediv, self.work(self.profile), measured_work)
        return tuple(map(mul, blocks, ratios))

    def boundaries(self) -> tuple[Boundary, ...]:
        """Return the bytes of a micro-batch that cross behind each block (between machines,
        :func:`training.layouts.staged.wire_type`). A frozen encoder gets no gradients back."""
        frozen = self.profile.model.freeze_encoder
        in_bf16 = self.profile.training.mixed_precision == "bf16"  # auto: it may be that of some machines only
        number = (FP32_BYTES // 2 if in_bf16 else FP32_BYTES) * self.batch
        return tuple(
            Boundary(number * block.boundary, number * (block.boundary - (block.encoded if frozen else 0)))
            for block in self.size.blocks
        )

    @property
    def tied(self) -> int:
        """Parameters of an embedding that the head shares, whose gradients are summed; none with adapters."""
        return 0 if self.profile.model.tuning == "lora" else self.size.tied

    def trained(self) -> tuple[int, ...]:
        """Return the parameters of each block that members exchange."""
        model = self.profile.model
        divisor = LORA_DIVISOR if model.tuning == "lora" else 1
        return tuple(
            0 if block.in_encoder and model.freeze_encoder else block.parameters // divisor
            for block in self.size.blocks
        )

    def need(self, machine: ClusterMachine, start: int, end: int, under_way: int, alone: bool = True) -> int:
        """Return the bytes that a device needs for the stage from block ``start`` to ``end``, exclusive.

        Args:
            under_way: micro-batches under way on this stage.
            alone: whether there is one member.
        """
        return self._needed(machine.device == "cuda", machine.bf16, start, end, under_way, alone)

    @cached_property
    def _needed(self) -> Callable[[bool, bool, int, int, int, bool], int]:
        return cache(self._need)

    def _need(self, on_gpu: bool, bf16: bool, start: int, end: int, under_way: int, alone: bool) -> int:
        stage = self.stage_size(start, end)
        added = self.tied if self.micro_batches > 1 and start <= self.size.encoder_layers < end else 0
        need = need_of(
            self._profile_in_stages, stage, alone, on_gpu=on_gpu, bf16=bf16, under_way=under_way, embedding=added
        )
        crossing = (self.size.blocks[start - 1].boundary if start else 0) + self.size.blocks[end - 1].boundary
        messages = 0 if on_gpu else _MESSAGES * FP32_BYTES * self.batch * crossing
        frozen = stage.encoder if self.profile.model.freeze_encoder else 0
        summing = FP32_BYTES * (stage.parameters - frozen + self._copies_of_tied(start, end, on_gpu))
        return need.total + max(messages, summing - need.step if self.tied else 0)

    def _copies_of_tied(self, start: int, end: int, on_gpu: bool) -> int:
        """Return the numbers that the sum of a tied embedding's gradients takes besides them: on a stage with one of
        its ends, what has come and the sum, behind the last backward, of which a GPU holds the latter; on a stage with
        both, those of both ends and their sum, in each backward (measured on a CPU)."""
        has_embedding, has_head = start <= self.size.encoder_layers < end, end == len(self.size.blocks)
        copies = 3 if has_embedding and has_head else 2 if has_embedding or has_head else 0
        return self.tied * max(0, copies - on_gpu)

    def device(self, machine: ClusterMachine, alone: bool = True) -> StageDevice:
        """Return a device as the search for a cut sees it."""
        blocks, budget = len(self.size.blocks), budget_of(machine)

        def fits(start: int, end: int, under_way: int) -> bool:
            return not budget.total or self.need(machine, start, end, under_way, alone) <= budget.usable

        @cache
        def ends(under_way: int) -> list[int]:
            longest, end = [], 0
            for start in range(blocks):
                end = max(start, end)
                while end > start and not fits(start, end, under_way):
                    end -= 1
                while end < blocks and fits(start, end + 1, under_way):
                    end += 1
                longest.append(end)
            return longest

        return StageDevice(machine.name, self.seconds(machine), ends)


def budget_of(machine: ClusterMachine) -> MemoryBudget:
    """Return the memory of a device, of which one member takes part."""
    return MemoryBudget(machine.name, machine.memory_total, machine.device, bf16=machine.bf16)
