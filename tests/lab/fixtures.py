"""Fixtures that build labs for tests and take them down again; a machine that cannot skips with the reason.

``from tests.lab.fixtures import make_lab, make_light_lab`` in a ``conftest.py`` puts them at the tests' disposal.
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
    """Give a function that builds a lab from names and host specifications."""
    with ExitStack() as labs:
        yield lambda *hosts: labs.enter_context(Lab(*hosts))


@pytest.fixture
def make_light_lab() -> Iterator[MakeLightLab]:
    """Give a function that builds a lab on loopback ports."""
    with ExitStack() as labs:
        yield lambda *hosts: labs.enter_context(LightLab(*hosts))
