"""The part of a ``DataLoader``'s batches that one process of a group trains on.

Batches are dealt out in turn: of ``n`` processes each takes every ``n``-th, so the script's sampler, collate function
and batch size stay what they are, and a step of all is ``n`` of its batches. All processes draw the same order, from
the session's seed and the pass, and make the same number of steps: the last turn is filled up from the beginning of the
pass, as by ``torch.utils.data.DistributedSampler``. Of a stream each process reads everything, and the last incomplete
turn is left out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from profiles.errors import BadInput
from training.hardware.device import move
from training.numerics.randomness import preserved_generators, sample_key, seed_with

_CPU = torch.device("cpu")
_TAKEN_OVER = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator",
    "prefetch_factor", "persistent_workers",
)  # fmt: skip
"""What a loader of other indices has from the script's."""


class TurnSampler(Sampler[Any]):
    """What a sampler (of samples or batches) yields in the turns of one process.

    Args:
        source: the script's sampler, the same on all processes; has a length.
        rank: of this process, of ``world_size``.
    """

    def __init__(self, source: Iterable[Any], rank: int, world_size: int, seed: int) -> None:
        if not isinstance(source, Sized):
            problem = f"{type(source).__name__} has no length, so its batches cannot be dealt out to the processes"
            raise BadInput(problem, "give the sampler a __len__, or the data as an IterableDataset")
        self._source, self._rank, self._world_size, self._seed = source, rank, world_size, seed
        self.epoch = self.skipped = 0
        """The pass that begins next, and how many of this process's turns it leaves out."""

    def __len__(self) -> int:
        return -(-len(self._source) // self._world_size)

    def __iter__(self) -> Iterator[Any]:
        with preserved_generators(_CPU):
            seed_with(sample_key(self._seed, self.epoch, 0), _CPU)
            drawn = list(self._source)
        filled = itertools.islice(
            itertools.cycle(drawn), len(drawn) and self._world_size * -(-len(drawn) // self._world_size)
        )
        return itertools.islice(filled, self._rank + self.skipped * self._world_size, None, self._world_size)


class PreparedLoader:
    """A loader whose batches are this process's, on its device; what else it is asked for is the script's loader's.

    Args:
        loader: the script's.
        rank: of this process, of ``world_size``.
        device: that batches are moved to.
        before_fetch: called before each batch is fetched.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        rank: int,
        world_size: int,
        device: torch.device,
        seed: int,
        before_fetch: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader, self._rank, self._world_size = loader, rank, world_size
        self._device, self._seed, self._before_fetch = device, seed, before_fetch
        self.epoch = -1
        """The pass that is under way, from 0; -1: none was begun."""
        self.batches = 0
        """Batches of this pass that this process has taken."""
        self.samples, self.waited = 0, 0.0
        """Samples that were taken, and seconds that it took to get them, since a step has counted them."""
        self._skipped = 0
        self._turns: TurnSampler | None = None
        self._own_split = isinstance(_sampler_of(loader), DistributedSampler)
        self._inner = self._dealt_out()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no loader yet when it is asked for it
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        if self._turns is not None or self._own_split or self._world_size == 1:
            return len(self._inner)
        return len(self._loader) // self._world_size

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.batches, self._skipped = self.epoch + 1, self._skipped, 0
        if self._turns is not None:
            self._turns.epoch, self._turns.skipped = self.epoch, self.batches
        if self._own_split:
            _sampler_of(self._loader).set_epoch(self.epoch)
        batches = iter(self._inner) if self._turns is not None else self._of_stream(self.batches)
        while True:
            self._before_fetch()
            start = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.batches += 1
            self.samples += _samples_in(batch)
            batch = move(batch, self._device)
            self.waited += time.monotonic() - start
            yield batch

    def _of_stream(self, skipped: int) -> Iterator[Any]:
        """Yield the batches of a loader that is not dealt out by index."""
        turns = 1 if self._own_split else self._world_size
        rank = self._rank % turns
        for number, batch in enumerate(self._inner):
            turn, position = divmod(number, turns)
            if position == rank:
                mine = batch
            if position == turns - 1 and turn >= skipped:
                yield mine

    def _dealt_out(self) -> DataLoader[Any]:
        loader = self._loader
        if isinstance(loader.dataset, IterableDataset) or self._own_split:
            return loader
        options = {name: getattr(loader, name) for name in _TAKEN_OVER}
        batched = loader.batch_sampler is not None
        source: Any = loader.batch_sampler if batched else loader.sampler
        self._turns = TurnSampler(source, self._rank, self._world_size, self._seed)
        if batched:
            return DataLoader(loader.dataset, batch_sampler=self._turns, **options)
        return DataLoader(loader.dataset, batch_size=None, sampler=self._turns, **options)

    def state_dict(self) -> dict[str, int]:
        """Return where this process is, for a snapshot."""
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on, with the next pass over this loader, where the state was asked for."""
        if state["epoch"] >= 0:
            self.epoch, self._skipped = state["epoch"] - 1, state["batches"]

    @property
    def next_epoch(self) -> int:
        """Number of the pass that begins next."""
        return self.epoch + 1

    @property
    def epochs(self) -> float:
        """Passes so far, with the share of the one that is under way."""
        length = len(self) if isinstance(self._loader.dataset, Sized) else 0
        return max(0, self.epoch) + (min(1.0, self.batches / length) if length else 0.0)

    def take_counts(self) -> tuple[int, float]:
        """Return the samples taken, and the seconds waited for them, since the last call."""
        counts, self.samples, self.waited = (self.samples, self.waited), 0, 0.0
        return counts


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", None) or getattr(loader, "sampler", None)


def _samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 1 if there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    return _samples_in(values[0]) if isinstance(values, list | tuple) and values else 1
