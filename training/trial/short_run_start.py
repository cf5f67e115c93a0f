"""A short run that waits for a line on standard input before it reads the model and data: ``python -m
training.trial.short_run_start``.

They are sent meanwhile, and links are measured. Importing takes one core: a machine with fewer than two cores waits
before it.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable

from training.hardware.resources import free_cores

_LEAST_CORES = 2


Wait = Callable[[], object]


def _measure(wait: Wait) -> None:
    gc.disable()  # a fifth of the seconds that torch and transformers take to import goes into looking for garbage
    from training.trial import short_run  # imports torch

    def ready() -> None:
        gc.freeze()
        gc.enable()
        wait()

    short_run.main(ready)


def main(
    cores: Callable[[], float] = free_cores, word: Wait = sys.stdin.readline, measure: Callable[[Wait], None] = _measure
) -> None:
    """Measure, with the arguments of :mod:`training.trial.short_run`; ``word`` reads the line to wait for."""
    wait = functools.cache(word)
    if cores() < _LEAST_CORES:
        wait()
    measure(wait)


if __name__ == "__main__":
    main()
