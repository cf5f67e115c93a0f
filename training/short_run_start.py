"""A short run that waits for a line on its standard input before it computes: ``python -m training.short_run_start``.

Links are measured meanwhile, and importing takes one core: a machine that has not two waits before that.
"""

from __future__ import annotations

import functools
import sys

from training.resources import free_cores

_LEAST_CORES = 2


def main() -> None:
    """Measure, with the arguments of :mod:`training.short_run`."""
    wait = functools.cache(sys.stdin.readline)  # one line is one word
    if free_cores() < _LEAST_CORES:
        wait()
    from training import short_run  # imports torch

    short_run.main(wait)


if __name__ == "__main__":
    main()
