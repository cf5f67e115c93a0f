"""Division of the training samples among the workers: the option ``split``."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from profiles.declarations import OptionError

FORMS = "global, label, label:SHARDS, dirichlet:ALPHA or speaker"
DATA_STAY = "the data stay on each machine: only weights or gradients leave it, and figures such as losses"
"""Sentence of a plan whose data are local to each machine."""


class DataSplit(NamedTuple):
    """A parsed value of the option."""

    kind: Literal["global", "label", "dirichlet", "speaker"]
    shards: int = 1
    """Shards of each worker, of samples sorted by label."""
    alpha: float = 0.0
    """Concentration of the Dirichlet distribution."""

    @property
    def labels(self) -> Literal["label", "speaker"]:
        """Property by which samples are divided."""
        return "speaker" if self.kind == "speaker" else "label"


def split_of(text: str) -> DataSplit:
    """Parse the option.

    Raises:
        OptionError: it has none of :data:`FORMS`.
    """
    if text == "global":
        return DataSplit("global")
    if text == "speaker":
        return DataSplit("speaker")
    if match := re.fullmatch(r"label(?::(\d{1,4}))?", text):
        shards = int(match[1] or 1)
        if shards > 0:
            return DataSplit("label", shards=shards)
    if match := re.fullmatch(r"dirichlet:(\d{0,6}\.?\d+(?:e-?\d{1,2})?)", text):
        alpha = float(match[1])
        if 1e-6 <= alpha <= 1e6:
            return DataSplit("dirichlet", alpha=alpha)
    raise OptionError("split", f"{FORMS}, for example dirichlet:0.1")


def _checked(text: str) -> str:
    return text if split_of(text) else ""


SplitText = Annotated[str, AfterValidator(_checked)]
"""The option as written, validated."""
