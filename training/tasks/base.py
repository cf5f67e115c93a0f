"""What a task gives to the trainer."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from profiles.errors import BadInput
from training.lazy import nn, np, torch
from training.tasks.showcase import MOST, Shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from training.tasks.predictions import Prediction
    from training.tasks.showcase import Kind

Batch = Mapping[str, Any]
"""A collated batch: tensors by name (nested containers are moved to the device too)."""

Progress = Callable[[str, int, int | None], None]
"""``progress(phase, done, total)``, called from :meth:`Task.prepare`."""
_PAUSE = 0.25
"""Seconds between two words about one phase."""


def now_and_then(progress: Progress, clock: Callable[[], float] = time.monotonic) -> Progress:
    """Return what may be called for each sample: ``progress`` hears of begin and end of a phase, and between them of
    some: each costs an event in the file of the run."""
    told, since = "", 0.0

    def tell(phase: str, done: int, total: int | None) -> None:
        nonlocal told, since
        if phase != told or done == total or clock() >= since + _PAUSE:
            told, since = phase, clock()
            progress(phase, done, total)

    return tell


class SizedDataset(Protocol):
    """A map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Place(NamedTuple):
    """A member among all of a run."""

    rank: int = 0
    world_size: int = 1


class Answer(NamedTuple):
    """What a model wrote for one sample of a split."""

    sample: int
    """Its place in the split."""
    text: str
    cut: bool
    """It had not ended at its bound."""


class Task(ABC):
    """One kind of job. The trainer calls ``prepare``, then ``build_model``, then the rest in a loop."""

    name: str
    monitor: str = "loss"
    """The metric early stopping and "best" look at; smaller is better."""

    counts: frozenset[str] = frozenset({"weight"})
    """Those sums of :meth:`evaluate` that are never negative and always finite."""

    bf16_pays: bool = False
    """Whether steps in bf16 were measured to be faster on a processor that multiplies bf16 in hardware."""

    compiling_pays: bool = False
    """Whether blocks of the model are of the kind that gains from being compiled on a GPU."""

    draws_globally: bool = True
    """Whether reading a sample or making a batch may draw from the generators that everybody in the process shares
    (torch's, numpy's, Python's). Where it does not, batches are made while the model computes."""

    writes_texts: bool = False
    """Whether an evaluation gives answers that :meth:`predictions` puts beside what is right."""

    shows: Kind = "items"
    """What :meth:`shown` gives, where no texts are written."""

    most_shown: int = MOST
    """Samples that it is asked for before and after training."""

    remarks: Sequence[str] = ()
    """What a person should know of the data, and only who has read them knows; set by :meth:`prepare`."""

    place: Place = Place()
    """The member whose data these are; set before :meth:`prepare`."""

    by_rank: bool = False
    """Whether the data follow from :attr:`place`: then no two members have the same."""

    train: SizedDataset
    """Set by :meth:`prepare`."""
    evaluation: Mapping[str, SizedDataset]
    """Data sets by split (``validation``, ``test``); set by :meth:`prepare`; may be empty."""

    @cached_property
    def device(self) -> torch.device:
        """What this member trains on; set before :meth:`prepare`."""
        return torch.device("cpu")

    @abstractmethod
    def prepare(self, progress: Progress) -> None:
        """Load the data sets and compute what is computed once (features, tokens).

        Raises:
            BadInput: the data cannot be used; the message says what, where and what to do.
        """

    def prepare_some(self, progress: Progress, most: int) -> int:
        """Like :meth:`prepare`, but where it would take long only for about ``most`` samples of :attr:`train`, spread
        over all of them, and for none to evaluate on. Return how many samples a whole run would train on, at most (of a
        text: about): what cannot be read or is too long counts as long as nobody has looked.
        """
        self.prepare(progress)
        return len(self.train)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Return the model on the CPU; parameters to train have ``requires_grad``.

        Called after seeding, so a model from scratch is the same on every member.
        """

    def table(self, split: str) -> str:
        """Hash of a split's table, where there is one: the same lines in the same order; else empty."""
        return ""

    def identity(self, sample: Any) -> Any:
        """What tells a sample from others, whatever else this version keeps beside it: a mapping, or the sample itself.
        It is compared among members, and with what a resumed run began with."""
        return sample

    def labels(self, of: Literal["label", "speaker"]) -> Sequence[str]:
        """What each sample of :attr:`train` is, by which samples can be split among members: its class, or who speaks;
        empty where nobody knows.

        Raises:
            BadInput: samples of this job have none.
        """
        raise BadInput(f"samples of '{self.name}' jobs have no {of} by which they could be split", "set split = global")

    @abstractmethod
    def collate(self, samples: Sequence[Any], rngs: Sequence[np.random.Generator] | None) -> Batch:
        """Make a batch. ``rngs`` has one generator a sample for augmentation; ``None`` in evaluation."""

    def for_reading(self) -> Task | None:
        """Return what reads :attr:`train` and makes batches in another process: this, with as little else as possible;
        ``None`` if it cannot be sent there."""
        return None

    def lengths(self) -> NDArray[np.int64] | None:
        """How long each sample of :attr:`train` is, where a batch costs as much as its longest one; ``None`` if all
        cost the same. Samples of like length are trained on together then."""
        return None

    def evaluation_lengths(self, split: str) -> NDArray[np.int64] | None:
        """How long each sample of an evaluation split is, where a batch lasts as long as its longest one."""
        return None

    def lengthen(self, batch: Batch, length: int) -> Batch:
        """Return ``batch`` as long as a sample of ``length``, the longest of a whole step: so the result of the step
        does not depend on how its samples are divided among members and micro-batches."""
        return batch

    @abstractmethod
    def weight(self, batch: Batch) -> float:
        """What the loss of this batch is a mean over: samples, or tokens for a per-token loss."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the scalar mean loss of a batch (mean over :meth:`weight`)."""

    def evaluate(self, model: nn.Module, batch: Batch, generate: bool) -> dict[str, float]:
        """Return *sums* over the batch that add up over batches and members.

        ``loss_sum`` and ``weight`` are always there; tasks add their own (``word_edits``, ``words``, ...).
        """
        weight = self.weight(batch)
        return {"loss_sum": float(self.loss(model, batch)) * weight, "weight": weight}

    def answer(self, model: nn.Module, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        """Return the sums of :meth:`evaluate` and, where the model writes texts, what it wrote."""
        return self.evaluate(model, batch, generate), []

    def predictions(self, split: str, answers: Sequence[Answer]) -> list[Prediction]:
        """Return answers beside what is right; empty where a task gives none."""
        return []

    def shown(self, model: nn.Module, batch: Batch) -> Shown:
        """Return what a person is shown of the one sample in ``batch``, before and after training."""
        return Shown(loss=self.metrics(self.evaluate(model, batch, generate=False)).get("loss"))

    def caption(self, sample: Any) -> str:
        """Return what a person knows a sample by, beside its number; empty where nothing is known."""
        return ""

    def sound(self, split: str, index: int) -> bytes | str:
        """Return the sound of a sample as MP3, or why there is none; empty where samples are none to be heard."""
        return ""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Turn summed :meth:`evaluate` results into metrics; ``loss`` is always there if it was measured."""
        weight = sums.get("weight", 0.0)
        return {"loss": sums["loss_sum"] / weight} if weight and "loss_sum" in sums else {}

    @abstractmethod
    def save(self, model: nn.Module, directory: Path) -> None:
        """Write the finished model into ``directory`` (exists, empty): Hugging Face layout where there is one."""
