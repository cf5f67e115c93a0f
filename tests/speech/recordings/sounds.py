"""Sounds that differ from each other, and tables of them."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import soundfile

RATE = 16_000


def tone(number: int, seconds: float = 0.5, rate: int = RATE, level: float = 0.3) -> np.ndarray:
    time = np.arange(round(seconds * rate)) / rate
    return (level * np.sin(2 * np.pi * (200 + 10 * number) * time)).astype(np.float32)


def write_tone(path: Path, number: int = 0, seconds: float = 0.5, rate: int = RATE, level: float = 0.3) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(number, seconds, rate, level), rate)
    return path


def wav_bytes(number: int = 0, seconds: float = 0.5) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, tone(number, seconds), RATE, format="WAV")
    return buffer.getvalue()


def write_rows(path: Path, header: str, rows: list[tuple[object, ...]], delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        writer.writerow(header.split(","))
        writer.writerows(rows)
    return path


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
