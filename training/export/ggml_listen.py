"""What whisper.cpp hears: ``python -m training.export.ggml_listen FILE LANGUAGES`` with sound on stdin, JSON on stdout.

The sound is float32 at 16 kHz, one window of 30 s for each of the languages (divided by commas). Greedy texts, without
time stamps, fallbacks and segments.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from pywhispercpp.model import Model


def main(file: str, languages: list[str]) -> list[str]:
    """Return one text for each window."""
    sound = np.frombuffer(sys.stdin.buffer.read(), dtype=np.float32).reshape(len(languages), -1)
    settings: dict[str, Any] = {
        "no_timestamps": True,
        "single_segment": True,
        "temperature_inc": 0.0,
        "print_progress": False,
    }
    model = Model(file, redirect_whispercpp_logs_to=None, **settings)
    texts = []
    for window, language in zip(sound, languages):
        segments = model.transcribe(window.copy(), language=language)
        texts.append(" ".join(segment.text.strip() for segment in segments).strip())
    return texts


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2].split(","))))
