"""Stock ways of training in parallel over shaped links of machines in networks of their own.

All ways, with other numbers of members, are in ``test_process_group.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from group_members import Members

from tests.lab.lab import Lab
from tests.lab.spec import HostSpec, LabUnavailable

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """Four machines, one of them on a slow link."""
    try:
        lab = Lab(*(HostSpec(name, mbit=mbit) for name, mbit in zip("abcd", (100, 100, 100, 20))))
    except LabUnavailable as error:
        pytest.skip(str(error))
    with lab:
        made = Members(tmp_path_factory.mktemp("lab"), [(host.pid, host.address) for host in lab])
        yield made
        made.close()


@pytest.fixture(scope="module")
def losses_of_one(members: Members) -> list[float]:
    found: list[float] = members.run("single", "gloo", 1)[0]
    return found


@pytest.mark.parametrize("case", ["ddp", "fsdp2", "tp_sp", "one_f_one_b"])
def test_it_has_the_losses_of_one_process(members: Members, losses_of_one: list[float], case: str) -> None:
    found = next(found for found in reversed(members.run(case, "muster", 4)) if found)
    assert found == pytest.approx(losses_of_one, abs=1e-6)
