from __future__ import annotations

from collections.abc import Iterator

import pytest
from group_members import Members


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    made = Members(tmp_path_factory.mktemp("group"))
    yield made
    made.close()
