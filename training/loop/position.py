"""The position of a run: the same on every member, part of every snapshot and of every newcomer's joining state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from profiles.optimisation import EvaluationSettings
from profiles.quantities import loss_text
from training.data.balance import ShareBalance
from training.data.partitions import Schedule
from training.data.sample_order import Cursor
from training.loop.state import persistent_buffers, prefixed, tensors_under
from training.snapshots.snapshot_pace import SnapshotPace
from training.tasks.own_code.streams import Stream

_BEST = "best"
MOST_CUT_SHORT = 3
"""Evaluations in a row that members may cut short: an honest member that does so stops before its next step."""
MOST_ATTEMPTS = 1000
"""Attempts of a run that its snapshots record."""
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Synchronised:
    """The step up to which the last synchronisation holds what the members did, and who trains since then."""

    step: int
    cursor: Cursor
    batch_sizes: Mapping[int, int]

    def state(self) -> dict[str, Any]:
        """JSON-able state for a snapshot."""
        return {"step": self.step, "cursor": asdict(self.cursor), "batch_sizes": [*self.batch_sizes.items()]}

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Synchronised:
        """Restore from :meth:`state`."""
        sizes = {int(rank): int(size) for rank, size in state["batch_sizes"]}
        return cls(int(state["step"]), Cursor(**state["cursor"]), sizes)


@dataclass
class Position:
    """Steps done, cursor in the data, and results of the evaluations so far."""

    stopping: EarlyStopping
    step: int = 0
    """Optimizer steps done."""
    cursor: Cursor = Cursor()
    next_evaluation: int = 0
    cut_short: int = 0
    """Evaluations in a row without a result, because a member stopped."""
    cut_short_at: int = -1
    """The step after which the last of them was."""
    batch_sizes: dict[int, int] = field(default_factory=dict)
    """Micro-batch of every live member by rank."""
    attempts: list[tuple[int, int]] = field(default_factory=list)
    """Attempts that led here, each with the step at which it began. An attempt that resumed before the beginning of an
    earlier one replaces it."""
    balance: ShareBalance | None = None
    """Shares that follow the members' speed; ``None``: they stay as planned."""
    pace: SnapshotPace | None = None
    """When all write their next snapshot."""
    schedule: Schedule | None = None
    """Of the samples that lost members had in hand, which go back; ``None``: others have taken their work already."""
    stream: Stream | None = None
    """The training data of this member if they come one after the other."""
    partition: int = 0
    """Number of these data, if members have data of their own."""
    since: Synchronised | None = None
    """The last synchronisation; ``None``: there was none yet, or a snapshot does not tell of it."""

    def set_data(self, data: object, partition: int) -> None:
        """Set the training data of this member, of which a stream has a state of its own."""
        self.stream, self.partition = data if isinstance(data, Stream) else None, partition

    def _stream_state(self) -> dict[str, Any]:
        if self.stream is None:
            return {}
        cursor = self.cursor.parts[self.partition] if self.partition < len(self.cursor.parts) else self.cursor
        return {"stream": {"partition": self.partition, **self.stream.state_at(cursor.offset)}}

    def follow(self, planned: Mapping[int, int], unsent: int = 0) -> None:
        """Train on with these members after a synchronisation; if there are none, with those before. What others had in
        hand goes back.

        Args:
            planned: micro-batch of each as the plan has it, by rank.
            unsent: the last steps, which the synchronisation does not hold.
        """
        before, begin, since = self.batch_sizes, self.step - unsent, self.since
        lost = self._train_with(planned)
        if not unsent or lost or since is None or self.schedule is None or before != self.batch_sizes:
            self.since = Synchronised(self.step, self.cursor, self.batch_sizes)
        elif since.step < begin:
            cursor = since.cursor
            for _ in range(begin - since.step):
                _, cursor = self.schedule.step(cursor, before, min(before))
            self.since = Synchronised(begin, cursor, before)

    def _train_with(self, planned: Mapping[int, int]) -> set[int]:
        """Set the members; return who is lost since the last synchronisation, after giving back what they had in
        hand."""
        lost = self.since.batch_sizes.keys() - planned.keys() if self.since is not None and planned else set()
        if lost and self.since is not None and self.schedule is not None:
            steps, sizes = self.step - self.since.step, self.since.batch_sizes
            self.cursor = self.schedule.give_back(self.cursor, self.since.cursor, steps, sizes, lost)
        live = self.balance.sizes_of(planned) if self.balance is not None else dict(planned)
        self.batch_sizes = live or self.batch_sizes
        return lost

    def begin(self, attempt: int) -> None:
        """Record that an attempt begins here."""
        before = [(number, step) for number, step in self.attempts if step < self.step]
        self.attempts = [*before[1 - MOST_ATTEMPTS :], (attempt, self.step)]
        self.since = self.since or Synchronised(self.step, self.cursor, self.batch_sizes)
        if self.pace is not None:
            self.pace.begin(self.step)

    def note_cut_short(self) -> None:
        """Record that a stopping member has cut the evaluation after this step short."""
        self.cut_short, self.cut_short_at = self.cut_short + 1, self.step

    @property
    def evaluation_is_pending(self) -> bool:
        """Whether the members met after this step, but their evaluation had no result."""
        return self.cut_short_at == self.step

    def state(self) -> dict[str, Any]:
        """JSON-able part for a snapshot."""
        return {
            "step": self.step,
            "cursor": asdict(self.cursor),
            "next_evaluation": self.next_evaluation,
            "cut_short": self.cut_short,
            "cut_short_at": self.cut_short_at,
            "stopping": self.stopping.to_state(),
            "live": list(self.batch_sizes),
            "course": self.attempts,
            "since": None if self.schedule is None or self.since is None else self.since.state(),
            **({} if self.balance is None else {"balance": self.balance.state()}),
            **self._stream_state(),
            **({} if self.pace is None else {"pace": self.pace.state()}),
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Tensor part for a snapshot."""
        return prefixed(_BEST, self.stopping.best_state)

    def load(self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], absent: Collection[int] = ()) -> None:
        """Restore from :meth:`state` and :meth:`tensors`; ``batch_sizes`` holds all possibly live members, of which
        ``absent`` ones are left out. Where none of those that were live is there, all that are there go on."""
        self.step = int(state["step"])
        self.cursor = Cursor(**state["cursor"])
        self.next_evaluation = int(state["next_evaluation"])
        self.cut_short, self.cut_short_at = int(state["cut_short"]), int(state["cut_short_at"])
        self.stopping.load(state["stopping"], tensors_under(_BEST, tensors))
        self.attempts = [(int(attempt), int(step)) for attempt, step in state.get("course", [])]
        live = {rank: self.batch_sizes[rank] for rank in state["live"] if rank in self.batch_sizes}
        if self.balance is not None:
            self.balance.load(state.get("balance", {}))
        stream = state.get("stream", {})
        if self.stream is not None and stream.get("partition") == self.partition:
            self.stream.restore(stream)
        if self.pace is not None:
            self.pace.load(state.get("pace", {}), self.step)
        self.since = Synchronised.load(state["since"]) if state.get("since") else None
        there = {rank: size for rank, size in self.batch_sizes.items() if rank not in absent}
        if self._train_with({rank: size for rank, size in live.items() if rank in there} or there or live):
            self.since = None


@dataclass
class EarlyStopping:
    """Stops after ``patience`` evaluations in a row without a better result; smaller is better."""

    patience: int
    min_delta: float
    best: float | None = None
    best_step: int = -1
    waited: int = 0
    best_state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Trained weights and buffers of the best evaluation, on the CPU; empty where early stopping is off."""

    @classmethod
    def of(cls, settings: EvaluationSettings) -> EarlyStopping:
        return cls(settings.early_stopping_patience, settings.early_stopping_min_delta)

    def update(self, value: float, step: int) -> bool:
        """Record a result; return whether it is the best so far."""
        if self.best is None or value < self.best - self.min_delta:
            self.best, self.best_step, self.waited = value, step, 0
            return True
        self.waited += 1
        return False

    def note(self, value: float | None, step: int, model: nn.Module) -> None:
        """Record the result of an evaluation of ``model``; keep its state if it is the best so far."""
        if value is not None and self.update(value, step) and self.patience:
            self.best_state = {name: value.detach().to(_CPU, copy=True) for name, value in _state(model).items()}

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Give ``model`` the best state, if one was kept."""
        state = _state(model)
        for name, value in self.best_state.items():
            state[name].copy_(value)

    @property
    def best_in_words(self) -> str:
        """Words on when it was best."""
        return f"was best at step {self.best_step} ({loss_text(self.best)})"

    @property
    def should_stop(self) -> bool:
        return 0 < self.patience <= self.waited

    def to_state(self) -> dict[str, Any]:
        """JSON-able state for a snapshot."""
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load(self, state: Mapping[str, Any], best_state: Mapping[str, torch.Tensor]) -> None:
        """Restore from :meth:`to_state` and :attr:`best_state`."""
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]
        self.best_state = dict(best_state)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state that training changes: trained weights and persistent buffers, whose names are disjoint."""
    trained: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return trained | persistent_buffers(model)
