"""Who owns how much of a vector: the shares with which an exchange ends soonest.

With one owner an exchange is a star. With several, every part of it (a link, an interface, a processor) works for the
mean of its seconds in the stars of all owners, weighted by their shares: bytes and work are linear in them. So the best
shares make the largest of these means as small as can be, which is the value of a matrix game; a linear program gives
it (Dantzig 1951, "A proof of the equivalence of the programming problem and the game problem").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.lazy import lazy

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy("numpy")

WORTH = 1.05
"""Equal shares are kept where others would make an exchange less than so many times as fast."""
_SLACK = 1.01
"""Of the best shares' time, within which the most even ones are taken."""
_NOTHING = 0.05
"""Of an equal share: below it a member owns nothing, for it costs the others a message each."""
_LEAST, _TINY = 1e-6, 1e-9
"""Of the longest part: no part takes less, so that no share is without bounds; and what counts as zero."""
_MOST_PIVOTS = 10_000


def best_shares(parts: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return each member's share of a vector; they sum up to 1.

    Args:
        parts: seconds of each part of an exchange, by the member that owns everything.
    """
    members = len(parts[0])
    equal = (1 / members,) * members
    seconds = np.array(parts, dtype=float)
    longest = seconds.mean(axis=1).max()
    if longest <= 0 or members == 1:
        return equal
    seconds = np.maximum(seconds / longest, _LEAST)
    best = 1 / _largest_sum(seconds, np.ones(len(seconds))).sum()
    if best * WORTH > 1:
        return equal
    # Of all shares that are about as good, those whose largest is smallest.
    bounds = np.concatenate([np.zeros(len(seconds)), np.ones(members)])
    found = _largest_sum(np.vstack([seconds - _SLACK * best, np.eye(members)]), bounds)
    found /= found.sum()
    shares = np.where(found < _NOTHING / members, 0.0, found).round(4)
    return tuple(float(share) for share in shares / shares.sum())


def _largest_sum(rows: Any, bounds: Any) -> Any:
    """Return the ``x >= 0`` of the largest sum with ``rows @ x <= bounds``, none of which is negative: the simplex
    method from ``x = 0``, by Bland's rule (1977), which never goes round in circles."""
    count = rows.shape[1]
    table = np.vstack([np.column_stack([rows, bounds]), [*[-1.0] * count, 0.0]])
    free, basic = list(range(count)), list(range(count, count + len(rows)))
    for _ in range(_MOST_PIVOTS):  # x can be used after each
        column = min((j for j in range(count) if table[-1, j] < -_TINY), key=free.__getitem__, default=None)
        if column is None:
            break
        able = np.flatnonzero(table[:-1, column] > _TINY)
        ratios = table[able, -1] / table[able, column]
        row = min(able[ratios <= ratios.min() + _TINY], key=basic.__getitem__)
        _pivot(table, row, column)
        free[column], basic[row] = basic[row], free[column]
    found = np.zeros(count)
    for row, name in enumerate(basic):
        if name < count:
            found[name] = max(0.0, table[row, -1])
    return found


def _pivot(table: Any, row: int, column: int) -> None:
    """Exchange a basic and a free variable of a condensed tableau."""
    pivot = table[row, column]
    by, out = table[row] / pivot, table[:, column].copy()
    table -= np.outer(out, by)
    table[row] = by
    table[:, column] = -out / pivot
    table[row, column] = 1 / pivot
