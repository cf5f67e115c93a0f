"""Interface between a task (data, model, loss, metrics) and the trainer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from profiles.errors import BadInput
from training.lazy import nn, np, torch
from training.tasks.outputs.showcase import MAX_SAMPLES, SampleOutput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from training.tasks.outputs.predictions import Prediction
    from training.tasks.outputs.showcase import Kind

Batch = Mapping[str, Any]
"""A collated batch: tensors by name (nested containers are moved to the device too)."""

Progress = Callable[[str, int, int | None], None]
"""``progress(phase, done, total)``, called from :meth:`Task.prepare`."""
_PAUSE = 0.25
"""Minimum seconds between two reports of one phase."""


def throttled(progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return a rate-limited ``progress`` that may be called for every sample.

    Begin and end of a phase are always passed on: each call costs an event in the run's log.
    """
    last_phase, last_time = "", 0.0

    def report(phase: str, done: int, total: int | None) -> None:
        nonlocal last_phase, last_time
        if phase != last_phase or done == total or clock() >= last_time + _PAUSE:
            last_phase, last_time = phase, clock()
            progress(phase, done, total)

    return report


class SizedDataset(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class GroupPosition(NamedTuple):
    """Rank of a member and size of the group, for data that depends on it."""

    rank: int = 0
    world_size: int = 1


class Answer(NamedTuple):
    """The text generated for one sample of a split."""

    sample: int
    """Index in the split."""
    text: str
    cut: bool
    """Whether generation stopped at the length limit."""


class StageMaker(Protocol):
    """Makes one stage of a model instead of the whole, see :mod:`training.layouts`.

    Raises:
        BadInput: by each method: the model cannot be cut; the message says why.
    """

    def reader(self, auto: Any, config: Any) -> Any:
        """Return what makes the stage as the class ``auto`` of transformers makes the whole model of ``config``: by
        ``from_pretrained``, by ``from_config``, or called with a configuration."""

    def cut(self, model: nn.Module, run: Callable[[nn.Module], object]) -> nn.Module:
        """Cut a whole model in place, and return it.

        Args:
            run: computes a forward of a copy on the meta device.
        """

    def with_own_adapters(self, model: nn.Module) -> nn.Module:
        """Return a stage; its adapters, if it has new ones, are those that the whole model would have."""


class Task(ABC):
    """Base class of tasks. The trainer calls ``prepare``, then ``build_model``, then the other methods in a loop."""

    name: str
    monitor: str = "loss"
    """The metric used for early stopping and the best model; smaller is better."""

    counts: frozenset[str] = frozenset({"weight"})
    """Sums of :meth:`evaluate` that are never negative and always finite."""

    bf16_is_faster: bool = False
    """Whether bf16 steps were measured to be faster on CPUs with hardware bf16 multiplication."""

    gains_from_compiling: bool = False
    """Whether the model's blocks benefit from being compiled on a GPU."""

    uses_global_rng: bool = True
    """Whether reading a sample or collating may draw from the process-wide generators (torch's, numpy's, Python's). If
    not, batches are prepared while the model computes."""

    generates_text: bool = False
    """Whether an evaluation generates texts that :meth:`predictions` pairs with their references."""

    showcase_kind: Kind = "items"
    """Kind of showcase that :meth:`sample_output` produces if no texts are generated."""

    max_shown: int = MAX_SAMPLES
    """Maximum number of samples shown before and after training."""

    remarks: Sequence[str] = ()
    """Remarks for the user that were found while reading the data; set by :meth:`prepare`."""

    group_position: GroupPosition = GroupPosition()
    """The member whose data this task reads; set before :meth:`prepare`."""

    on_any_device: Callable[[bool], bool] = bool
    """Returns whether a flag is set on any of the devices that compute with the model together, which all ask alike."""

    depends_on_rank: bool = False
    """Whether the data depend on :attr:`group_position`, so that every member has different ones."""

    optimizer: Callable[..., Any] | None = None
    """A class or function of the user's that makes the optimizer; ``None``: the options say which. Valid after
    :meth:`prepare`."""

    lr_scheduler: Callable[..., Any] | None = None
    """The schedule of the user, see :mod:`training.optimization.learning_rates`; ``None``: as the options say.
    Valid after :meth:`prepare`."""

    code: Mapping[str, str] = MappingProxyType({})
    """Hashes of the source of the user's functions, by what they are. Valid after :meth:`prepare`."""

    train: SizedDataset
    """Set by :meth:`prepare`."""
    evaluation: Mapping[str, SizedDataset]
    """Data sets by split (``validation``, ``test``); set by :meth:`prepare`; may be empty."""
    evaluation_sizes: Mapping[str, int] = MappingProxyType({})
    """Samples of those splits in a full run; set by a :meth:`prepare_subset` that prepares none of them."""

    @cached_property
    def device(self) -> torch.device:
        """The device that this member trains on; set before :meth:`prepare`."""
        return torch.device("cpu")

    @abstractmethod
    def prepare(self, progress: Progress) -> None:
        """Load the data sets and precompute features or tokens.

        Raises:
            BadInput: the data cannot be used; the message says what, where and what to do.
        """

    def prepare_subset(self, progress: Progress, limit: int) -> int:
        """Like :meth:`prepare`, but if that takes long only for about ``limit`` evenly spread training samples.

        No evaluation samples are prepared then. Return an upper bound of the number of samples that a full run trains
        on (for text an estimate): samples that have not been read count even if they are broken or too long.
        """
        self.prepare(progress)
        return len(self.train)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model on the CPU; parameters to train have ``requires_grad``.

        Called after seeding, so a model from scratch is the same on every member.
        """

    def build_stage(self, stages: StageMaker) -> nn.Module:
        """Return the part of the model that this process holds, like :meth:`build_model` the whole.

        Raises:
            BadInput: this task's models cannot be cut.
        """
        raise BadInput(f"'{self.name}' jobs cannot train in stages", "set layout = replicate")

    def build_for_shards(self) -> nn.Module:
        """Return the model like :meth:`build_model`; its weights will be divided over devices, and are whole, if
        ever, only while :meth:`loss` and :meth:`answer` compute. Those that are trained may have the file's
        precision."""
        return self.build_model()

    def table(self, split: str) -> str:
        """Hash of a split's table (rows and their order); empty if it has none."""
        return ""

    def identity(self, sample: Any) -> Any:
        """Return what identifies a sample: a mapping of its defining fields, or the sample itself.

        It is compared among members, and with the data that a resumed run began with.
        """
        return sample

    def labels(self, of: Literal["label", "speaker"]) -> Sequence[str]:
        """Return the class or speaker of each training sample, by which samples are split among members.

        An unknown label is an empty string.

        Raises:
            BadInput: samples of this task have no such label.
        """
        raise BadInput(f"samples of '{self.name}' jobs have no {of} by which they could be split", "set split = global")

    @abstractmethod
    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        """Collate a batch. ``rngs`` has one generator per sample for augmentation; ``None`` in evaluation."""

    def reader_copy(self) -> Task | None:
        """Return a minimal copy that reads :attr:`train` and collates batches in another process.

        ``None`` if it cannot be sent there.
        """
        return None

    def lengths(self) -> NDArray[np.int64] | None:
        """Return the length of each training sample if a batch costs as much as its longest one, else ``None``.

        Samples of similar length are batched together.
        """
        return None

    def evaluation_lengths(self, split: str) -> NDArray[np.int64] | None:
        """Return the length of each sample of an evaluation split if a batch takes as long as its longest one."""
        return None

    def pad_to_length(self, batch: Batch, length: int) -> Batch:
        """Pad ``batch`` to ``length``, that of the longest sample of the whole step.

        So a step's result does not depend on how its samples are divided among members and micro-batches.
        """
        return batch

    @abstractmethod
    def weight(self, batch: Batch) -> float:
        """Return the number of items that the batch's loss is a mean over: samples, or tokens for a per-token loss."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scalar mean loss of a batch (mean over :meth:`weight`)."""

    def evaluate(self, model: nn.Module, batch: Batch, generate: bool) -> dict[str, float]:
        """Return *sums* over the batch that add up over batches and members.

        ``loss_sum`` and ``weight`` are required; tasks add their own (``word_edits``, ``words``, ...).
        """
        weight = self.weight(batch)
        return {"loss_sum": float(self.loss(model, batch)) * weight, "weight": weight}

    def answer(self, model: nn.Module, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        """Return the sums of :meth:`evaluate` and, if the task generates text, the generated answers."""
        return self.evaluate(model, batch, generate), []

    def predictions(self, split: str, answers: Sequence[Answer]) -> list[Prediction]:
        """Return answers paired with their references; empty if the task generates no text."""
        return []

    def sample_output(self, model: nn.Module, batch: Batch) -> SampleOutput:
        """Return the model's output for the single sample in ``batch``, as shown before and after training."""
        return SampleOutput(loss=self.metrics(self.evaluate(model, batch, generate=False)).get("loss"))

    def caption(self, sample: Any) -> str:
        """Return a human-readable caption of a sample; empty if there is none."""
        return ""

    def sound(self, split: str, index: int) -> bytes | str:
        """Return the audio of a sample as MP3, or the reason why there is none; empty if samples have no audio."""
        return ""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn summed :meth:`evaluate` results into metrics; ``loss`` is included whenever it was measured."""
        weight = sums.get("weight", 0.0)
        return {"loss": sums["loss_sum"] / weight} if weight and "loss_sum" in sums else {}

    @abstractmethod
    def save(self, model: nn.Module, directory: Path) -> None:
        """Write the trained model into ``directory`` (existing, empty), in the Hugging Face layout if it has one."""
