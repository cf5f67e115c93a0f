"""A few held-out samples with what the model made of them before and after training: ``evaluation/showcase.json``.

The worker that evaluates writes it, whole or not at all; the report, the dashboard and ``runs show`` read it. The sound
of clips is in it, so that it can be heard where the recordings are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.bounded import Count, Measured, Name, Step, Text
from training.run_files import write_whole
from training.tasks.predictions import Prediction

NAME = "showcase.json"
FIRST = "first.json"
"""What was made of all that may be shown before the first step, where no texts of a whole split are kept."""
MOST = 64
"""Samples among which best and worst are looked for."""
_LARGEST = 4 << 20
"""Bytes of a file that is read: it may come from another machine."""

Kind = Literal["speech", "text", "items"]
RULES: dict[Kind, str] = {
    "speech": "Of {of} held-out clips: the one with most words put right, the one in the middle of the others, and the "
    "worst after training; of equal ones the longest.",
    "text": "The model goes on from the beginning of held-out samples: at the start, after a third and after two "
    "thirds of them. It takes the likeliest token each time.",
    "items": "Of {of} held-out samples, evenly spread: the best, the middle and the worst one by loss after training.",
}
"""By which the samples of a kind are chosen."""


class Shown(NamedTuple):
    """What a model makes of one sample."""

    prompt: str = ""
    """What a text goes on from."""
    reference: str = ""
    """What is right."""
    said: str = ""
    loss: float | None = None
    exact_prompt: str = ""
    """The prompt as the model reads it, with its special tokens."""


class Sample(BaseModel):
    """One held-out sample, before and after."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Name
    why: Name = ""
    """By which part of the rule it was chosen."""
    prompt: Text = ""
    exact_prompt: Text = ""
    """The same as the model reads it, with its special tokens; empty in older files."""
    reference: Text = ""
    """Of a clip, normalised as for the WER, like the two texts below."""
    before: Text = ""
    after: Text = ""
    first: Measured = None
    """The figure before training: WER of a clip, as a share; loss of an item."""
    last: Measured = None
    """The same after training."""
    sound: Annotated[str, Field(max_length=1 << 20, pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """MP3 in base64; empty: there is none."""
    soundless: Text = ""
    """Why a clip has no sound here."""


class Showcase(BaseModel):
    """What is shown of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Count = 1
    kind: Kind
    split: Name
    step: Step
    """After which the model made what is shown as after."""
    of: Count
    """Samples that were looked at."""
    samples: Annotated[tuple[Sample, ...], Field(max_length=MOST)]

    @property
    def rule(self) -> str:
        """By which the samples were chosen."""
        return RULES[self.kind].format(of=self.of)

    def write(self, path: Path) -> None:
        """Write the file; its folder is made.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, self.model_dump_json().encode())


def read_showcase(path: Path) -> Showcase | None:
    """Read what :meth:`Showcase.write` wrote; ``None``: there is none, or somebody has changed it."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        return Showcase.model_validate_json(content) if len(content) <= _LARGEST else None
    except (OSError, ValidationError):
        return None


def of_texts(split: str, step: int, before: Sequence[Prediction], after: Sequence[Prediction]) -> Showcase | None:
    """Choose among clips by what was heard in them; ``None``: none was heard both times."""
    known = {(one.id, one.normalised_reference): one for one in before}
    both = [(known[key], one) for one in after if (key := (one.id, one.normalised_reference)) in known]
    if not both:
        return None
    by_gain = sorted(both, key=lambda pair: (-_repaired(*pair), -pair[1].words))
    best, rest = by_gain[0], sorted(by_gain[1:], key=lambda pair: (_rate(pair[1]), pair[1].words))
    improved = _rate(best[1]) < _rate(best[0])
    chosen = [("improved most" if improved else "none improved", best)]
    if len(rest) > 1:
        chosen.append(("middle of the others", rest[(len(rest) - 1) // 2]))
    if rest:
        chosen.append(("worst after training", rest[-1]))
    samples = tuple(_clip(why, *pair) for why, pair in chosen)
    return Showcase(kind="speech", split=split, step=step, of=len(both), samples=samples)


def _repaired(before: Prediction, after: Prediction) -> int:
    """Words that are right after training and were not; what was only made up before counts as one of them at most."""
    return min(before.edits, max(1, before.words)) - after.edits


def _rate(one: Prediction) -> float:
    """Edits a word; in silence every written word is an error of one word."""
    return one.edits / max(1, one.words)


def _clip(why: str, before: Prediction, after: Prediction) -> Sample:
    return Sample(
        id=after.id,
        why=why,
        reference=after.normalised_reference,
        before=before.normalised_prediction,
        after=after.normalised_prediction,
        first=_rate(before),
        last=_rate(after),
    )


def of_items(first: Showcase, step: int, now: dict[str, Shown]) -> Showcase | None:
    """Choose among samples whose loss, or text, is known before and after; ``None``: of none it is.

    Args:
        now: what the model makes of them by their ids.
    """
    both = [
        one.model_copy(update={"after": now[one.id].said, "last": now[one.id].loss})
        for one in first.samples
        if one.id in now
    ]
    if not both:
        return None
    if first.kind == "items":
        both.sort(key=lambda one: (one.last is None, one.last))
        places = {0: "best", (len(both) - 1) // 2: "middle", len(both) - 1: "worst"}
        if len(both) < 3:  # no middle
            places = {0: "best", len(both) - 1: "worst"} if len(both) > 1 else {0: "the only one"}
        both = [both[place].model_copy(update={"why": why}) for place, why in places.items()]
    return first.model_copy(update={"step": step, "of": len(now), "samples": tuple(both)})
