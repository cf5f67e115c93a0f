"""What one member says of its snapshots cannot break the others' resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.memory_exchange import RoomExchange, together
from training.checkpoint import Snapshot, SnapshotStore
from training.resuming import agree_on_snapshot


@pytest.mark.parametrize(
    "lie", [b"", b"[1]", b'{"live": {"x": [0]}}', b'{"live": {"7": 3}}', b'{"live": {"' + b"9" * 5000 + b'": []}}']
)
def test_who_says_nonsense_has_no_snapshot(lie: bytes, tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 2)
    store.save(Snapshot(4, {"model/w": torch.ones(1)}, {"live": [0, 1]}), "plan")

    def body(member: RoomExchange) -> Any:
        if member.rank:
            return member.gather("resume/steps", lie)
        return agree_on_snapshot(store, member, lambda message: None)

    agreed = together(2, body)[0][0]
    assert (agreed.step, agreed.holders, agreed.members) == (4, (0,), (0, 1))
