"""Which languages clips are in: as their table says, as a person says, or as a model hears them."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from profiles.counts import counted
from profiles.errors import BadInput
from profiles.schema import EVERY_LANGUAGE
from training.memory import give_back
from training.tasks.base import Progress
from training.tasks.cache import digest, get_or_build, key_of_files
from training.tasks.features import FeatureStore
from training.tasks.whisper_model import WhisperModelWrapper
from training.tasks.whisper_prompt import language_code

logger = logging.getLogger("muster.data")

_BATCH = 8  # clips that the model listens to at once


def wanted_languages(setting: str) -> frozenset[str] | None:
    """Return the codes in a list by comma; ``None`` where all languages are wanted.

    Raises:
        BadInput: Whisper does not know one of them.
    """
    names = [name.strip() for name in setting.split(",") if name.strip()]
    if not names or EVERY_LANGUAGE in names:
        return None
    return frozenset(language_code(name, "languages") for name in names)


def heard_languages(
    wrapper: WhisperModelWrapper,
    store: FeatureStore,
    positions: Sequence[int],
    device: torch.device,
    root: Path,
    progress: Progress,
) -> list[str]:
    """Return the codes of what a model hears in each clip; it listens once, and the answer is kept below ``root``.

    Args:
        positions: of the clips in ``store``.

    Raises:
        BadInput: the model is untrained and cannot tell, or cannot be read.
    """
    if not wrapper.is_multilingual:
        return ["en"] * len(positions)
    if wrapper.settings.from_scratch:
        raise BadInput("a model from scratch cannot tell the language", "set language, or add a column 'language'")

    def listen(folder: Path) -> None:
        codes = _listen(wrapper, store, positions, device, progress)
        (folder / "languages.json").write_text(json.dumps(codes), encoding="utf-8")

    key = digest([key_of_files(root, wrapper.files()), store.key, json.dumps(list(positions))])
    found: list[str] = json.loads((get_or_build(root / "languages", key, listen) / "languages.json").read_text("utf-8"))
    heard = ", ".join(f"{code} in {count}" for code, count in Counter(found).most_common())
    logger.warning("language = auto: of %s without a language the model hears %s", counted(len(found), "clip"), heard)
    return found


@torch.no_grad()
def _listen(
    wrapper: WhisperModelWrapper,
    store: FeatureStore,
    positions: Sequence[int],
    device: torch.device,
    progress: Progress,
) -> list[str]:
    model, codes = wrapper.build().eval().to(device), list[str]()
    for start in range(0, len(positions), _BATCH):
        progress("languages", start, len(positions))
        clips = [torch.from_numpy(store[position]) for position in positions[start : start + _BATCH]]
        codes += wrapper.detect_languages(model, wrapper.hear(model, torch.stack(clips).to(device)))
    progress("languages", len(positions), len(positions))
    del model
    give_back(device)
    return codes
