"""Fixtures that build labs and remove them afterwards; tests are skipped with the reason on machines that cannot.

``from tests.lab.fixtures import make_lab, make_light_lab`` in a ``conftest.py`` makes them available to its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.lab.lab import Lab
from tests.lab.light import LightLab

MakeLab = Callable[..., Lab]
MakeLightLab = Callable[..., LightLab]


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Provide a function that builds a lab from names and host specifications."""
    with ExitStack() as labs:
        yield lambda *hosts: labs.enter_context(Lab(*hosts))


@pytest.fixture
def make_light_lab() -> Iterator[MakeLightLab]:
    """Provide a function that builds a lab on loopback ports."""
    with ExitStack() as labs:
        yield lambda *hosts: labs.enter_context(LightLab(*hosts))
