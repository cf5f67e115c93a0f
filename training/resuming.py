"""Where a resumed run goes on: at the newest step of which all who trained then have a snapshot.

A member that left or was lost has none of the steps that the others made without it: it takes over what a newcomer
would, from one of them. Where no step is complete, because a disk is gone, the newest that anybody has is taken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from profiles.errors import RunFailed
from training.checkpoint import SnapshotStore
from training.exchange.anchors import anchor_from_bytes, anchor_to_bytes
from training.exchange.base import Anchor, Exchange
from training.exchange.codecs import codec_by_name

_PIECE = 1 << 24
"""Numbers in one exchange."""
_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FLAT = "flat"


@dataclass(frozen=True)
class Agreed:
    """Where the group goes on."""

    step: int
    holders: tuple[int, ...]
    """Ranks that have the snapshot of this step."""
    members: tuple[int, ...]

    @property
    def all_have_it(self) -> bool:
        return self.holders == self.members


def agree_on_snapshot(store: SnapshotStore, exchange: Exchange, warn: Callable[[str], None]) -> Agreed | None:
    """Return the step to go on at; ``None`` to start afresh."""
    steps, problems = store.verified_steps()
    for problem in problems:
        warn(problem)
    said = json.dumps({step: store.live(step) for step in steps}).encode()
    gathered = {rank: json.loads(payload) for rank, payload in sorted(exchange.gather("resume/steps", said).items())}
    held = {rank: {int(step): set(live) for step, live in theirs.items()} for rank, theirs in gathered.items()}
    holders = {step: {rank for rank in held if step in held[rank]} for theirs in held.values() for step in theirs}
    if not holders:
        return None
    complete = [s for s, ranks in holders.items() if any(held[rank][s] & set(held) <= ranks for rank in ranks)]
    step = max(complete or holders)
    found = Agreed(step, tuple(sorted(holders[step])), tuple(held))
    if not found.all_have_it and exchange.rank == found.holders[0]:
        without = ", ".join(f"member {rank}" for rank in found.members if rank not in found.holders)
        warn(f"{without} has no snapshot of step {step} and takes it over from member {found.holders[0]}")
    return found


def hand_over(agreed: Agreed, exchange: Exchange, make_anchor: Callable[[], Anchor]) -> None:
    """As a member that has the snapshot, and has taken it back: let those have it who have not, if there are any.

    Raises:
        RunFailed: see :func:`take_over`.
    """
    if not agreed.all_have_it:
        _share(agreed, exchange, make_anchor() if exchange.rank == agreed.holders[0] else None)


def take_over(agreed: Agreed, exchange: Exchange) -> Anchor:
    """As a member that has not the snapshot: return the state of the lowest one that has.

    Raises:
        RunFailed: that snapshot was written while an exchange was under way, which nobody else can finish.
    """
    return _share(agreed, exchange, None)


def _share(agreed: Agreed, exchange: Exchange, mine: Anchor | None) -> Anchor:
    """All members do this together, whatever they have."""
    holder = agreed.holders[0]
    said = exchange.gather("resume/state", _description(mine) if mine is not None else b"")[holder]
    described = anchor_from_bytes(said)
    document: dict[str, Any] = dict(described.state)
    shapes: Mapping[str, Any] = document[_FLAT]
    if any(name.startswith("strategy/sent") for name in shapes):
        message = f"the snapshot of step {agreed.step} was written during an exchange, and not all members have it"
        raise RunFailed(message, "start the run again without --resume")
    tensors = dict(described.tensors)
    source = mine.tensors if mine is not None else {}
    for name, (kind, shape) in sorted(shapes.items()):
        flat = source[name].detach().to("cpu", torch.float32).reshape(-1) if source else None
        tensors[name] = _spread(f"resume/{name}", math.prod(shape), flat, exchange).to(_FLOATS[kind]).reshape(shape)
    return Anchor(tensors, document["state"])


def _description(anchor: Anchor) -> bytes:
    """What is small, and the shapes of what follows as numbers."""
    shapes = {n: [_kind(t), list(t.shape)] for n, t in anchor.tensors.items() if _kind(t) in _FLOATS}
    small = {name: tensor for name, tensor in anchor.tensors.items() if name not in shapes}
    return anchor_to_bytes(Anchor(small, {"state": anchor.state, _FLAT: shapes}))


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _spread(name: str, size: int, flat: torch.Tensor | None, exchange: Exchange) -> torch.Tensor:
    """Return the numbers of the one that has them: a mean in which only it has weight."""
    codec = codec_by_name("fp32")
    parts = [
        exchange.mean(f"{_name(name)}/{start}", flat[start:end] if flat is not None else torch.zeros(end - start),
                      float(flat is not None), codec).mean
        for start, end in _pieces(size)
    ]  # fmt: skip
    return torch.cat(parts) if parts else torch.zeros(0)


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, _PIECE):
        yield start, min(start + _PIECE, size)


def _name(text: str) -> str:
    """Names of exchanges have a length; parameters may have longer ones."""
    return f"resume/{hashlib.sha256(text.encode()).hexdigest()[:16]}"
