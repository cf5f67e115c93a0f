"""The prediction record of a clip."""

from __future__ import annotations

from speech.data.speech_clips import NOISE_COLUMNS, Clip, FileSource, first_of
from speech.scoring.word_errors import count_errors
from training.tasks.data_files.splits import SPEAKER_COLUMNS
from training.tasks.outputs.predictions import COLUMNS, Prediction


def prediction_of(
    clip: Clip, prediction: str, normalised: tuple[str, str], cut: bool, language: str, seconds: float
) -> Prediction:
    """Return the prediction record of one clip.

    Args:
        normalised: normalised reference and prediction.
    """
    counted = count_errors([normalised[0]], [normalised[1]])
    return Prediction(
        id=clip.id,
        audio=str(clip.audio.path) if isinstance(clip.audio, FileSource) else "",
        reference=clip.text,
        prediction=prediction,
        normalised_reference=normalised[0],
        normalised_prediction=normalised[1],
        edits=int(counted["word_edits"]),
        words=int(counted["words"]),
        char_edits=int(counted["char_edits"]),
        chars=int(counted["chars"]),
        cut=cut,
        speaker=first_of(clip.columns, SPEAKER_COLUMNS),
        language=language,
        duration=seconds,
        noise=first_of(clip.columns, NOISE_COLUMNS),
        columns={name: text for name, text in clip.columns.items() if name and name not in COLUMNS},
    )
