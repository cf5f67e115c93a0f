"""``torch.distributed.monitored_barrier`` for groups of the mesh: torch supports it for gloo only.

Standard library only: the bootstrap of a launched script imports it as soon as ``torch.distributed`` is loaded.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_BACKEND = "muster"
_MARK = "_for_the_mesh_too"


def give_monitored_barrier(distributed: Any) -> None:
    """Replace it wherever ``torch.distributed`` and its submodules have it. Idempotent."""
    c10d = distributed.distributed_c10d
    stock = c10d.monitored_barrier
    if hasattr(stock, _MARK):
        return

    @functools.wraps(stock)
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        outside = group is distributed.GroupMember.NON_GROUP_MEMBER
        if outside or distributed.get_backend(group) != _BACKEND:
            return stock(group, timeout, wait_all_ranks)  # type: ignore[no-any-return]  # torch's, which returns none
        (group or c10d._get_default_group()).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    setattr(monitored_barrier, _MARK, True)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(module).get("monitored_barrier") is stock:
            module.monitored_barrier = monitored_barrier  # type: ignore[attr-defined]  # it has it
