"""Stock ways of training in parallel over shaped links of machines in networks of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from group_members import Members

from tests.lab.lab import Lab
from tests.lab.spec import HostSpec, LabUnavailable

pytestmark = [pytest.mark.lab, pytest.mark.slow]


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


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("ddp", 4),
        ("fsdp2", 4),
        ("hsdp", 4),
        ("tp", 4),
        ("tp_sp", 4),
        ("gpipe", 4),
        ("one_f_one_b", 4),
        ("interleaved", 2),
    ],
)
def test_it_has_the_losses_of_one_process(members: Members, losses_of_one: list[float], case: str, world: int) -> None:
    found = next(found for found in reversed(members.run(case, "muster", world)) if found)
    assert found == pytest.approx(losses_of_one, abs=1e-6)


def test_fsdp2_in_bf16_has_the_losses_that_gloo_gives(members: Members) -> None:
    ours, gloos = (members.run("fsdp2_bf16", backend, 3) for backend in ("muster", "gloo"))
    assert ours == [pytest.approx(other, abs=1e-6) for other in gloos]
