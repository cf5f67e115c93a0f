"""Fixtures that build labs for tests and take them down again; a machine that cannot skips with the reason.

``from tests.lab.fixtures import make_lab, make_light_lab`` in a ``conftest.py`` puts them at the tests' disposal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.lab.lab import Lab
from tests.lab.light import LightLab
from tests.lab.spec import HostSpec, LabUnavailable

MakeLab = Callable[..., Lab]
MakeLightLab = Callable[..., LightLab]


@pytest.fixture
def make_lab() -> Iterator[MakeLab]:
    """Give a function that builds a lab from names and host specifications."""
    with ExitStack() as labs:

        def make(*hosts: str | HostSpec) -> Lab:
            try:
                return labs.enter_context(Lab(*hosts))
            except LabUnavailable as error:
                pytest.skip(str(error))

        yield make


@pytest.fixture
def make_light_lab() -> Iterator[MakeLightLab]:
    """Give a function that builds a lab on loopback ports."""
    with ExitStack() as labs:

        def make(*hosts: str | HostSpec) -> LightLab:
            try:
                return labs.enter_context(LightLab(*hosts))
            except LabUnavailable as error:
                pytest.skip(str(error))

        yield make
