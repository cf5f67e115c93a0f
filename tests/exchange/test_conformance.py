"""Of PyTorch's own suite for process groups a test of each kind, over the mesh; ``make conformance`` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch_suite import REFUSED, Ranks

KINDS = """
    test_DistributedDataParallelCPU test_all_gather test_all_gather_coalesced_complex
    test_all_gather_object_default_pg test_all_reduce_coalesced_max test_all_reduce_full_group_product
    test_all_reduce_sum_async test_all_to_all_single_unequal_split_full_group test_broadcast
    test_ddp_create_graph test_gather_checks test_gather_object test_irecv test_isend
    test_monitored_barrier_gloo_rank_0_timeout test_monitored_barrier_gloo_subgroup
    test_reduce_max test_scatter test_scatter_checks test_scatter_object_list test_send_recv
    test_sparse_all_reduce_sum test_send_recv_with_tag
""".split()
_LIMIT = 12


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_of_torchs_own_suite_passes_over_the_mesh(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    problems = {name: ranks.run(name, "muster") for name in KINDS}
    ranks.close()
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_refusals_are_few_and_say_why() -> None:
    assert len(REFUSED) <= _LIMIT and all(REFUSED.values())
