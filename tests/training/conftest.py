"""A coordinator for the members of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from group import Connect, Serve

from tests.waiting import PATIENCE
from training.exchange.group.coordinator_server import Coordinator
from training.exchange.group.coordinator_state import CoordinatorConfig
from training.exchange.group.join_config import JoinConfig
from training.exchange.links.certificates import issue_run_certificates
from training.exchange.mean.mesh_member import MeshMember
from training.records.plan import RunPlan


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a coordinator for a plan; return how a rank connects."""
    coordinators: list[Coordinator] = []

    def start(plan: RunPlan) -> Connect:
        folder = tmp_path / f"secrets-{len(coordinators)}"
        folder.mkdir()
        issue_run_certificates(folder, plan.run_id, range(plan.world_size), ["127.0.0.1"])
        names = tuple(member.name for member in plan.members)
        config = CoordinatorConfig(
            run_id=plan.run_id, names=names, certificates=folder / "coordinator", absent=plan.absent
        )
        coordinator = Coordinator(config)
        coordinators.append(coordinator)
        port = coordinator.start()
        return lambda rank: MeshMember(
            JoinConfig(
                f"127.0.0.1:{port}", folder / f"member-{rank}", plan.run_id, rank, plan.world_size, f"worker-{rank}"
            )
        ).join(PATIENCE)

    yield start
    for coordinator in coordinators:
        coordinator.stop()
