from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from group_members import Members

from training.exchange.links.certificates import issue_run_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of four members of the run ``run``, and its coordinator."""
    folder = tmp_path_factory.mktemp("certificates")
    issue_run_certificates(folder, "run", range(4), ["127.0.0.1"])
    return folder


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Four processes for all tests of groups; who ends one puts another in its place."""
    made = Members(tmp_path_factory.mktemp("group"))
    yield made
    made.close()
