"""Synthetic voices for data sets: who speaks in which split, synthesizers, and how a clip is recorded.

A voice is one timbre: an espeak-ng variant in one accent, or a recorded person's voice (flite, festival, SVOX Pico)
with its vocal tract made longer or shorter by resampling. No variant, family of variants or person is in two splits: a
draw decides who is in which, and one person is in the test split alone. Every clip has its own random generator, seeded
by its id, so the same versions of the packages give the same clips.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path

import numpy as np
import soundfile
import soxr

RATE = 16_000

ACCENTS = "en-us en-gb en-us".split()
"""Voices in other accents (Caribbean, Scottish, West Midlands, ...) were recognised far worse in trials."""

VARIANTS = (
    "Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Michael Mike Nguyen "
    "RicishayMax RicishayMax2 RicishayMax3 adam anika antonio aunty belinda benjamin boris caleb david ed edward "
    "edward2 f1 f2 f3 f4 f5 grandma grandpa gustave iven iven2 iven3 iven4 john kaukovalta klatt klatt2 klatt3 klatt4 "
    "klatt5 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel norbert pablo paul pedro quincy rob robert "
    "robosoft robosoft2 robosoft7 sandro shelby steph steph2 steph3 travis victor zac"
).split()
"""espeak-ng's voices but for the whispering, croaking and effect ones."""

SPEAKERS: dict[str, dict[str, tuple[float, ...]]] = {
    "slt": {"flite-slt": (0.88, 0.94, 1.0, 1.06, 1.12), "festival-slt": (0.86, 0.92, 1.0, 1.08, 1.14)},
    "awb": {"flite-awb": (0.9, 0.96, 1.0, 1.05, 1.1, 1.16)},
    "kal": {"flite-kal16": (0.92, 1.0, 1.08, 1.16), "festival-kal": (0.9, 0.97, 1.04, 1.12)},
    "rms": {"flite-rms": (0.9, 0.95, 1.0, 1.06, 1.12)},
    "ked": {"festival-ked": (0.9, 0.95, 1.0, 1.06, 1.12)},
    "lh0": {"pico-US": (0.88, 0.94, 1.0, 1.06, 1.12)},
    "kh0": {"pico-GB": (0.88, 0.94, 1.0, 1.06, 1.12)},
}
"""Recorded people by name: their voices in each synthesizer, with vocal-tract factors: above 1 the formants are
higher, as of a shorter vocal tract."""

TEST_VARIANTS, VALIDATION_VARIANTS = 14, 8
"""At least so many of espeak-ng's voices: the last family is taken whole."""

DRAW = "2026-11-21"
"""Seed of the one draw of voices for the splits. It was made once, before any training on it: to draw again because of
a result would make the test split part of the training."""


def draw_order(names: Iterable[str]) -> list[str]:
    """Names in an order that depends on them and the draw's seed alone, whatever the versions of the libraries."""
    return sorted(names, key=lambda name: zlib.crc32(f"{DRAW} {name}".encode()))


def family(variant: str) -> str:
    """Variants that differ by a digit stay in one split: ``iven2`` with ``iven``; ``m1`` to ``f5`` are no family."""
    stem = variant.rstrip("0123456789")
    return stem if len(stem) > 1 else variant


def draw_variants() -> dict[str, list[str]]:
    """espeak-ng's voices by split, drawn by families."""
    splits: dict[str, list[str]] = {"test": [], "validation": [], "train": []}
    for name in draw_order({family(variant) for variant in VARIANTS}):
        split = (
            "test"
            if len(splits["test"]) < TEST_VARIANTS
            else "validation"
            if len(splits["validation"]) < VALIDATION_VARIANTS
            else "train"
        )
        splits[split] += [variant for variant in VARIANTS if family(variant) == name]
    return splits


def draw_speakers() -> dict[str, list[tuple[str, float]]]:
    """Voices and vocal-tract factors of recorded people by split: one person, drawn, is in the test split alone."""
    tested, *trained = draw_order(SPEAKERS)
    people = {"test": [tested], "validation": [], "train": sorted(trained)}
    return {
        split: [(voice, warp) for name in names for voice, warps in SPEAKERS[name].items() for warp in warps]
        for split, names in people.items()
    }


@dataclass(frozen=True)
class Clip:
    """One clip to make."""

    id: str
    split: str
    voice: str
    text: str
    warp: float
    pace: float
    pitch: float
    """From -1 (low) to 1 (high), within what suits the voice."""
    gap: int = 0
    """Pause between espeak-ng's words in units of 10 ms."""
    speech: np.ndarray = field(default_factory=lambda: np.zeros(0), compare=False)

    @property
    def rng(self) -> np.random.Generator:
        """Generator of this clip's recording conditions."""
        return np.random.default_rng(zlib.crc32(self.id.encode()))


def espeak_voices(split: str) -> list[str]:
    """Accent and variant by name; in training every other variant is used in two accents."""
    drawn = draw_variants()[split]
    variants = drawn + (drawn[::2] if split == "train" else [])
    return [f"espeak-{accent}+{variant}" for accent, variant in zip(cycle(ACCENTS), variants, strict=False)]


def speaker_of(voice: str) -> str:
    """Return who speaks: a recorded person, whatever the synthesizer or vocal tract, or an espeak-ng variant."""
    if voice.startswith("espeak"):
        return f"espeak-{voice.partition('+')[2]}"
    return next(name for name, voices in SPEAKERS.items() if any(voice.startswith(known) for known in voices))


def installed_voices() -> set[str]:
    """Return the voices of recorded people that can be spoken with here, and ``espeak`` if espeak-ng can."""
    found = {"espeak"} if shutil.which("espeak-ng") else set()
    if shutil.which("flite"):
        found |= {f"flite-{name}" for name in run(["flite", "-lv"]).partition(":")[2].split()}
    if shutil.which("festival"):
        said = run(["festival", "-b", "(print (voice.list))"])
        found |= {f"festival-{short}" for short, voice in FESTIVAL.items() if voice.removeprefix("voice_") in said}
    if importlib.util.find_spec("ttspico"):
        found |= {"pico-US", "pico-GB"}
    return found


def espeak(clips: Sequence[Clip], folder: Path) -> None:
    """Speak clips with espeak-ng."""

    def speak(clip: Clip) -> None:
        voice = clip.voice.removeprefix("espeak-")
        settings = ["-g", str(clip.gap), "-p", f"{50 + 25 * clip.pitch:.0f}", "-s", f"{160 * clip.pace:.0f}"]
        run(["espeak-ng", "-v", voice, *settings, "-w", str(folder / f"{clip.id}.wav"), clip.text])

    in_parallel(speak, clips)


def flite(clips: Sequence[Clip], folder: Path) -> None:
    """Speak clips with flite."""
    centres = {"slt": 165.0, "awb": 110.0, "kal16": 105.0, "rms": 95.0}

    def speak(clip: Clip) -> None:
        speaker = clip.voice.split("-")[1]
        pitch = f"int_f0_target_mean={centres[speaker] * 1.2**clip.pitch:.0f}"
        stretch = f"duration_stretch={clip.warp / clip.pace:.2f}"
        target = str(folder / f"{clip.id}.wav")
        run(["flite", "-voice", speaker, "--setf", pitch, "--setf", stretch, "-t", clip.text, "-o", target])

    in_parallel(speak, clips)


FESTIVAL = {"kal": "voice_kal_diphone", "ked": "voice_ked_diphone", "slt": "voice_cmu_us_slt_arctic_hts"}


def festival(clips: Sequence[Clip], folder: Path) -> None:
    """Speak clips with festival, all in one process."""
    lines = list[str]()
    if any(clip.voice.startswith("festival-slt") for clip in clips):
        lines += [f"({FESTIVAL['slt']})", "(set! hts_plain hts_engine_params)"]
    for clip in clips:
        text, pitch = clip.text.rstrip("."), 110 * 1.2**clip.pitch
        rate = f'\'(("-r" {clip.pace:.2f}) ("-fm" {3 * clip.pitch:.1f}))'
        tone = f"((target_f0_mean {pitch:.0f}) (target_f0_std 15) (model_f0_mean 170) (model_f0_std 34))"
        speaker = clip.voice.split("-")[1]
        lines += [
            f"({FESTIVAL[speaker]})",
            f"(set! hts_engine_params (append hts_plain {rate}))"
            if speaker == "slt"
            else f"(set! int_lr_params '{tone})",
            f"(Parameter.set 'Duration_Stretch {1.0 if speaker == 'slt' else clip.warp / clip.pace:.2f})",
            f'(utt.save.wave (utt.synth (Utterance Text "{text}.")) "{folder / clip.id}.wav")',
        ]
    script = folder / "speak.scm"
    script.write_text("\n".join(lines))
    run(["festival", "-b", str(script)])


def pico(clips: Sequence[Clip], folder: Path) -> None:
    """Speak clips with SVOX Pico, whose engine is loaded once a language."""
    import ttspico

    engines = {name: ttspico.TtsEngine(f"en-{name}") for name in {clip.voice.split("-")[1] for clip in clips}}
    for clip in clips:
        engine = engines[clip.voice.split("-")[1]]
        engine.rate, engine.pitch = round(100 * clip.pace / clip.warp), round(100 * 1.2**clip.pitch)
        speech = np.frombuffer(engine.speak(f"{clip.text.rstrip('.')}."), dtype=np.int16)
        soundfile.write(folder / f"{clip.id}.wav", speech, RATE)


def run(command: Sequence[str]) -> str:
    """Run a synthesizer and return what it prints, which is shown only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {done.stderr.strip()}")
    return done.stdout


def in_parallel(work: Callable[[Clip], object], clips: Sequence[Clip]) -> None:
    """Call ``work`` on every clip; the first error is raised."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(work, clips))


SYNTHESIZERS: dict[str, Callable[[Sequence[Clip], Path], None]] = {
    "espeak": espeak,
    "flite": flite,
    "festival": festival,
    "pico": pico,
}


def speak(clips: Sequence[Clip], longest: float) -> list[Clip]:
    """Return the clips with their speech; what takes more than ``longest`` seconds is spoken again, faster."""
    spoken: list[Clip] = []
    while clips:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for prefix, synthesizer in SYNTHESIZERS.items():
                if its_clips := [clip for clip in clips if clip.voice.startswith(prefix)]:
                    synthesizer(its_clips, folder)
            done = [replace(clip, speech=load_speech(folder / f"{clip.id}.wav", clip.warp)) for clip in clips]
        spoken += [clip for clip in done if len(clip.speech) <= longest * RATE]
        clips = [replace(clip, pace=clip.pace * 1.15) for clip in done if len(clip.speech) > longest * RATE]
    return sorted(spoken, key=lambda clip: clip.id)


def load_speech(path: Path, warp: float) -> np.ndarray:
    """Read speech at 16 kHz with peak 1, silence at both ends cut off, formants scaled by ``warp``."""
    samples, rate = soundfile.read(path, dtype="float32")
    samples = soxr.resample(samples, rate * warp, RATE)
    hop = RATE // 100
    frames = samples[: len(samples) // hop * hop].reshape(-1, hop)
    level = np.abs(frames).max(axis=1)
    loud = np.flatnonzero(level > 0.02 * level.max())
    speech: np.ndarray = samples[loud[0] * hop : (loud[-1] + 1) * hop]
    speech /= np.abs(speech).max()
    return speech


@dataclass(frozen=True)
class Room:
    """How clips are recorded."""

    noisy: float
    """Share of the clips with noise."""
    snr: tuple[float, float]
    """Least and greatest speech-to-noise ratio of these in dB."""
    echoing: float = 0.1
    """Share of the clips with reverberation."""


@dataclass(frozen=True)
class Recording:
    """A recorded clip."""

    samples: np.ndarray
    """At 16 kHz."""
    snr: float | None
    """Speech-to-noise ratio in dB; ``None`` without noise."""


def record(clip: Clip, others: Sequence[Clip], conditions: Room) -> Recording:
    """Put the speech into a room, with margins, noise or other people's babble, and a level."""
    rng, snr = clip.rng, None
    speech = reverberate(clip.speech, rng) if rng.random() < conditions.echoing else clip.speech
    before, after = (rng.integers(int(0.02 * RATE), int(0.07 * RATE)) for _ in range(2))
    room: np.ndarray = np.pad(speech, (before, after))
    if rng.random() < conditions.noisy:
        noise = make_noise(len(room), others, rng)
        snr = rng.uniform(*conditions.snr)
        room += noise * 10 ** (-snr / 20) * np.sqrt(np.mean(clip.speech**2) / max(np.mean(noise**2), 1e-9))
    room *= 10 ** (rng.uniform(-14, -1) / 20) / np.abs(room).max()
    return Recording(room, snr)


def reverberate(speech: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Convolve with a direct path and exponentially decaying noise (RT60 0.1 to 0.4 s)."""
    times = np.arange(int(0.2 * RATE)) / RATE
    tail = rng.standard_normal(len(times)) * 10 ** (-3 * times / rng.uniform(0.1, 0.4))
    response = tail * rng.uniform(0.2, 0.5) / np.sqrt(np.sum(tail**2))
    response[0] = 1.0
    return np.convolve(speech, response)[: len(speech)]


def make_noise(length: int, others: Sequence[Clip], rng: np.random.Generator) -> np.ndarray:
    """White noise, pink noise, or four other clips at once."""
    kind = rng.integers(3)
    if kind == 2:
        return sum((np.resize(others[i].speech, length) for i in rng.integers(len(others), size=4)), np.zeros(length))
    spectrum = np.fft.rfft(rng.standard_normal(length))
    if kind == 1:
        spectrum /= np.sqrt(np.arange(len(spectrum)) + 20)
    return np.fft.irfft(spectrum, length)
