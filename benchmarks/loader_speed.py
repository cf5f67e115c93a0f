"""Clips a second that one thread of the loader makes ready for Whisper, by what is trained on, and what threads add.

    .venv/bin/python benchmarks/loader_speed.py [--batches 9] [--threads 1 2]

A clip's stored features (16 bits) become its part of a batch: cut or full windows, with or without augmentation. The
table is of one thread's processor time, medians; the lines below it are of wall time. A quarter of a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from speech.whisper.features import LogMel
from speech.whisper.samples import SpeechSample, window_batch

BATCH = 16
CASES = [
    # seconds of sound, frames of the window, mels, strength of augmentation
    (25.0, 3000, 80, 0.0),
    (25.0, 3000, 80, 0.5),
    (6.0, 3000, 80, 0.5),
    (25.0, 3000, 128, 0.0),
    (25.0, 3000, 128, 0.5),
    (6.0, 3000, 128, 0.5),
    (1.4, 200, 80, 0.0),
    (1.4, 200, 80, 0.5),
    (5.2, 600, 80, 0.5),
]


def batch_maker(seconds: float, window: int, mels: int, strength: float) -> Callable[[int], torch.Tensor]:
    """Return what makes batch number so-and-so."""
    log_mel = LogMel(np.zeros((201, mels), np.float32), 16_000, 400, 160, 480_000)
    frames, silence = int(100 * seconds), -0.5
    store = np.maximum(np.random.default_rng(0).standard_normal((BATCH * frames, mels)), silence).astype(np.float16)
    samples = [
        SpeechSample(store[i * frames : (i + 1) * frames].T, silence, window, i, [], "", "", 0, i) for i in range(BATCH)
    ]

    def make(number: int) -> torch.Tensor:
        return window_batch(samples, log_mel, strength, [np.random.default_rng([number, i]) for i in range(BATCH)])

    return make


def clips_a_second(make: Callable[[int], torch.Tensor], batches: int) -> float:
    seconds = []
    for number in range(batches):
        start = time.thread_time()
        make(number)
        seconds.append(time.thread_time() - start)
    return BATCH / statistics.median(seconds)


def in_threads(make: Callable[[int], torch.Tensor], batches: int, threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        list(pool.map(make, range(batches)))
        return BATCH * batches / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=9, help="of each case")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("sound  window  mels  augmentation  clips/s of one thread")
    for seconds, window, mels, strength in CASES:
        rate = clips_a_second(batch_maker(seconds, window, mels, strength), arguments.batches)
        print(f"{seconds:4.1f} s  {window / 100:4.0f} s  {mels:4}  {strength:12}  {rate:8,.0f}", flush=True)
    make = batch_maker(25.0, 3000, 80, 0.5)
    for threads in arguments.threads:
        rate = in_threads(make, 2 * arguments.batches, threads)
        print(f"{threads} threads, 25 s, augmentation 0.5: {rate:,.0f} clips/s of wall time", flush=True)


if __name__ == "__main__":
    main()
