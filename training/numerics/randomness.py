"""The random generators that a process shares: torch's, numpy's, Python's, and that of the device.

Dropout draws from them in the thread that trains, and a user's ``__getitem__`` may draw from them in the thread that
makes the next batches. Each sample gets its own generator state (:func:`seed_with`), the former state is restored
(:func:`preserved_generators`), and :class:`Turns` ensures that no other thread draws meanwhile.
"""

from __future__ import annotations

import hashlib
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

_SAMPLE, _BATCH, _EVALUATION = range(2, 5)
"""Tags that keep the random streams of one seed apart, beside those of :mod:`training.data.sample_order`."""


def sample_key(seed: int, epoch: int, index: int) -> tuple[int, ...]:
    """Key of the randomness of one training sample in one epoch, the same on every member."""
    return (seed, _SAMPLE, epoch, index)


def batch_key(seed: int, epoch: int, first_index: int) -> tuple[int, ...]:
    """Key of the randomness of making a batch whose first sample is ``first_index``."""
    return (seed, _BATCH, epoch, first_index)


def evaluation_key(seed: int, index: int) -> tuple[int, ...]:
    """Key of the randomness of one sample of an evaluation: the same in every evaluation."""
    return (seed, _EVALUATION, index)


def seed_everything(seed: int) -> None:
    """Seed all generators that a training step may draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # the devices' too


def generator_resetter(device: torch.device) -> Callable[[], None]:
    """Return a function that resets the generators to their present state; it may be called repeatedly."""
    python, with_numpy, with_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_device = _device_state(device)

    def take_back() -> None:
        random.setstate(python)
        np.random.set_state(with_numpy)
        torch.set_rng_state(with_torch)
        if on_device is not None:
            _restore_device(device, on_device)

    return take_back


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators at the end, whatever is drawn meanwhile.

    The calling thread must have the turn, see :class:`Turns`.
    """
    take_back = generator_resetter(device)
    try:
        yield
    finally:
        take_back()


class SeparateGenerators:
    """Generators of one consumer: what it draws is neither seen by others nor depends on what they draw.

    Args:
        key: that they begin with.
    """

    def __init__(self, key: tuple[int, ...], device: torch.device) -> None:
        self._key, self._device = key, device
        self._resume: Callable[[], None] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the consumer draw, from where it last was."""
        with preserved_generators(self._device):
            if self._resume is None:
                seed_with(self._key, self._device)
            else:
                self._resume()
            try:
                yield
            finally:
                self._resume = generator_resetter(self._device)


def seed_with(key: tuple[int, ...], device: torch.device) -> None:
    """Seed the generators with ``key``, inside of :func:`preserved_generators`."""
    digest = hashlib.blake2b(
        repr([*map(int, key)]).encode(), digest_size=16
    ).digest()  # a tenth of the time of a SeedSequence
    for_python, for_numpy, for_torch, for_device = struct.unpack("<4I", digest)
    random.seed(for_python)
    np.random.seed(for_numpy)
    torch.default_generator.manual_seed(for_torch)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(for_device)
    elif device.type == "mps":
        torch.mps.manual_seed(for_device)


def _device_state(device: torch.device) -> torch.Tensor | None:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.mps.get_rng_state() if device.type == "mps" else None


def _restore_device(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.mps.set_rng_state(state)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the state of every random generator a training step may draw from: Python, numpy, torch, ``device``."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, internal, next_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_position": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor([version, *internal]),
        "python_gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    on_device = _device_state(device)
    return tensors if on_device is None else {**tensors, device.type: on_device}


def restore_rng(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Restore the state of :func:`rng_state`. A device generator that was not saved stays as it is."""
    torch.set_rng_state(tensors["torch"])
    position, has_gauss = tensors["numpy_position"].tolist()
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, float(tensors["numpy_gauss"])))
    version, *internal = tensors["python"].tolist()
    gauss = tensors["python_gauss"].tolist()
    random.setstate((version, tuple(internal), gauss[0] if gauss else None))
    if device.type in ("cuda", "mps") and device.type in tensors:
        _restore_device(device, tensors[device.type])


class Closed(Exception):
    """No more turns are given."""


class Turns:
    """Decides who may draw from the shared generators: the trainer, or the loader's thread.

    The trainer has the turn except while it lends it: while it waits for other members and draws nothing. So no sample
    is made during forward, backward or evaluation. The loader takes the turn micro-batch by micro-batch, and the
    trainer has precedence when it takes its turn back.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lent = False
        self._loading = False
        self._closed = False
        self.waited = 0.0
        """Seconds for which the trainer has waited to have its turn back."""

    @contextmanager
    def lent(self) -> Iterator[None]:
        """As the trainer: let the loader work meanwhile."""
        self._lend(True)
        try:
            yield
        finally:
            self._lend(False)

    def _lend(self, lent: bool) -> None:
        with self._changed:
            self._lent = lent
            self._changed.notify_all()
            start = time.monotonic()
            self._changed.wait_for(lambda: lent or not self._loading)
            self.waited += time.monotonic() - start

    @contextmanager
    def taken(self) -> Iterator[None]:
        """As the loader: wait for the turn and take it.

        Raises:
            Closed: the trainer needs no more batches.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lent or self._closed)
            if self._closed:
                raise Closed
            self._loading = True
        try:
            yield
        finally:
            with self._changed:
                self._loading = False
                self._changed.notify_all()

    def close(self) -> None:
        """Give no more turns."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
