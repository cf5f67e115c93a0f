"""A Whisper that learns from another one, and from the transcripts.

The loss of a token is ``alpha * cross entropy + (1 - alpha) * T^2 * KL(teacher || student)``, both distributions at the
temperature ``T`` (Hinton et al. 2015, arXiv 1503.02531, section 2; per token and for Whisper: Gandhi et al. 2023,
arXiv 2311.00430, section 3, whose weights 1 and 0.8 are ``alpha`` = 0.56). It is a mean over the tokens of the
transcripts, like the cross entropy alone.

Where nothing random stands before the teacher (``augmentation`` = 0) and samples are seen more than once, it is asked
once, before training, and its answers are kept in the cache; else it answers in every step, without gradients. Of every
token the likeliest :data:`TOP` are kept and the mass of all others together: with Whisper's 51,865 tokens that is
258 bytes instead of 104 kB. What is lost by it is only how the others share their mass.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from profiles.errors import BadInput
from profiles.schema import Profile
from training.device import Precision, give_back, select_precision
from training.tasks.base import Batch, Progress
from training.tasks.cache import cache_root, digest, get_or_build, key_of_files
from training.tasks.packing import unpacked
from training.tasks.whisper.model import IGNORED, WhisperModelWrapper
from training.tasks.whisper.samples import SpeechData, SpeechSample
from training.tasks.whisper.task import WhisperTask

TOP = 64
"""Tokens that are kept by name."""
_FILE = "outputs.bin"
_LEAST = -100.0
"""Logarithm of what counts as no probability."""
logger = logging.getLogger("muster.data")

_VERSION = 1
_ASKED = ("input_features", "decoder_input_ids", "labels")
"""What of a batch a teacher takes."""


class Soft(NamedTuple):
    """A teacher's probabilities at some temperature, as logarithms."""

    top: torch.Tensor
    """[tokens, k]: of the likeliest, fp16"""
    indices: torch.Tensor
    """[tokens, k]: which these are, int64"""
    tail: torch.Tensor
    """[tokens]: of all others together, fp16"""


def soften(logits: torch.Tensor, temperature: float, count: int = TOP) -> Soft:
    """Return what is kept of ``logits`` [tokens, vocabulary] at a temperature."""
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    top, indices = scaled.topk(min(count, scaled.shape[-1]), dim=-1)
    others = scaled.scatter(-1, indices, -torch.inf).logsumexp(-1)
    return Soft(top.clamp(min=_LEAST).half(), indices, others.clamp(min=_LEAST).half())


def divergence(soft: Soft, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return KL(teacher || student) of each token [tokens] at a temperature, never negative.

    The tokens that the teacher does not name count as one. With all of them named it is the divergence itself, else at
    most that (the log sum inequality).

    Args:
        logits: the student's [tokens, vocabulary].
    """
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    named = scaled.gather(-1, soft.indices)
    teacher_scores = torch.cat(
        [soft.top.float(), soft.tail.float()[:, None]], dim=-1
    )  # autocast on a processor refuses fp16
    target = teacher_scores.log_softmax(-1)  # a sum of 1, but for rounding
    if named.shape[-1] == scaled.shape[-1]:
        return (target[:, :-1].exp() * (target[:, :-1] - named)).sum(-1)
    others = scaled.scatter(-1, soft.indices, -torch.inf).logsumexp(-1, keepdim=True)
    return (target.exp() * (target - torch.cat([named, others], dim=-1))).sum(-1)


class TeacherOutputs:
    """A teacher's :class:`Soft` of every token of many clips.

    Args:
        folder: what :func:`write_outputs` has filled.
        tokens: of each clip, in the same order.
        vocabulary: tokens that there are.
    """

    def __init__(self, folder: Path, tokens: Sequence[int], vocabulary: int) -> None:
        self._ends = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64)
        shape = (int(self._ends[-1]),)
        self._data: Any = np.memmap(folder / _FILE, _row(vocabulary), "r", shape=shape)

    def of(self, clips: Sequence[int]) -> Soft:
        """Return what is kept of the tokens of some clips, one after another."""
        rows = np.concatenate([self._data[self._ends[clip] : self._ends[clip + 1]] for clip in clips])
        top, others = (torch.from_numpy(np.ascontiguousarray(rows[name])) for name in ("top", "tail"))
        return Soft(top, torch.from_numpy(rows["indices"].astype(np.int64)), others)


def write_outputs(folder: Path, batches: Iterator[Soft], vocabulary: int, report: Callable[[int], None]) -> None:
    """Write what a teacher says of some clips after another; ``report`` takes how many parts are written."""
    report(0)
    with (folder / _FILE).open("wb") as file:
        for number, soft in enumerate(batches):
            rows = np.empty(len(soft.tail), _row(vocabulary))
            for name, values in zip(("top", "indices", "tail"), soft, strict=True):
                rows[name] = values.cpu().numpy()
            file.write(rows.tobytes())
            report(number + 1)


def _row(vocabulary: int) -> np.dtype[Any]:
    """Type of what is kept of one token."""
    count, index = min(TOP, vocabulary), np.uint16 if vocabulary <= 1 << 16 else np.uint32
    return np.dtype([("top", np.float16, (count,)), ("indices", index, (count,)), ("tail", np.float16)])


def distillation_loss(
    cross_entropy: torch.Tensor, logits: torch.Tensor, soft: Soft, alpha: float, temperature: float
) -> torch.Tensor:
    """Return the scalar loss of a student (Hinton et al. 2015, section 2).

    Args:
        cross_entropy: scalar, mean over the tokens.
        logits: the student's [tokens, vocabulary], without padding and prompt.
        soft: the teacher's opinion of the same tokens.
        alpha: share of the cross entropy, 0 to 1.
        temperature: ``T``; the divergence's gradients shrink with its square, which the factor makes up for.
    """
    kl = divergence(soft, logits, temperature).mean()
    return alpha * cross_entropy + (1 - alpha) * temperature**2 * kl


class DistillationTask(WhisperTask):
    """Speech recognition learned from a teacher; the metrics are those of any Whisper, the loss in evaluations too."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        settings = profile.model
        source = {"model_path": settings.teacher_path, "teacher_path": "", "encoder_path": "", "student_layers": 0}
        frozen = {"tuning": "full", "from_scratch": False, "gradient_checkpointing": False, "freeze_encoder": False,
                  "base_precision": "fp32"}  # fmt: skip
        self.teacher = WhisperModelWrapper(settings.model_copy(update={**source, **frozen}))
        _check_alike(self.wrapper, self.teacher)
        self._outputs: TeacherOutputs | None = None
        self._live: nn.Module | None = None

    @property
    def listener(self) -> WhisperModelWrapper:
        return self.teacher

    @property
    def hears_alike(self) -> bool:
        """Whether the student's encoder is and stays the teacher's."""
        settings = self.profile.model
        untouched = settings.freeze_encoder and not settings.from_scratch and not settings.encoder_path
        return untouched and settings.model_path == settings.teacher_path

    def prepare(self, progress: Progress) -> None:
        super().prepare(progress)
        self._ask_ahead(progress)

    def prepare_some(self, progress: Progress, limit: int) -> int:
        count = super().prepare_some(progress, limit)
        self._ask_ahead(progress)
        return count

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self._outputs is None and self._live is None:
            self._live = self._build_teacher()
        return model

    def _build_teacher(self) -> nn.Module:
        return self.teacher.build().requires_grad_(False).eval().to(self.device)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the teacher's files."""
        return key_of_files(cache_root(self.profile.data.cache_dir), self.teacher.files())

    def table(self, split: str) -> str:
        return f"{super().table(split)}+{self.fingerprint}"

    # ------------------------------------------------------------------------------------------------ asked once

    def _ask_ahead(self, progress: Progress) -> None:
        """Ask the teacher about all training clips, or find what it said."""
        if not self.profile.asks_teacher_once:
            logger.info("the teacher runs in every step: samples change between epochs, or each is seen only once")
            return
        data = self.train
        if not self.default_language and not all(data.languages):
            self.ensure_language(self._build_teacher(), data)
        root, waiting = cache_root(self.profile.data.cache_dir), "the teacher's answers"

        def wait() -> None:
            progress(f"{waiting}: waiting for another worker", 0, len(data))

        folder = get_or_build(root / "teachers", self._key(data), lambda at: self._ask_all(data, at, progress), wait)
        self._outputs = TeacherOutputs(folder, list(map(len, data.tokens)), self.teacher.config.vocab_size)
        logger.info("the teacher's outputs were computed once and are kept in %s", folder)

    def _key(self, data: SpeechData) -> str:
        """Name of what the teacher says: by its weights, the sounds, the tokens and their prompts."""
        texts = [[*self.teacher.prompt(code or self.default_language), 0, *tokens]
                 for code, tokens in zip(data.languages, data.tokens, strict=True)]  # fmt: skip
        settings = [_VERSION, TOP, self.profile.model.distill_temperature, str(self._precision().dtype)]
        return digest([self.fingerprint, data.store.key, json.dumps([settings, data.positions, texts])])

    def _ask_all(self, data: SpeechData, folder: Path, progress: Progress) -> None:
        size = self.profile.training.batch_size

        def answers() -> Iterator[Soft]:
            teacher = self._build_teacher()
            for start in range(0, len(data), size):
                samples = [data[index] for index in range(start, min(start + size, len(data)))]
                collated = self.collate(samples, None)
                batch = {name: collated[name].to(self.device) for name in _ASKED}
                with self._precision().autocast():
                    yield self._answer(teacher, batch, self.teacher.hear(teacher, batch["input_features"]))

        def report(batches: int) -> None:
            progress("the teacher's answers", min(batches * size, len(data)), len(data))

        with torch.no_grad():
            write_outputs(folder, answers(), self.teacher.config.vocab_size, report)
        give_back(self.device)

    def _precision(self) -> Precision:
        return Precision(select_precision(self.profile.training.mixed_precision, self.device), self.device)

    # ------------------------------------------------------------------------------------------------- each step

    def collate(self, samples: Sequence[SpeechSample], rngs: Sequence[np.random.Generator] | None) -> Batch:
        batch = super().collate(samples, rngs)
        if rngs is None or self._outputs is None:
            return batch
        return {**batch, "teacher": self._outputs.of([sample.index for sample in samples])}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        heard, soft = self._ask(batch)
        if heard is None:
            heard = self.hear_to_train(model, batch)
        text = {name: batch[name] for name in ("decoder_input_ids", "labels")}
        with unpacked():
            output = model(encoder_outputs=heard, **text, use_cache=False)
        settings, logits = self.profile.model, output.logits[batch["labels"] != IGNORED]
        return distillation_loss(output.loss, logits, soft, settings.distill_alpha, settings.distill_temperature)

    @torch.no_grad()
    def _ask(self, batch: Batch) -> tuple[Any, Soft]:
        """Return what the student hears, where that is what the teacher hears, and what the teacher says of it."""
        if "teacher" in batch:
            return None, batch["teacher"]
        assert self._live is not None
        heard = self.teacher.hear(self._live, batch["input_features"])
        return heard if self.hears_alike else None, self._answer(self._live, batch, heard)

    def _answer(self, teacher: nn.Module, batch: Batch, heard: Any) -> Soft:
        """Ask about each token of the transcripts."""
        inputs = batch["decoder_input_ids"]
        with unpacked():
            logits = teacher(encoder_outputs=heard, decoder_input_ids=inputs, use_cache=False).logits
        return soften(logits[batch["labels"] != IGNORED], self.profile.model.distill_temperature)


def _check_alike(student: WhisperModelWrapper, teacher: WhisperModelWrapper) -> None:
    """Refuse a teacher whose words cannot be compared with the student's.

    Raises:
        BadInput: they write other tokens, begin a text otherwise, or hear in another way.
    """
    hint = "take a teacher and a student of one family (both English-only, or both multilingual)"
    pair = f"teacher {teacher.path} and student {student.path}"
    if student.config.vocab_size != teacher.config.vocab_size:
        sizes = f"{teacher.config.vocab_size} and {student.config.vocab_size}"
        raise BadInput(f"{pair} use different tokens: their vocabularies have {sizes}", hint)
    if student.tokenizer.get_vocab() != teacher.tokenizer.get_vocab():
        raise BadInput(f"{pair} use different tokens: their tokenizers differ", hint)
    if student.prompts() != teacher.prompts():
        raise BadInput(f"{pair} begin a text with different tokens", hint)
    if student.log_mel.fingerprint() != teacher.log_mel.fingerprint():
        mels = f"{teacher.log_mel.mels} and {student.log_mel.mels} mels"
        seconds = f"{teacher.log_mel.seconds:g} and {student.log_mel.seconds:g} s"
        raise BadInput(
            f"{pair} use different audio features: {mels}, {seconds}", "take models with one feature extractor"
        )
