"""Knowledge distillation: a Whisper that learns from a teacher and from the transcripts.

The loss of a token is ``alpha * cross entropy + (1 - alpha) * T^2 * KL(teacher || student)``, both distributions at the
temperature ``T`` (Hinton et al. 2015, arXiv 1503.02531, section 2; per token and for Whisper: Gandhi et al. 2023,
arXiv 2311.00430, section 3, whose weights 1 and 0.8 are ``alpha`` = 0.56). It is a mean over the tokens of the
transcripts, like the cross entropy alone.

If the teacher's inputs are not random (``augmentation`` = 0) and samples are seen more than once, its outputs are
computed once before training, and cached; otherwise it runs in every step, without gradients. For every token the
:data:`TOP` likeliest are stored, and the total probability of all others: with Whisper's 51,865 tokens that is
258 bytes instead of 104 kB. Only the distribution among the others is lost.
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
from profiles.quantities import span_text
from profiles.schema import Profile
from speech.whisper.model import IGNORED, WhisperModelWrapper
from speech.whisper.samples import SpeechData, SpeechSample
from speech.whisper.task import WhisperTask
from training.hardware.device import Precision, release_memory, select_precision
from training.tasks.base import Batch, Progress
from training.tasks.cache import cache_root, digest, get_or_build, key_of_files
from training.tasks.text.packing import unpacked

TOP = 64
"""Number of likeliest tokens that are stored individually."""
_FILE = "outputs.bin"
_MIN_LOG_PROBABILITY = -100.0
"""Log probability that counts as zero."""
logger = logging.getLogger("muster.data")

_VERSION = 1
_TEACHER_INPUTS = ("input_features", "decoder_input_ids", "labels")
"""Entries of a batch that the teacher needs."""


class SoftTargets(NamedTuple):
    """A teacher's log probabilities at some temperature."""

    top: torch.Tensor
    """[tokens, k]: of the likeliest tokens, fp16"""
    indices: torch.Tensor
    """[tokens, k]: ids of these, int64"""
    tail: torch.Tensor
    """[tokens]: of all other tokens together, fp16"""


def soft_targets(logits: torch.Tensor, temperature: float, count: int = TOP) -> SoftTargets:
    """Return the soft targets of ``logits`` [tokens, vocabulary] at a temperature."""
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    top, indices = scaled.topk(min(count, scaled.shape[-1]), dim=-1)
    others = scaled.scatter(-1, indices, -torch.inf).logsumexp(-1)
    return SoftTargets(
        top.clamp(min=_MIN_LOG_PROBABILITY).half(), indices, others.clamp(min=_MIN_LOG_PROBABILITY).half()
    )


def divergence(soft: SoftTargets, logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return KL(teacher || student) of each token [tokens] at a temperature, never negative.

    All tokens that are not stored individually count as one. If all are stored it is the exact divergence, else a lower
    bound (by the log sum inequality).

    Args:
        logits: the student's [tokens, vocabulary].
    """
    scaled = torch.log_softmax(logits.float() / temperature, dim=-1)
    named = scaled.gather(-1, soft.indices)
    teacher_scores = torch.cat([soft.top.float(), soft.tail.float()[:, None]], dim=-1)  # autocast on a CPU rejects fp16
    target = teacher_scores.log_softmax(-1)  # renormalised after rounding
    if named.shape[-1] == scaled.shape[-1]:
        return (target[:, :-1].exp() * (target[:, :-1] - named)).sum(-1)
    others = scaled.scatter(-1, soft.indices, -torch.inf).logsumexp(-1, keepdim=True)
    return (target.exp() * (target - torch.cat([named, others], dim=-1))).sum(-1)


class TeacherOutputs:
    """A teacher's stored :class:`SoftTargets` of every token of many clips.

    Args:
        folder: filled by :func:`write_outputs`.
        tokens: number of tokens of each clip, in the same order.
        vocabulary: vocabulary size.
    """

    def __init__(self, folder: Path, tokens: Sequence[int], vocabulary: int) -> None:
        self._ends = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int64)
        shape = (int(self._ends[-1]),)
        self._data: Any = np.memmap(folder / _FILE, _row(vocabulary), "r", shape=shape)

    def of(self, clips: Sequence[int]) -> SoftTargets:
        """Return the concatenated soft targets of some clips' tokens."""
        rows = np.concatenate([self._data[self._ends[clip] : self._ends[clip + 1]] for clip in clips])
        top, others = (torch.from_numpy(np.ascontiguousarray(rows[name])) for name in ("top", "tail"))
        return SoftTargets(top, torch.from_numpy(rows["indices"].astype(np.int64)), others)


def write_outputs(folder: Path, batches: Iterator[SoftTargets], vocabulary: int, report: Callable[[int], None]) -> None:
    """Write a teacher's soft targets batch by batch; ``report`` is called with the number of batches written."""
    report(0)
    with (folder / _FILE).open("wb") as file:
        for number, soft in enumerate(batches):
            rows = np.empty(len(soft.tail), _row(vocabulary))
            for name, values in zip(("top", "indices", "tail"), soft, strict=True):
                rows[name] = values.cpu().numpy()
            file.write(rows.tobytes())
            report(number + 1)


def _row(vocabulary: int) -> np.dtype[Any]:
    """Return the dtype of one token's stored soft targets."""
    count, index = min(TOP, vocabulary), np.uint16 if vocabulary <= 1 << 16 else np.uint32
    return np.dtype([("top", np.float16, (count,)), ("indices", index, (count,)), ("tail", np.float16)])


def distillation_loss(
    cross_entropy: torch.Tensor, logits: torch.Tensor, soft: SoftTargets, alpha: float, temperature: float
) -> torch.Tensor:
    """Return the scalar loss of a student (Hinton et al. 2015, section 2).

    Args:
        cross_entropy: scalar, mean over the tokens.
        logits: the student's [tokens, vocabulary], without padding and prompt.
        soft: the teacher's soft targets of the same tokens.
        alpha: weight of the cross entropy, 0 to 1.
        temperature: ``T``; the factor ``T^2`` compensates for the divergence's smaller gradients.
    """
    kl = divergence(soft, logits, temperature).mean()
    return alpha * cross_entropy + (1 - alpha) * temperature**2 * kl


class DistillationTask(WhisperTask):
    """Speech recognition distilled from a teacher; evaluations have the usual Whisper loss and metrics."""

    def __init__(self, profile: Profile) -> None:
        super().__init__(profile)
        settings = profile.model
        source = {"model_path": settings.teacher_path, "teacher_path": "", "encoder_path": "", "student_layers": 0}
        frozen = {"tuning": "full", "from_scratch": False, "gradient_checkpointing": False, "freeze_encoder": False,
                  "base_precision": "fp32"}  # fmt: skip
        self.teacher = WhisperModelWrapper(settings.model_copy(update={**source, **frozen}))
        _check_compatible(self.wrapper, self.teacher)
        self._outputs: TeacherOutputs | None = None
        self._teacher_model: nn.Module | None = None

    @property
    def language_detector(self) -> WhisperModelWrapper:
        return self.teacher

    @property
    def shares_encoder(self) -> bool:
        """Whether the student's encoder is, and remains, identical to the teacher's."""
        settings = self.profile.model
        untouched = settings.freeze_encoder and not settings.from_scratch and not settings.encoder_path
        return untouched and settings.model_path == settings.teacher_path

    def prepare(self, progress: Progress) -> None:
        super().prepare(progress)
        self._precompute(progress)

    def prepare_subset(self, progress: Progress, limit: int) -> int:
        count = super().prepare_subset(progress, limit)
        self._precompute(progress)
        return count

    def build_model(self) -> nn.Module:
        model = super().build_model()
        if self._outputs is None and self._teacher_model is None:
            self._teacher_model = self._build_teacher()
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

    def _precompute(self, progress: Progress) -> None:
        """Compute the teacher's outputs for all training clips, or find them in the cache."""
        if not self.profile.caches_teacher_outputs:
            logger.info("the teacher runs in every step: samples change between epochs, or each is seen only once")
            return
        data = self.train
        if not self.default_language and not all(data.languages):
            self.ensure_language(self._build_teacher(), data)
        root, waiting = cache_root(self.profile.data.cache_dir), "the teacher's answers"

        def wait() -> None:
            progress(f"waiting for another worker: {waiting}", 0, len(data))

        folder = get_or_build(
            root / "teachers", self._key(data), lambda at: self._write_teacher_outputs(data, at, progress), wait
        )
        self._outputs = TeacherOutputs(folder, list(map(len, data.tokens)), self.teacher.config.vocab_size)
        logger.info("the teacher's outputs were computed once and are kept in %s", folder)

    def _key(self, data: SpeechData) -> str:
        """Return the cache key of the teacher's outputs: its weights, the audio, the tokens and their prompts."""
        texts = [[*self.teacher.prompt(code or self.default_language), 0, *tokens]
                 for code, tokens in zip(data.languages, data.tokens, strict=True)]  # fmt: skip
        settings = [_VERSION, TOP, self.profile.model.distill_temperature, str(self._precision().dtype)]
        return digest([self.fingerprint, data.store.key, json.dumps([settings, data.positions, texts])])

    def _write_teacher_outputs(self, data: SpeechData, folder: Path, progress: Progress) -> None:
        size = self.profile.training.batch_size

        def answers() -> Iterator[SoftTargets]:
            teacher = self._build_teacher()
            for start in range(0, len(data), size):
                samples = [data[index] for index in range(start, min(start + size, len(data)))]
                collated = self.collate(samples, None)
                batch = {name: collated[name].to(self.device) for name in _TEACHER_INPUTS}
                with self._precision().autocast():
                    yield self._teacher_targets(
                        teacher, batch, self.teacher.encode_audio(teacher, batch["input_features"])
                    )

        def report(batches: int) -> None:
            progress("the teacher's answers", min(batches * size, len(data)), len(data))

        with torch.no_grad():
            write_outputs(folder, answers(), self.teacher.config.vocab_size, report)
        release_memory(self.device)

    def _precision(self) -> Precision:
        return Precision(select_precision(self.profile.training.mixed_precision, self.device), self.device)

    # ------------------------------------------------------------------------------------------------- each step

    def collate(self, samples: Sequence[SpeechSample], rngs: Sequence[np.random.Generator] | None) -> Batch:
        batch = super().collate(samples, rngs)
        if rngs is None or self._outputs is None:
            return batch
        return {**batch, "teacher": self._outputs.of([sample.index for sample in samples])}

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        encoded, soft = self._teacher_outputs(batch)
        if encoded is None:
            encoded = self.encode_for_training(model, batch)
        text = {name: batch[name] for name in ("decoder_input_ids", "labels")}
        with unpacked():
            output = model(encoder_outputs=encoded, **text, use_cache=False)
        settings, logits = self.profile.model, output.logits[batch["labels"] != IGNORED]
        return distillation_loss(output.loss, logits, soft, settings.distill_alpha, settings.distill_temperature)

    @torch.no_grad()
    def _teacher_outputs(self, batch: Batch) -> tuple[Any, SoftTargets]:
        """Return the encoder's output if the student shares it (else ``None``), and the teacher's soft targets."""
        if "teacher" in batch:
            return None, batch["teacher"]
        assert self._teacher_model is not None
        encoded = self.teacher.encode_audio(self._teacher_model, batch["input_features"])
        return encoded if self.shares_encoder else None, self._teacher_targets(self._teacher_model, batch, encoded)

    def _teacher_targets(self, teacher: nn.Module, batch: Batch, encoded: Any) -> SoftTargets:
        """Run the teacher's decoder, and return the soft targets of all transcript tokens."""
        inputs = batch["decoder_input_ids"]
        with unpacked():
            logits = teacher(encoder_outputs=encoded, decoder_input_ids=inputs, use_cache=False).logits
        return soft_targets(logits[batch["labels"] != IGNORED], self.profile.model.distill_temperature)


def _check_compatible(student: WhisperModelWrapper, teacher: WhisperModelWrapper) -> None:
    """Reject a teacher whose outputs are not comparable with the student's.

    Raises:
        BadInput: vocabulary, prompts or audio features differ.
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
        seconds = f"{span_text(teacher.log_mel.seconds)} and {span_text(student.log_mel.seconds)}"
        raise BadInput(
            f"{pair} use different audio features: {mels}, {seconds}", "take models with one feature extractor"
        )
