"""A few held-out samples with the model's output before and after training: ``evaluation/showcase.json``.

The evaluating worker writes it atomically; the report, the dashboard and ``runs show`` read it. It embeds the audio of
clips, so that they can be played on machines without the recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.records.bounded_fields import Count, Measured, Name, Step, Text
from training.records.run_files import write_atomically
from training.tasks.outputs.predictions import Prediction

NAME = "showcase.json"
FIRST = "first.json"
"""Outputs of all candidates before the first step, if no predictions of a whole split are kept."""
MAX_SAMPLES = 64
"""Maximum number of candidate samples."""
_MAX_BYTES = 4 << 20
"""Maximum size in bytes of a file that is read, as it may come from another machine."""

Kind = Literal["speech", "text", "items"]
RULES: dict[Kind, str] = {
    "speech": "Of {of} held-out clips: the one with most words put right, the one in the middle of the others, and the "
    "one with most errors after training; of equal ones the longest.",
    "text": "The model goes on from the beginning of held-out samples: at the start, after a third and after two "
    "thirds of them. It takes the likeliest token each time.",
    "items": "Of {of} held-out samples, evenly spread: the best, the middle and the worst one by loss after training.",
}
"""How the samples of each kind are chosen, for display."""


class SampleOutput(NamedTuple):
    """A model's output for one sample."""

    prompt: str = ""
    """Text that is continued."""
    reference: str = ""
    """The correct text."""
    generated: str = ""
    loss: float | None = None
    exact_prompt: str = ""
    """The prompt as tokenised, with special tokens."""


class Sample(BaseModel):
    """One held-out sample, before and after training."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Name
    """Empty: recorded by the user, without a reference."""
    why: Name = ""
    """Part of the rule by which it was chosen."""
    prompt: Text = ""
    exact_prompt: Text = ""
    """The prompt as tokenised, with special tokens; empty in older files."""
    reference: Text = ""
    """The correct text; for clips, like the two below, normalised as for the WER."""
    before: Text = ""
    after: Text = ""
    first: Measured = None
    """Metric before training: WER of a clip (as a share), or loss of an item."""
    last: Measured = None
    """Metric after training."""
    sound: Annotated[str, Field(max_length=1 << 20, pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """MP3 in base64; empty if there is none."""
    soundless: Text = ""
    """Why a clip has no audio here."""


class Showcase(BaseModel):
    """The samples shown of a run."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    v: Count = 1
    kind: Kind
    split: Name
    step: Step
    """Step of the model that produced the outputs after training."""
    of: Count
    """Number of candidates."""
    samples: Annotated[tuple[Sample, ...], Field(max_length=MAX_SAMPLES)]

    @property
    def rule(self) -> str:
        """How the samples were chosen, for display."""
        return RULES[self.kind].format(of=self.of)

    def write(self, path: Path) -> None:
        """Write the file atomically; its folder is created.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json().encode())


def read_showcase(path: Path) -> Showcase | None:
    """Read a file written by :meth:`Showcase.write`; ``None`` if it is missing or invalid."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        return Showcase.model_validate_json(content) if len(content) <= _MAX_BYTES else None
    except (OSError, ValidationError):
        return None


def showcase_of_texts(
    split: str, step: int, before: Sequence[Prediction], after: Sequence[Prediction]
) -> Showcase | None:
    """Choose among clips by their transcripts; ``None`` if no clip was transcribed both times."""
    before_by_clip = {(clip.id, clip.normalised_reference): clip for clip in before}
    pairs = [
        (before_by_clip[key], clip) for clip in after if (key := (clip.id, clip.normalised_reference)) in before_by_clip
    ]
    if not pairs:
        return None
    by_gain = sorted(pairs, key=lambda pair: (-_removed_edits(*pair), -pair[1].words))
    best, others = by_gain[0], sorted(by_gain[1:], key=lambda pair: (_rate(pair[1]), pair[1].words))
    improved = _rate(best[1]) < _rate(best[0])
    chosen = [("improved most" if improved else "none improved", best)]
    if len(others) > 1:
        chosen.append(("middle of the others", others[(len(others) - 1) // 2]))
    if others:
        has_errors = _rate(others[-1][1]) > 0
        chosen.append(("most errors after training" if has_errors else "none has an error after training", others[-1]))
    samples = tuple(_sample_of_clip(why, *pair) for why, pair in chosen)
    return Showcase(kind="speech", split=split, step=step, of=len(pairs), samples=samples)


def _removed_edits(before: Prediction, after: Prediction) -> int:
    """Return the number of edits removed by training; edits before are capped at the words (at least 1)."""
    return min(before.edits, max(1, before.words)) - after.edits


def _rate(prediction: Prediction) -> float:
    """Return edits per word; with an empty reference, edits."""
    return prediction.edits / max(1, prediction.words)


def _sample_of_clip(why: str, before: Prediction, after: Prediction) -> Sample:
    return Sample(
        id=after.id,
        why=why,
        reference=after.normalised_reference,
        before=before.normalised_prediction,
        after=after.normalised_prediction,
        first=_rate(before),
        last=_rate(after),
    )


def showcase_of_items(showcase: Showcase, step: int, shown_by_id: dict[str, SampleOutput]) -> Showcase | None:
    """Choose among samples with outputs before and after training; ``None`` if there are none.

    Args:
        shown_by_id: outputs after training by sample id.
    """
    samples = [
        sample.model_copy(update={"after": shown_by_id[sample.id].generated, "last": shown_by_id[sample.id].loss})
        for sample in showcase.samples
        if sample.id in shown_by_id
    ]
    if not samples:
        return None
    if showcase.kind == "items":
        samples.sort(key=lambda sample: (sample.last is None, sample.last))
        chosen = {0: "best", (len(samples) - 1) // 2: "middle", len(samples) - 1: "worst"}
        if len(samples) < 3:  # no middle
            chosen = {0: "best", len(samples) - 1: "worst"} if len(samples) > 1 else {0: "the only one"}
        samples = [samples[index].model_copy(update={"why": why}) for index, why in chosen.items()]
    return showcase.model_copy(update={"step": step, "of": len(shown_by_id), "samples": tuple(samples)})
