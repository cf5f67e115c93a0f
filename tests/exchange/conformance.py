"""All of PyTorch's own suite for process groups over the mesh: what gloo passes the mesh passes, but for a named list.

    make conformance

Its file is not found by pytest unless it is named: with its many tests that need GPUs it takes minutes, and a part of
it is in ``test_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch_suite
from torch_suite import REFUSED, Ranks

pytestmark = pytest.mark.timeout(400)  # a rank that hangs is given up after 90 s


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    processes = Ranks(tmp_path_factory.mktemp("ranks"))
    yield processes
    processes.close()


@pytest.mark.parametrize("name", [name for name in torch_suite.names() if name not in REFUSED])
def test_what_gloo_passes_the_mesh_passes(ranks: Ranks, name: str) -> None:
    problem = ranks.run(name, "muster")
    if problem.startswith("skipped"):
        pytest.skip(problem)
    if problem and ranks.run(name, "gloo"):
        pytest.skip("gloo fails here too")
    assert not problem or not ranks.run(name, "muster"), problem  # of its bounds in seconds some break when all is busy


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_one(ranks: Ranks, name: str) -> None:
    assert not ranks.run(name, "gloo")
    assert "skipped" not in (problem := ranks.run(name, "muster")) and problem, f"it passes: {REFUSED[name]}"
