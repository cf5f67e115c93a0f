"""What a speech data set holds, found from its tables and the headers of its recordings; nothing is decoded."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from profiles.errors import BadInput, counted
from profiles.installation import program
from profiles.locations import is_on_hub
from profiles.quantities import share_text
from profiles.schema import AUTO_LANGUAGE, EVERY_LANGUAGE, DataSettings, ModelSettings, Profile
from speech.data.language_codes import language_code
from speech.data.patches import BLACKLIST, PSEUDO
from speech.data.speech_clips import (
    LEAKAGE_REMARK,
    LONG_WINDOW_PROFILE,
    PUBLISHED_WINDOW,
    REPAIR_HINT,
    Clip,
    FileSource,
    SpeechSplits,
    leaked_clips,
    long_clip_error,
    too_few,
    too_long_for,
    warn_once,
)
from speech.data.speech_dataset import (
    SpeechTables,
    read_speech,
    read_tables,
    read_with_validation,
    without_left_out,
)
from training.tasks.data_files.splits import SPLITS, held_out_count
from training.tasks.data_files.tables import read_table
from training.tasks.published_models import model_folder

PATIENCE = 20.0
"""Seconds that headers are read for."""
_SHORT_PATIENCE = 5.0
"""Seconds that headers are read for before a run."""
_HEADERS_ERR = 0.1
"""Seconds by which the header of a compressed file may be wrong."""
SHOWN_BROKEN = 5
_EXAMPLES = 4
_PUBLISHED = "openai/whisper-"
"""Prefix of the names of Whisper models whose window is known before they are fetched."""
_TABLES = (".csv", ".tsv", ".jsonl", ".json")
_BYTES_A_TOKEN = 3
"""Of a text in UTF-8; 3 to 5 with the vocabularies of Whisper."""
_PROMPT = 6
"""Tokens before and after a text."""


def findings(profile: Profile) -> dict[str, Any]:
    """Return what a data set holds; recordings whose headers are read within :data:`PATIENCE` count as looked at.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    data = profile.data
    tables = read_tables(data.dataset_path, data.text_column)
    splits = without_left_out(tables)
    return {
        "splits": {split: len(clips) for split, clips in splits.items()},
        "unit": "recordings",
        "columns": _columns(Path(data.dataset_path).expanduser()),
        "notes": list(_notes(_history(tables), data)),
        "few": too_few(len(splits.get("train", ()))),
        "examples": _examples(splits.get("train", ())),
        **_too_long(profile, splits),
        **_measure_recordings(splits),
    }


def check_data(profile: Profile) -> None:
    """Check the tables, that files exist, and that the model has the languages and hears the clips.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    data = profile.data
    splits = read_with_validation(data.dataset_path, data.text_column, data.pseudo_share)
    _refuse_languages(profile, splits)
    _refuse_long(profile, splits)
    if remark := too_few(len(splits["train"])):
        warn_once(remark)


def training_clips(profile: Profile) -> int:
    """Return the number of clips that a profile trains on.

    Raises:
        BadInput: the data set cannot be used.
    """
    data = profile.data
    count = len(read_with_validation(data.dataset_path, data.text_column, data.pseudo_share, quiet=True)["train"])
    return min(count, data.max_train_samples or count)


def too_long(profile: Profile) -> dict[str, str]:
    """Return why the model cannot hear all clips of its data set, and ``instead`` the profile that can, if any; empty
    if it can.

    Raises:
        BadInput: the data set cannot be used.
    """
    data = profile.data
    splits = read_with_validation(data.dataset_path, data.text_column, quiet=True)
    return _too_long(profile, splits).get("too_long", {})


def _too_long(profile: Profile, splits: SpeechSplits) -> dict[str, dict[str, str]]:
    """Return why the model cannot hear all clips, and the profile that can, if any; empty if it can."""
    try:
        _refuse_long(profile, splits)
    except BadInput as error:
        instead = LONG_WINDOW_PROFILE if (_window(profile.model) or PUBLISHED_WINDOW) < PUBLISHED_WINDOW else ""
        return {"too_long": {"error": error.message, "hint": error.hint, "instead": instead}}
    return {}


def _history(tables: SpeechTables) -> dict[str, int]:
    """Return the number of changes that were made to the data set, by kind, without those that are 0."""
    kinds = Counter(change.kind for change in tables.changes)
    listed = sum(change.kind == "delete" and BLACKLIST in Path(change.where).name for change in tables.changes)
    counts = {"corrected": kinds["override_text"], "deleted": kinds["delete"] - listed, "blacklisted": listed}
    counts["protected"] = kinds["protect"]
    splits = without_left_out(tables)
    counts["in_train_too"] = len(leaked_clips(splits))
    if "validation" not in splits:
        counts["held_out"] = held_out_count(len(splits.get("train", ())))
    if tables.folder is not None:
        from speech.recordings.dataset_folder import LEFT_OUT  # loads what decodes

        with suppress(BadInput):  # a file of another program may have such a name
            counts["not_prepared"] = _lines(tables.folder / LEFT_OUT)
            counts["pseudo"] = _lines(tables.folder / PSEUDO)
    return {name: count for name, count in counts.items() if count}


def _notes(history: Mapping[str, int], data: DataSettings) -> Iterator[str]:
    """Yield what was done to the data set, with the command or option to follow up."""
    if count := history.get("not_prepared"):
        yield f"prepared; {count} not taken: see left_out.csv"
    if count := history.get("in_train_too"):
        yield f"{counted(count, 'held-out recording')} {LEAKAGE_REMARK}"
    if count := history.get("held_out"):
        yield f"no validation.csv: {counted(count, 'recording')} of the training data held out"
    words = {"corrected": "corrected", "deleted": "left out", "blacklisted": "blacklisted", "protected": "protected"}
    patches = [f"{history[name]} {word}" for name, word in words.items() if history.get(name)]
    if patches:
        yield f"patches: {', '.join(patches)}; {program('data', 'patches', data.dataset_path, '--origin')}"
    if count := history.get("pseudo"):
        share = data.pseudo_share
        taken = f"at most {share_text(share)} of the training clips" if share else "none taken; set pseudo_share"
        yield f"pseudo.csv: {counted(count, 'text')} by a model; {taken}"


def _lines(table: Path) -> int:
    return len(read_table(table).rows) if table.is_file() else 0


def _columns(path: Path) -> list[str]:
    tables = [path] if path.is_file() else [file for end in _TABLES for file in sorted(path.glob(f"*{end}"))]
    names = {name for names in SPLITS.values() for name in names} | {"metadata"}
    tables = [table for table in tables if table.stem in names] or tables
    return list(read_table(tables[0]).columns) if tables else []


def _examples(clips: Sequence[Clip]) -> list[str]:
    """Return the texts of a few clips from all over the table."""
    return [clip.text for clip in clips[:: max(1, len(clips) // _EXAMPLES)][:_EXAMPLES]]


def _measure_recordings(splits: SpeechSplits) -> dict[str, Any]:
    """Read the headers: how long the recordings to train on are, and which of all cannot be read."""
    from speech.data.audio import duration_of  # 100 ms, not needed to read tables
    from speech.data.sound_file import AudioError

    train = splits.get("train", [])
    seconds, looked_at, broken = 0.0, 0, list[str]()
    clips = [*train, *(clip for split, others in splits.items() if split != "train" for clip in others)]
    for clip in _in_time(clips, PATIENCE):
        looked_at += 1
        if not isinstance(clip.audio, FileSource):
            continue
        try:
            length = duration_of(clip.audio.path)
        except AudioError as error:
            broken.append(f"{clip.audio.path}: {error}")
        else:
            seconds += length if looked_at <= len(train) else 0.0
    return {
        "hours": seconds * len(train) / max(1, min(looked_at, len(train))) / 3600,
        "looked_at": looked_at,
        "broken": broken[:SHOWN_BROKEN],
        "broken_count": len(broken),
        "repair": REPAIR_HINT,
    }


def _refuse_languages(profile: Profile, splits: SpeechSplits) -> None:
    """Refuse languages that the model does not have, as far as tables and the model's folder tell.

    Raises:
        BadInput: settings or clips name some; the option or line is in the message.
    """
    settings = {"language": [profile.model.language], "languages": profile.data.languages.split(",")}
    named = {name.strip(): option for option, names in settings.items() for name in names}
    spoken = {clip.language: clip.location for clips in splits.values() for clip in reversed(clips)}
    origins = {**{name: f"{where}, column language" for name, where in spoken.items()}, **named}
    supported = _languages_of(profile.model)
    for name, origin in origins.items():
        code = language_code(name, origin) if name not in ("", AUTO_LANGUAGE, EVERY_LANGUAGE) else ""
        if code and supported and code not in supported:
            message = f"{origin}: model {profile.model.model_path} has no language {code!r}"
            raise BadInput(message, f"it has: {', '.join(sorted(supported))}")


def _languages_of(model: ModelSettings) -> set[str]:
    """Return the languages of a multilingual Whisper; empty if its folder is not here or does not say."""
    folder = model_folder(model.model_path or model.teacher_path)
    try:
        config = json.loads((folder / "generation_config.json").read_bytes()) if folder is not None else {}
        return {token.strip("<|>") for token in config["lang_to_id"]} if config.get("is_multilingual", True) else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()


def _refuse_long(profile: Profile, splits: SpeechSplits) -> None:
    """Refuse clips that are longer than the model's window, as far as tables and headers tell: training would decode
    them all first. Nothing is refused where clips of other languages may still be left out.

    Raises:
        BadInput: there are some, and the settings neither cut nor skip them.
    """
    data, window = profile.data, _window(profile.model)
    if data.long_audio != "refuse" or data.languages != EVERY_LANGUAGE or window is None:
        return
    for split, clips in splits.items():
        limit = data.max_train_samples if split == "train" else data.max_eval_samples
        looked_at = _in_time(clips[: limit or None], _SHORT_PATIENCE)
        long = [clip for clip in looked_at if (_length(clip) or 0.0) > window + _HEADERS_ERR]
        if long:
            raise long_clip_error(long, too_long_for(window), window, data.dataset_path, profile.model.language)


def _window(model: ModelSettings) -> float | None:
    """Return the seconds that a Whisper hears; ``None`` if its folder is not here or does not say."""
    name = model.model_path or model.teacher_path
    folder = model_folder(name)
    if folder is None and name.startswith(_PUBLISHED):
        return PUBLISHED_WINDOW
    try:
        config = json.loads((folder / "preprocessor_config.json").read_bytes()) if folder is not None else {}
        return float(config["chunk_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Longest:
    """The longest sound and the longest text among the samples."""

    seconds: float
    """Of sound."""
    tokens: int
    """Of a text with its prompt, estimated."""


def longest_clip(data: DataSettings) -> Longest | None:
    """Return the longest training clip; ``None`` if it is unknown: a data set on the hub, one that cannot be read, or
    too many files to read all headers in time."""
    if not data.dataset_path or is_on_hub(data.dataset_path) or data.pseudo_share:
        return None
    path = Path(data.dataset_path).expanduser()
    try:
        files = [path] if path.is_file() else [file for end in _TABLES for file in path.glob(f"*{end}")]
        stamp = max((file.stat().st_mtime_ns for file in files), default=0)
        return _longest(data.dataset_path, data.text_column, data.max_train_samples, stamp)
    except (BadInput, OSError, ImportError):  # a light core reads no headers
        return None  # reading the data set for training reports why


@lru_cache(maxsize=8)
def _longest(path: str, text_column: str, limit: int, stamp: int) -> Longest | None:
    clips = read_speech(path, text_column).get("train", [])[: limit or None]
    seconds = _seconds(clips)
    if not clips or seconds is None:
        return None
    return Longest(seconds, max(len(clip.text.encode()) for clip in clips) // _BYTES_A_TOKEN + _PROMPT)


def _seconds(clips: Sequence[Clip]) -> float | None:
    lengths = map(_length, _in_time(clips, _SHORT_PATIENCE))
    known_lengths = [length for length in lengths if length is not None]
    return max(known_lengths, default=0.0) if len(known_lengths) == len(clips) else None


def _in_time(clips: Sequence[Clip], seconds: float) -> Iterator[Clip]:
    """Yield the clips that can be looked at within so many seconds."""
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() <= end, clips)


def _length(clip: Clip) -> float | None:
    """Return how long a clip is by its table or its file's header, 0 for a broken file: it is left out."""
    if clip.duration is not None:
        return clip.duration
    return _of_header(clip.audio.path, clip.audio.stamp()) if isinstance(clip.audio, FileSource) else None


@lru_cache(maxsize=1 << 17)
def _of_header(path: Path, stamp: str) -> float:
    from speech.data.audio import duration_of  # which tables with a column for it do without
    from speech.data.sound_file import AudioError

    try:
        return duration_of(path)
    except AudioError:
        return 0.0
