"""``torch.distributed`` over the mesh: stock ways of training in parallel have the losses of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from group_members import Members

pytestmark = pytest.mark.slow


RANKS = {
    "ddp": (3,),
    "fsdp2": (3,),
    "fsdp2_bf16": (3,),
    "hsdp": (4,),
    "gpipe": (3,),
    "one_f_one_b": (3,),
    "interleaved": (2,),
    "tp": (3,),
    "tp_sp": (3,),
}
"""By how many each is tried here; by four in ``test_parallel_lab.py``, by two where MPS stands behind it, and DDP in
``test_cli_launch.py``."""


@pytest.fixture(scope="module")
def losses_of_one(members: Members) -> list[float]:
    found: list[float] = members.run("single", "gloo", 1)[0]
    return found


@pytest.mark.parametrize(("way", "ranks"), [(way, ranks) for way in RANKS for ranks in RANKS[way]])
def test_it_has_the_losses_of_one_process(members: Members, losses_of_one: list[float], way: str, ranks: int) -> None:
    ours = members.run(way, "muster", ranks)
    of_one = losses_of_one
    if way == "fsdp2_bf16":
        of_one = members.run(f"parallel_cases:single_bf16:{ranks}", "gloo", 1)[0]
    told = [losses for losses in ours if losses]  # of a pipeline the last one alone
    assert told and all(losses == pytest.approx(of_one, abs=1e-6) for losses in told)


def test_fsdp2_has_the_state_dict_of_one_process(members: Members) -> None:
    ours = members.run("fsdp2_state", "muster", 3)[0]
    theirs = members.run("single_state", "gloo", 1)[0]
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("case", ["fsdp2", "tp"])
def test_what_mps_lacks_has_stand_ins(members: Members, losses_of_one: list[float], case: str) -> None:
    """torch.cpu stands for torch.mps; storages that cannot be resized, which FSDP2 needs, are beyond that."""
    assert members.run(f"parallel_cases:as_on_mps:{case}", "muster", 2)[0] == pytest.approx(losses_of_one, abs=1e-6)


def test_memory_with_gaps_is_reduced_and_what_lies_between_stays(members: Members) -> None:
    whole, total, before = (torch.tensor(found) for found in members.run("strided", "muster", 2)[1])
    assert torch.allclose(whole[::2, 1:4], total[::2, 1:4])
    whole[::2, 1:4] = before[::2, 1:4]
    assert torch.equal(whole, before)
