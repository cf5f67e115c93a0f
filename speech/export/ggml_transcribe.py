"""Transcribe with whisper.cpp: ``python -m speech.export.ggml_transcribe FILE LANGUAGES``.

Reads audio on stdin and writes JSON on stdout. The audio is float32 at 16 kHz, one window of 30 s per language
(comma-separated). Decoding is greedy, without timestamps, temperature fallback or segments.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from pywhispercpp.model import Model


def main(file: str, languages: list[str]) -> list[str]:
    """Return one transcript per window."""
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
