"""Labs for the tests of what happens between machines, and the door that machines which join dial."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.fixtures import make_lab, make_light_lab

if TYPE_CHECKING:
    from tests.distributed.joining import RunningDoor

__all__ = ["door", "joining_config", "make_lab", "make_light_lab"]


@pytest.fixture
def joining_config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A configuration folder of its own, with a path short enough for sockets; its door ends with it."""
    from tests.distributed.joining import short_folder  # paramiko, which most tests here do without

    with short_folder() as folder:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture
def door(joining_config: Path) -> Iterator[RunningDoor]:
    """A door of this process."""
    from tests.distributed.joining import RunningDoor

    running = RunningDoor()
    yield running
    running.close()
