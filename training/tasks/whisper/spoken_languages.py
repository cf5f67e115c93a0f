"""Which languages clips are in, as a multilingual Whisper hears them: its own detection on their first window."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from profiles.counts import counted
from profiles.errors import BadInput
from training.device import give_back
from training.runs import find_model
from training.tasks.audio import decode
from training.tasks.base import Progress
from training.tasks.cache import digest, get_or_build, key_of_files
from training.tasks.speech_dataset import looks_like_path
from training.tasks.whisper.languages import language_code
from training.tasks.whisper.listening import Listener
from training.tasks.whisper.model import WhisperModelWrapper
from training.tasks.whisper.samples import FeatureStore

logger = logging.getLogger("muster.data")

_BATCH = 8  # clips that the model listens to at once


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

    @torch.no_grad()
    def listen(folder: Path) -> None:
        model, codes = wrapper.build().eval().to(device), list[str]()
        for start in range(0, len(positions), _BATCH):
            progress("languages", start, len(positions))
            clips = [torch.from_numpy(store[position]) for position in positions[start : start + _BATCH]]
            codes += wrapper.detect_languages(model, wrapper.hear(model, torch.stack(clips).to(device)))
        progress("languages", len(positions), len(positions))
        del model
        give_back(device)
        (folder / "languages.json").write_text(json.dumps(codes), encoding="utf-8")

    key = digest([key_of_files(root, wrapper.files()), store.key, json.dumps(list(positions))])
    found: list[str] = json.loads((get_or_build(root / "languages", key, listen) / "languages.json").read_text("utf-8"))
    heard = ", ".join(f"{code} in {count}" for code, count in Counter(found).most_common())
    logger.warning("language = auto: of %s without a language the model hears %s", counted(len(found), "clip"), heard)
    return found


class ModelEar(Listener):
    """A multilingual Whisper that tells languages.

    Args:
        reference: model folder, run, profile or hub name.
        output: folder of the run folders.

    Raises:
        BadInput: the model cannot be found or used, or knows one language only.
    """

    def __init__(self, reference: str, output: Path, device: str = "auto") -> None:
        on_hub = reference.count("/") == 1 and not looks_like_path(reference) and not Path(reference).exists()
        folder = reference if on_hub else str(find_model(output, reference))
        super().__init__(folder, device)
        if not self.wrapper.is_multilingual:
            raise BadInput(f"model {reference}: knows one language only", "languages are told by a multilingual model")
        files = sorted(Path(folder).glob("*.safetensors")) if Path(folder).is_dir() else []
        stamp = " ".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
        self.name = f"{folder} {hashlib.blake2b(stamp.encode(), digest_size=8).hexdigest()}"
        """What its answers are remembered by; it changes when the weights do."""

    @torch.no_grad()
    def languages(self, files: Sequence[Path]) -> list[str]:
        """Codes of the languages in the first window of sound files."""
        log_mel = self.wrapper.log_mel
        sounds = [decode(file, log_mel.rate, log_mel.seconds).samples for file in files]
        return self.wrapper.detect_languages(self.model, self.encode(sounds))

    def code(self, language: str) -> str:
        """The model's code of a language; empty if none is given or the model does not know it."""
        try:
            code = language_code(language) if language else ""
        except BadInput:
            return ""
        return code if f"<|{code}|>" in self.wrapper.generation.lang_to_id else ""
