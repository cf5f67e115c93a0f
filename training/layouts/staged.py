"""The layout of a member with several devices: a pipeline, of which each process holds one stage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from profiles.errors import RunFailed
from profiles.options import memory_saving_settings
from profiles.schema import Profile
from training.data.batches import StepBatches
from training.exchange.base import Traffic
from training.hardware.device import Precision, is_out_of_memory
from training.layouts.base import Layout, StepBackward
from training.layouts.carrier import Carrier, gather_among
from training.layouts.columns import WeightStates, align_ties
from training.layouts.decode import follow, leading
from training.layouts.parts import collect_parts, join_parts
from training.layouts.pipeline import Pipeline
from training.layouts.stages.block_check import examine_own
from training.layouts.stages.bounds import bounds_of, micro_batch_size
from training.layouts.stages.cut import CutModel, place_stand_ins
from training.layouts.stages.pretrained_stage import architecture_of, build_stage, redraw_adapters, stage_class
from training.layouts.stages.probe import probe
from training.layouts.stages.stage import Cut
from training.model.model_building import prepare_model
from training.optimization.backward import MakeBatches
from training.records.plan import DevicePlan
from training.strategies.base import Strategy
from training.tasks.base import Answer, Batch, Task
from training.tasks.outputs.showcase import SampleOutput

_PARTS = "model.parts"
"""Folder of the stages' parts of the model, within a run folder."""


class StageBuilder:
    """Makes stage ``number``; a :class:`training.tasks.base.StageMaker`."""

    def __init__(self, devices: Sequence[DevicePlan], number: int, seed: int) -> None:
        self._devices, self._number, self._seed = devices, number, seed

    def reader(self, auto: Any, config: Any) -> Any:
        auto = auto.architecture if isinstance(auto, _StageReader) else auto  # of a stage that was made before
        architecture = architecture_of(auto, config) if hasattr(auto, "_model_mapping") else auto
        cut = self._cut(_block_count(config))
        probe(architecture, config, cut.bounds)
        return _StageReader(architecture, cut, self._seed)

    def cut(self, model: nn.Module, run: Callable[[nn.Module], object]) -> nn.Module:
        anatomy = examine_own(model, run)
        place_stand_ins(model, self._cut(len(anatomy.blocks)), anatomy)
        return model

    def with_own_adapters(self, model: nn.Module) -> nn.Module:
        redraw_adapters(model, self._seed)
        return model

    def _cut(self, blocks: int) -> Cut:
        return Cut(bounds_of(self._devices, blocks), self._number)


def _block_count(config: Any) -> int:
    is_pair = config.is_encoder_decoder
    return int(config.encoder_layers + config.decoder_layers if is_pair else config.num_hidden_layers)


class _StageReader:
    """Reads one stage where a transformers class reads the whole model."""

    def __init__(self, architecture: Any, cut: Cut, seed: int) -> None:
        self.architecture, self._cut, self._seed = architecture, cut, seed
        self.from_pretrained = stage_class(architecture, cut, seed).from_pretrained

    def from_config(self, config: Any, dtype: torch.dtype = torch.float32) -> nn.Module:
        return build_stage(self.architecture, config, self._cut, self._seed).to(dtype)

    __call__ = from_config


def wire_type(devices: Sequence[DevicePlan], precision: Precision) -> torch.dtype | None:
    """Return the element type of what travels between the stages of a member's training; ``None``: its own.

    bf16 between machines whose stages compute in it: half the bytes, for a rounding of the size of the computation's.
    Within a machine there is no network to spare.
    """
    return precision.dtype if len({device.machine for device in devices}) > 1 else None


class StagedModel(Layout):
    """One stage of the member's model.

    Args:
        carrier: to the other stages.
        devices: of the member, in the order of the stages.
        batch_size: of the member.
        sends_parts: whether each device has a run folder of its own, and sends its part of the trained model to the
            first one.
        background: see :attr:`training.layouts.base.Layout.background`.
    """

    def __init__(
        self,
        carrier: Carrier,
        devices: Sequence[DevicePlan],
        batch_size: int,
        sends_parts: bool = False,
        background: Carrier | None = None,
    ) -> None:
        self.carrier = self._carrier = carrier
        self._devices, self._batch_size = devices, batch_size
        self._sends_parts, self.background = sends_parts, background
        self.names, self.traffic, self.part = carrier.names, carrier.traffic, (carrier.stage, carrier.stages)

    @property
    def _device(self) -> DevicePlan:
        return self._devices[self._carrier.stage]

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        return self._pipeline.stage_seconds

    def build(self, task: Task, profile: Profile, precision: Precision) -> nn.Module:
        self._task, self._profile, self._precision = task, profile, precision
        stage = task.build_stage(StageBuilder(self._devices, self._carrier.stage, profile.training.seed))
        self.model = prepare_model(stage, profile.model, precision)
        part, wire = CutModel(self.model, task.loss), wire_type(self._devices, precision)
        self._pipeline = Pipeline(part, self._carrier, precision, wire, self._device.ahead)
        return self.model

    def backward(self, release: Callable[[], None], total_steps: int) -> StepBackward:
        accumulation = self._profile.training.gradient_accumulation
        size = micro_batch_size(self._batch_size, accumulation, len(self._devices))
        return StagedBackward(self._pipeline, self._carrier.traffic, size, self._too_large)

    def trained_weights(self) -> int:
        return self._pipeline.trained_weights()

    def ties_trained_weights(self) -> bool:
        return self.any(self._pipeline.ties_trained_weights)

    def align_ties(self, strategy: Strategy) -> None:
        if strategy.is_alone or not self.ties_trained_weights():
            return
        states = WeightStates(self.model, self.optimizer, strategy)
        if names := align_ties(self._carrier, self._pipeline.tied_weights, states):
            text = f"{self.names[0]} and other devices of its member had different copies of {', '.join(names)}"
            strategy.context.warn(f"{text}, as a member was lost or late meanwhile: all have its copy from here on")

    def norm(self) -> float | None:
        return self._pipeline.norm()

    def answer(self, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        with self._naming("eval_batch_size"):
            if generate and self._task.generates_text:
                sums, answers = self._of_leader(lambda: self._task.answer(self.model, batch, generate))
                return sums, [Answer(*answer) for answer in answers]
            return self._pipeline.evaluate([batch], [self._task.weight(batch)]), []

    def sample_output(self, batch: Batch) -> SampleOutput:
        if type(self._task).sample_output is Task.sample_output:  # a loss, as in an evaluation
            return SampleOutput(loss=self._task.metrics(self.answer(batch, False)[0]).get("loss"))
        return SampleOutput(*self._of_leader(lambda: self._task.sample_output(self.model, batch)))

    def leading(self) -> AbstractContextManager[None]:
        """Let the last stage give what the whole model would, while the others :meth:`follow`."""
        return leading(self.model, self._carrier, self._precision)

    def follow(self) -> None:
        """Compute what the last stage asks of this one, until it ends."""
        follow(self.model, self._carrier, self._precision)

    def _of_leader(self, compute: Callable[[], Any]) -> Any:
        """Return on all stages, as JSON has it, what the last one computes with the whole model."""
        if self._carrier.stage < self._carrier.stages - 1:
            self.follow()
            return json.loads(self.gather(b"")[-1])
        with self.leading():
            result = compute()
        return json.loads(self.gather(json.dumps(result).encode())[-1])

    @contextmanager
    def _naming(self, setting: str) -> Iterator[None]:
        """Name the stage that runs out of memory, and the setting that made it."""
        try:
            yield
        except Exception as error:  # devices say in their own classes that memory ran out; all else is raised
            if is_out_of_memory(error):
                raise self._too_large(error, setting) from error
            raise

    def gather(self, payload: bytes) -> list[bytes]:
        return gather_among(self._carrier, payload)

    def save(self, run_dir: Path) -> None:
        folders = [run_dir / _PARTS / name for name in self.names]
        folder = folders[self._carrier.stage]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._task.save(self.model, folder)
        self.gather(b"saved")
        if self._sends_parts:
            collect_parts(self._carrier, folders)
        if self._carrier.stage == 0:
            join_parts(folders, run_dir / "model")
        self.gather(b"joined")
        shutil.rmtree(run_dir / _PARTS, ignore_errors=True)

    def close(self) -> None:
        for carrier in (self._carrier, *([self.background] if self.background else [])):
            carrier.close()

    def _too_large(self, error: Exception, setting: str = "batch_size") -> RunFailed:
        name, reason = self.names[self._carrier.stage], " ".join(str(error).split())[:200]
        changes = [f"set a smaller {setting}", *(f"set {change}" for change in memory_saving_settings(self._task.name))]
        return RunFailed(f"ran out of memory in its stage: {reason}", ", ".join(changes), machine=name)


class StagedBackward:
    """The gradients of a step, which all stages compute together.

    All of them would have to begin a step anew where one runs out of memory, so the run fails instead.

    Args:
        traffic: gets the time that this stage waits for others.
        max_micro_batch: largest micro-batch in samples.
        too_large: returns the error for a stage that runs out of memory.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        traffic: Traffic,
        max_micro_batch: int,
        too_large: Callable[[Exception], RunFailed],
    ) -> None:
        self._pipeline, self._traffic, self._too_large = pipeline, traffic, too_large
        self.max_micro_batch = max_micro_batch

    def run(
        self, batches: StepBatches, strategy: Strategy, make_batches: MakeBatches, warn: Callable[[str], None]
    ) -> tuple[StepBatches, list[torch.Tensor]]:
        """Return the batches, and the share of the loss that each contributes.

        Raises:
            ExchangeError: a device is lost.
            RunFailed: this one ran out of memory, or another sent something else than what belongs there.
        """
        # all stages draw the same: their generators began alike and are used alike
        seeds = torch.randint(1 << 31, (len(batches.micro_batches),)).tolist()
        try:
            losses = self._pipeline.passes(batches.micro_batches, batches.weights, batches.weight, seeds)
        except Exception as error:  # devices say in their own classes that memory ran out; all else is raised
            if is_out_of_memory(error):
                raise self._too_large(error) from error
            raise
        self._traffic.wait_seconds += self._pipeline.times.wait
        return batches, losses
