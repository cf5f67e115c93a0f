"""How large the model is, as its members say, and so what the hub holds for each of them. No network in here."""

from __future__ import annotations

from collections import Counter

from training.exchange.wire import HubLimits, WireError


class ModelSize:
    """The members' word on their model.

    Every member says what it has before its first operation, and nothing closes without one that has not spoken yet: it
    may have a large model to build. The first mean settles it: the size that most have is right, and where that is
    none, the one of the lowest rank, whose weights all members begin with.

    Args:
        limits: known beforehand; ``None``: they follow the model.
        ranks: members there may be.
    """

    def __init__(self, limits: HubLimits | None, ranks: int) -> None:
        self._ranks = ranks
        self._settled = limits is not None
        self._known = limits is not None
        self._said: dict[int, int] = {}
        self.limits = limits or HubLimits.for_model(0, ranks)

    def say(self, rank: int, elements: int) -> None:
        """Take a member's word.

        Raises:
            WireError: it has said so before, or it has another model than the others.
        """
        if rank in self._said:
            raise WireError("a model came twice")
        self._said[rank] = elements
        if self._settled and not self._known and elements != self.limits.elements:
            raise WireError(self._another(elements))

    def require(self, rank: int) -> None:
        """Raise ``WireError`` where a member begins an operation and has not reported its model."""
        if not self._known and rank not in self._said:
            raise WireError("an operation before its model is known")

    def settle(self, live: list[int]) -> dict[int, str] | None:
        """Let the limits follow the model from the first mean on.

        Returns:
            Who has another model, and what to tell it; ``None`` where it was settled before.

        Raises:
            WireError: not all have spoken yet.
        """
        if self._settled:
            return None
        if self.silent(live):
            raise WireError("a mean before all members have reported their model")
        self._settled = True
        said = {rank: self._said[rank] for rank in live}
        votes = Counter(said.values())
        right = max(said.items(), key=lambda item: (votes[item[1]], -item[0]))[1]
        self.limits = HubLimits.for_model(right, self._ranks)
        return {rank: self._another(elements) for rank, elements in self._said.items() if elements != right}

    def silent(self, live: list[int]) -> list[int]:
        """Return the members that have still to speak before it is settled."""
        return [] if self._settled else [rank for rank in live if rank not in self._said]

    def forget(self, rank: int) -> None:
        """A member is gone."""
        self._said.pop(rank, None)

    def _another(self, elements: int) -> str:
        return f"its model has {elements} numbers to exchange, the others' {self.limits.elements}"
