"""The part of a ``DataLoader``'s batches that one process of a group trains on.

Batches are dealt out in turn: of ``n`` processes each takes every ``n``-th, so the script's sampler, collate function
and batch size stay what they are, and a step of all is ``n`` of its batches. All processes draw the same order, from
the session's seed and the pass, and make the same number of steps: the last turn is filled up from the beginning of the
pass, as by ``torch.utils.data.DistributedSampler``. Of a stream each process reads everything, and the last incomplete
turn is left out. What draws random numbers to order the data, draws the same on all processes: samplers, also from a
generator of the script, and streams.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from profiles.errors import BadInput
from training.hardware.device import move
from training.numerics.randomness import SeparateGenerators, preserved_generators, sample_key, seed_with

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
        with _seeded(sample_key(self._seed, self.epoch, 0), self._source, getattr(self._source, "sampler", None)):
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
        self.loader = loader
        """The script's."""
        self._rank, self._world_size = rank, world_size
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
        if name.startswith("_") or name == "loader":  # a copy has no loader yet when it is asked for it
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        if self._turns is not None or self._own_split or self._world_size == 1:
            return len(self._inner)
        return len(self.loader) // self._world_size

    def __iter__(self) -> Iterator[Any]:
        self.epoch, self.batches, self._skipped = self.epoch + 1, self._skipped, 0
        if self._turns is not None:
            self._turns.epoch, self._turns.skipped = self.epoch, self.batches
        parts: tuple[Any, ...] = (self.loader.dataset, self.loader.batch_sampler, _sampler_of(self.loader))
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self.epoch)
        batches = self._batches_of_pass()
        while True:
            self._before_fetch()
            start = time.monotonic()
            try:
                batch = next(batches)
            except StopIteration:
                self._refuse_empty_pass()
                return
            self.batches += 1
            self.samples += _samples_in(batch)
            batch = move(batch, self._device)
            self.waited += time.monotonic() - start
            yield batch

    def _batches_of_pass(self) -> Iterator[Any]:
        is_stream = self._turns is None and not self._own_split
        key = sample_key(self._seed, self.epoch, 0 if is_stream else 1 + self._rank)
        if is_stream and not self.loader.num_workers:
            return self._of_stream(_drawn_separately(self._inner, key), self._world_size)
        with _seeded(key, self._inner):  # a loader draws the seed of its workers
            batches = iter(self._inner)
        if self._turns is not None:
            return batches
        return self._of_stream(batches, 1 if self._own_split else self._world_size)

    def _of_stream(self, batches: Iterator[Any], turns: int) -> Iterator[Any]:
        """Yield this process's batches of a loader that is not dealt out by index."""
        rank, skipped = self._rank % turns, self.batches
        for number, batch in enumerate(batches):
            turn, position = divmod(number, turns)
            if position == rank:
                mine = batch
            if position == turns - 1 and turn >= skipped:
                yield mine

    def _dealt_out(self) -> DataLoader[Any]:
        loader = self.loader
        if isinstance(loader.dataset, IterableDataset) or self._own_split:
            return loader
        options = {name: getattr(loader, name) for name in _TAKEN_OVER}
        batched = loader.batch_sampler is not None
        source: Any = loader.batch_sampler if batched else loader.sampler
        self._turns = TurnSampler(source, self._rank, self._world_size, self._seed)
        if batched:
            return DataLoader(loader.dataset, batch_sampler=self._turns, **options)
        return DataLoader(loader.dataset, batch_size=None, sampler=self._turns, **options)

    def _refuse_empty_pass(self) -> None:
        data = self.loader.dataset
        if self.batches or (isinstance(data, Sized) and not len(data)):
            return
        size = f"{len(data)} samples" if isinstance(data, Sized) else type(data).__name__
        problem = f"a pass over {size} in batches of {self.loader.batch_size} has none for each of {self._world_size}"
        raise BadInput(f"{problem} processes", "take a smaller batch_size, or leave out drop_last")

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
        length = len(self) if isinstance(self.loader.dataset, Sized) else 0
        return max(0, self.epoch) + (min(1.0, self.batches / length) if length else 0.0)

    def take_counts(self) -> tuple[int, float]:
        """Return the samples taken, and the seconds waited for them, since the last call."""
        counts, self.samples, self.waited = (self.samples, self.waited), 0, 0.0
        return counts


@contextlib.contextmanager
def _seeded(key: tuple[int, ...], *objects: Any) -> Iterator[None]:
    """Seed the generators, and those that objects have from the script; restore them at the end."""
    generators = [
        thing.generator for thing in objects if isinstance(getattr(thing, "generator", None), torch.Generator)
    ]
    states = [generator.get_state() for generator in generators]
    with preserved_generators(_CPU):
        seed_with(key, _CPU)
        for generator in generators:
            generator.manual_seed(int(torch.randint(2**62, ())))
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def _drawn_separately(batches: Iterable[Any], key: tuple[int, ...]) -> Iterator[Any]:
    """Yield batches that are made with random numbers of their own."""
    generators = SeparateGenerators(key, _CPU)
    with generators.active():
        iterator = iter(batches)
    while True:
        with generators.active():
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def _sampler_of(loader: DataLoader[Any]) -> Any:
    return getattr(loader.batch_sampler, "sampler", None) or getattr(loader, "sampler", None)


def _samples_in(batch: Any) -> int:
    """Return the length of the first tensor of a batch; 1 if there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    return _samples_in(values[0]) if isinstance(values, list | tuple) and values else 1
