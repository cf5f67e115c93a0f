from __future__ import annotations

from collections.abc import Iterator

import pytest
from group_members import Members


@pytest.fixture(scope="session")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Four processes for all tests of groups; who ends one puts another in its place."""
    made = Members(tmp_path_factory.mktemp("group"))
    yield made
    made.close()
