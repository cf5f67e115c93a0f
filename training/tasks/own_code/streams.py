"""Data sets that are read one after the other, without an index: iterables of samples, and samplers of a data set.

A stream has one position, that of the group: samples are numbered from the beginning of the first pass on, a step takes
the next ones for all members, and where a pass ends the next one begins. Every member reads the stream in the same
order and keeps its own samples, so a step holds what one worker with the joint batch would see, and no two members hold
the same. What the stream draws from torch's, numpy's or Python's generator follows from the seed, the pass and the
number of the sample in it: all members, and a resumed run, draw the same.

A resumed run goes on at the exact position: from the newest state of the data set (``state_dict``, as of Hugging Face's
streams and of torchdata), or from the beginning of its pass, by reading over what was taken.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from profiles.errors import BadInput, MusterError, RunFailed, where_it_failed
from training.numerics.randomness import preserved_generators, sample_key, seed_with

_PASS_BEGINS = -1
"""Instead of the number of a sample: what the beginning of a pass draws."""
_MOST_STATES = 128
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sampled:
    """A data set of which a sampler of the user's draws the samples, pass by pass."""

    data: Any
    sampler: Any


def is_stream(data: Any) -> bool:
    """Whether samples come one after the other: an iterable data set or object without an index, or a sampler's."""
    return isinstance(data, (IterableDataset, Sampled, Stream)) or (
        hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not isinstance(data, type)
    )


class Stream:
    """The samples of a source by their position since the beginning of the first pass.

    Positions are asked for in ascending order; an earlier one is reached from a kept state, or from the beginning of
    its pass. The caller seeds nothing, and restores the generators (:class:`training.data.batches.Samples`).

    Args:
        source: an iterable that begins anew whenever it is iterated, or :class:`Sampled`.
        limit: samples of a pass at most; 0: all.
    """

    def __init__(self, source: Any, seed: int, limit: int = 0) -> None:
        self._source, self._seed, self._limit = source, seed, limit
        self._items: Any = source.sampler if isinstance(source, Sampled) else source
        self._iterator: Iterator[Any] | None = None
        self._position, self._pass, self._begin = 0, 0, 0
        self._begins = [(0, 0)]
        """Known beginnings of passes: position and pass."""
        self._states: list[tuple[int, dict[str, Any]]] = []
        self._spacing = 1
        self._is_exact = True
        """Whether the source goes on from its states where it was."""
        self._first: list[Any] = []

    @property
    def length(self) -> int | None:
        """Samples of a pass, if the source says so."""
        try:
            size = len(self._items)
        except (TypeError, NotImplementedError):  # torch recommends either where no length is known
            return self._limit or None
        return min(size, self._limit or size)

    def again(self) -> Stream:
        """Return another reader of the same samples, from the beginning."""
        return Stream(self._source, self._seed, self._limit)

    def __len__(self) -> int:
        """Return the samples that are known: those of a pass, or at least those that were read."""
        return max(self.length or 0, self._position, 1)

    def __getitem__(self, position: int) -> Any:
        if position == 0 and self._first:  # looked at before the first step
            return self._first[0]
        if position < self._position or self._iterator is None:
            self._go_back(position)
        kept = self._keep_state()
        while True:
            item = self._next()
            if kept:
                self._states[-1][1]["next"], kept = _digest(item), False
            if self._position > position:
                break
        sample = self._sample(item)
        self._first = [sample] if position == 0 else []
        return sample

    @property
    def has_ended(self) -> bool:
        """Whether the first pass is over."""
        return self._pass > 0

    def passes(self, position: int) -> float:
        """Return the passes before a position: with the share of the last one where the length of a pass is known."""
        if size := self.length:
            return position / size
        return float(max((number for begin, number in self._begins if begin <= position), default=0))

    def state_at(self, position: int) -> dict[str, Any]:
        """Return where reading can begin so that it reaches ``position``, as JSON, for a snapshot."""
        earlier = [kept for kept in self._states if kept[0] <= position]
        begin, number = max(kept for kept in self._begins if kept[0] <= position)
        if earlier and earlier[-1][0] >= begin:
            self._states = [kept for kept in self._states if kept[0] >= earlier[-1][0]]
            self._spacing = 1
            return earlier[-1][1]
        return {"position": begin, "begin": begin, "pass": number, "source": None}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin at a state from :meth:`state_at`."""
        self._begins.append((int(state["begin"]), int(state["pass"])))
        self._states = [(int(state["position"]), dict(state))]
        self._iterator = None

    def _go_back(self, position: int) -> None:
        state = self.state_at(position)
        self._move_to(state)
        if state["source"] is None:
            return None
        if _digest(self._next()) == state["next"]:
            return self._move_to(state)
        # some versions of datasets go on behind the rest of a batch of rows: this one is read over from the beginning
        self._states, self._is_exact = [], False
        self._move_to(self.state_at(position))

    def _move_to(self, state: Mapping[str, Any]) -> None:
        self._position, self._begin, self._pass = int(state["position"]), int(state["begin"]), int(state["pass"])
        self._open(state["source"])

    def _open(self, state: Any = None) -> None:
        """Begin a pass, or go on in it from a state of the source."""
        if state is None and hasattr(self._items, "load_state_dict"):  # one that has loaded a state would go back to it
            self._items = copy.copy(self._source)
        for set_epoch in (getattr(part, "set_epoch", None) for part in (self._items, getattr(self._source, "data", 0))):
            if callable(set_epoch):
                set_epoch(self._pass)
        seed_with(sample_key(self._seed, self._pass, _PASS_BEGINS), _CPU)
        generator = getattr(self._items, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(int(torch.randint(1 << 62, ())))
        if state is not None:
            self._items.load_state_dict(state)
        self._iterator = iter(self._items)

    def _next(self) -> Any:
        """Return the item at the position, and move on; a pass that is over is followed by the next one."""
        assert self._iterator is not None
        number = self._position - self._begin
        seed_with(sample_key(self._seed, self._pass, number), _CPU)
        try:
            if self._limit and number >= self._limit:
                raise StopIteration
            item = next(self._iterator)
        except StopIteration:
            if not number:
                raise BadInput(f"{_name(self._source)} gives no samples", "give data with at least one") from None
            self._pass, self._begin = self._pass + 1, self._position
            self._begins.append((self._begin, self._pass))
            self._open()
            return self._next()
        except MusterError:
            raise
        except Exception as error:  # the user's own code may raise anything; what comes after it cannot be read
            message = f"{_name(self._source)} failed at sample {number}: {where_it_failed(error)}"
            raise RunFailed(message, "repair it, or leave out such samples in it") from error
        self._position += 1
        return item

    def _sample(self, item: Any) -> Any:
        return self._source.data[int(item)] if isinstance(self._source, Sampled) else item

    def _keep_state(self) -> bool:
        """Keep the state of a source that has one that is exact, before some of the samples that are asked for; return
        whether it was kept."""
        if not callable(getattr(self._items, "state_dict", None)) or not hasattr(self._items, "load_state_dict"):
            return False
        if not self._is_exact or _buffers(getattr(self._items, "_ex_iterable", None)):
            return False
        if self._states and self._position < self._states[-1][0] + self._spacing:
            return False
        try:
            source = json.loads(json.dumps(self._items.state_dict()))
        except (TypeError, ValueError):  # of objects: it is read over from the beginning of the pass
            return False
        state = {"position": self._position, "begin": self._begin, "pass": self._pass, "source": source, "next": ""}
        if len(self._states) > _MOST_STATES:
            self._states, self._spacing = self._states[::2], self._spacing * 2
        self._states.append((self._position, state))
        return True


def _digest(item: Any) -> str:
    """Return what tells an item from its neighbours; one with an address in it never equals another process's."""
    return hashlib.blake2b(repr(item).encode(errors="replace"), digest_size=8).hexdigest()


def _buffers(examples: Any) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, which its state lacks: it would resume behind it."""
    inner = [getattr(examples, "ex_iterable", None), *(getattr(examples, "ex_iterables", None) or ())]
    return "Shuffled" in type(examples).__name__ or any(_buffers(part) for part in inner if part is not None)


def _name(source: Any) -> str:
    return type(source.sampler if isinstance(source, Sampled) else source).__name__


def read_all(source: Any, seed: int, limit: int, most: int = 10_000) -> Any:
    """Return the samples of one pass, for an evaluation. What a sampler draws stays on the disk.

    Args:
        limit: read so many; 0: all.

    Raises:
        BadInput: there are none, or more than ``most`` and no limit.
    """
    with preserved_generators(_CPU):
        if isinstance(source, Sampled):
            return Subset(source.data, read_all(source.sampler, seed, limit, len(source.data) + most))
        stream, samples = Stream(source, seed, limit), list[Any]()
        while (sample := stream[len(samples)]) is not None and not stream.has_ended:
            samples.append(sample)
            if len(samples) > most and not limit:
                hint = "set max_eval_samples, or give a data set with an index"
                raise BadInput(f"the evaluation data are more than {most} samples, which are kept in memory", hint)
        return samples
