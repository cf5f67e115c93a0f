"""How the training samples are divided among the workers: the option ``split``."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from profiles.declarations import OptionError

FORMS = "global, label, label:SHARDS, dirichlet:ALPHA or speaker"
DATA_STAY = "the data stay on each machine: only weights or gradients leave it, and figures such as losses"
"""What a plan says where data stay."""


class DataSplit(NamedTuple):
    """A choice of it, in its parts."""

    kind: Literal["global", "label", "dirichlet", "speaker"]
    shards: int = 1
    """Of a worker, where samples are sorted by label."""
    alpha: float = 0.0
    """Concentration of the Dirichlet distribution."""

    @property
    def labels(self) -> Literal["label", "speaker"]:
        """By what samples are told apart."""
        return "speaker" if self.kind == "speaker" else "label"


def split_of(text: str) -> DataSplit:
    """Read the option.

    Raises:
        OptionError: it is none of :data:`FORMS`.
    """
    if text == "global":
        return DataSplit("global")
    if text == "speaker":
        return DataSplit("speaker")
    if found := re.fullmatch(r"label(?::(\d{1,4}))?", text):
        shards = int(found[1] or 1)
        if shards > 0:
            return DataSplit("label", shards=shards)
    if found := re.fullmatch(r"dirichlet:(\d{0,6}\.?\d+(?:e-?\d{1,2})?)", text):
        alpha = float(found[1])
        if 1e-6 <= alpha <= 1e6:
            return DataSplit("dirichlet", alpha=alpha)
    raise OptionError("split", f"{FORMS}, for example dirichlet:0.1")


def _checked(text: str) -> str:
    return text if split_of(text) else ""


SplitText = Annotated[str, AfterValidator(_checked)]
"""The option as it is written, checked."""
