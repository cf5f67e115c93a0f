"""What torch, and what is built on it, asks of a process group ends over the mesh as over gloo."""

from __future__ import annotations

import contract_cases
import pytest
from group_members import Members

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "case",
    [
        "bound_to_a_device",
        "devices",
        "weights_from_rank_0",
        "saved_meanwhile",
        "callbacks",
        "held_by_futures",
        "overloads",
        "functional",
        "sparse",
        "one_tensor_twice_in_a_call",
        "a_root_tensor",
        "in_the_profile",
        "passed_together",
    ],
)
def test_it_ends_as_over_gloo(members: Members, case: str) -> None:
    ours = members.run(f"contract_cases:{case}", "muster", 2)
    assert ours == members.run(f"contract_cases:{case}", "gloo", 2)


def test_all_wrong_calls_are_refused_in_the_words_of_all_backends(members: Members) -> None:
    assert contract_cases.REFUSED
    assert members.run("contract_cases:refused", "muster", 2) == [([], [1.0, 3.0, 5.0, 7.0])] * 2


def test_a_monitored_barrier_names_who_is_late(members: Members) -> None:
    first, second, _ = members.run("contract_cases:late", "muster", 3)
    assert first == [["failed to pass monitoredBarrier", "2"]] * 2
    assert all("successfully reached" in words for words in second)


def test_operations_on_the_same_memory_are_carried_out_one_after_the_other(members: Members) -> None:
    assert members.run("contract_cases:one_after_the_other", "muster", 2) == [[True] * 10] * 2
