"""``torch.distributed`` over the mesh: stock ways of training in parallel have the losses of one process, or gloo's."""

from __future__ import annotations

import pytest
import torch
from group_members import Members

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def losses_of_one(members: Members) -> list[float]:
    found: list[float] = members.run("single", "gloo", 1)[0]
    return found


@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("ddp", 2), ("ddp", 3), ("ddp", 4), ("hsdp", 4), ("tp", 2), ("tp", 4), ("tp_sp", 2), ("tp_sp", 4),
        ("gpipe", 3), ("one_f_one_b", 2), ("one_f_one_b", 3), ("interleaved", 2),
    ],
)  # fmt: skip
def test_it_has_the_losses_of_one_process(members: Members, losses_of_one: list[float], case: str, world: int) -> None:
    found = next(losses for losses in reversed(members.run(case, "muster", world)) if losses)
    assert found == pytest.approx(losses_of_one, abs=1e-6)


def test_fsdp2_has_the_losses_of_one_and_gloos_state_dict(members: Members, losses_of_one: list[float]) -> None:
    losses, state = members.run("fsdp2", "muster", 3)[0]
    assert losses == pytest.approx(losses_of_one, abs=1e-6)
    gloos = members.run("fsdp2", "gloo", 3)[0][1]
    for name in set(gloos) - {
        name for name in gloos if name.endswith(".k.bias")
    }:  # their gradients are zero but for rounding
        assert state[name] == pytest.approx(gloos[name], abs=1e-4)
    assert set(state) == set(gloos)


@pytest.mark.parametrize("case", ["fsdp2", "tp"])
def test_what_mps_lacks_has_stand_ins(members: Members, losses_of_one: list[float], case: str) -> None:
    """torch.cpu stands for torch.mps; storages that cannot be resized, which FSDP2 needs, are beyond that."""
    found = members.run(f"parallel_cases:as_on_mps:{case}", "muster", 2)[0]
    assert (found[0] if case == "fsdp2" else found) == pytest.approx(losses_of_one, abs=1e-6)


def test_mixed_precision_has_the_losses_of_gloo(members: Members) -> None:
    for ours, gloos in zip(members.run("fsdp2_bf16", "muster", 3), members.run("fsdp2_bf16", "gloo", 3)):
        assert ours == pytest.approx(gloos, abs=1e-6)


def test_memory_with_gaps_is_reduced_and_what_lies_between_stays(members: Members) -> None:
    whole, total, before = (torch.tensor(found) for found in members.run("strided", "muster", 2)[1])
    assert torch.allclose(whole[::2, 1:4], total[::2, 1:4])
    whole[::2, 1:4] = before[::2, 1:4]
    assert torch.equal(whole, before)
