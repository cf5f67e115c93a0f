"""The time line of a pipeline whose stages follow their orders: when each work ends, and how many are under way."""

from __future__ import annotations

from collections.abc import Sequence

from training.layouts.orders import Work, pipeline_order

FORWARD, BACKWARD = 1.0, 2.0


def finish_times(
    stages: int, micro_batches: int, extra: int, transfer: float, slowness: Sequence[float] = ()
) -> dict[tuple[int, Work], float]:
    """Return when each work ends if links carry one message at a time each way; those that never begin are missing.

    Args:
        slowness: factors on a stage's seconds; default: all 1.
    """
    orders = [pipeline_order(stage, stages, micro_batches, extra) for stage in range(stages)]
    position, idle_since = [0] * stages, [0.0] * stages
    ends: dict[tuple[int, Work], float] = {}
    arrivals: dict[tuple[int, Work], float] = {}
    link_free: dict[tuple[int, str], float] = {}
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                work = orders[stage][position[stage]]
                if _source(stage, stages, work) is not None and (stage, work) not in arrivals:
                    break
                begin = max(idle_since[stage], arrivals.get((stage, work), 0.0))
                factor = slowness[stage] if slowness else 1.0
                end = begin + factor * (FORWARD if work.kind == "forward" else BACKWARD)
                ends[stage, work] = idle_since[stage] = end
                target = stage + 1 if work.kind == "forward" else stage - 1
                free = max(end, link_free.get((stage, work.kind), 0.0)) + transfer
                arrivals[target, work] = link_free[stage, work.kind] = free
                position[stage] += 1
                moved = True
    return ends


def _source(stage: int, stages: int, work: Work) -> int | None:
    neighbour = stage - 1 if work.kind == "forward" else stage + 1
    return neighbour if 0 <= neighbour < stages else None
