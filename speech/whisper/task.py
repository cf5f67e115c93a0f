"""Fine-tune Whisper on recordings with transcripts."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from profiles.errors import BadInput, counted
from profiles.quantities import share_text
from profiles.schema import AUTO_LANGUAGE, Profile
from speech.data.language_codes import language_code
from speech.data.speech_clips import REPAIR_HINT, Clip, first_of, list_clips, long_clip_error, too_long_for
from speech.data.speech_dataset import read_with_validation
from speech.scoring.clip_prediction import prediction_of
from speech.scoring.word_errors import ErrorRates, count_errors
from speech.whisper.decoding import generation_bound
from speech.whisper.encoder import EncoderCache, is_constant
from speech.whisper.features import Windows
from speech.whisper.languages import selected_languages
from speech.whisper.model import IGNORED, WhisperModelWrapper, unwrap
from speech.whisper.samples import (
    FeatureStore,
    SpeechData,
    SpeechSample,
    detect_clip_languages,
    open_features,
    window_batch,
)
from speech.whisper.suppression import allow_training_tokens
from training.hardware.device import evaluating
from training.tasks.base import Answer, Batch, Progress, StageMaker, Task
from training.tasks.cache import cache_root
from training.tasks.data_files.splits import SPEAKER_COLUMNS
from training.tasks.outputs.predictions import Prediction
from training.tasks.text.packing import unpacked

logger = logging.getLogger("muster.data")

_MAX_LISTED = 10  # broken clips that are logged individually
_DETECTION_CLIPS = 8  # clips for language detection if no language was given
_MIN_BF16_WIDTH = 384  # of Whisper tiny, the narrowest model measured with bf16 on a CPU


class NoUsableClips(BadInput):
    """No recording of a split can be used."""


class WhisperTask(Task):
    """Speech recognition (or translation) with Whisper; the loss is per transcript token, excluding the prompt."""

    name = "whisper"
    gains_from_compiling = True
    counts = Task.counts | {"word_edits", "words", "char_edits", "chars", "texts", "cut_texts"}
    uses_global_rng = False
    train: SpeechData
    evaluation: Mapping[str, SpeechData]

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.wrapper = WhisperModelWrapper(profile.model)
        log_mel = self.wrapper.log_mel
        setting = profile.data.window
        if setting == "auto" and profile.model.from_scratch:  # it must learn about long silence here
            setting = "full"
        self.windows = Windows(setting, log_mel.frames, log_mel.seconds)
        self.bf16_is_faster = self.wrapper.config.d_model >= _MIN_BF16_WIDTH
        self.monitor = "wer" if profile.evaluation.eval_generate else "loss"
        self.generates_text = profile.evaluation.eval_generate
        self.default_language = self.wrapper.default_language
        self.languages = selected_languages(profile.data.languages)
        self._rates = ErrorRates()
        self._encoded: EncoderCache | None = None
        self._caches_encoder = True

    def prepare(self, progress: Progress) -> None:
        ready = {split: self.prepare_split(split, clips, progress) for split, clips in self._clips().items()}
        self.evaluation = {split: data for split, data in ready.items() if split != "train"}
        self.train = ready["train"]
        self._require_language(ready["train"])
        if lifted := allow_training_tokens(self.wrapper.generation, self.train.tokens, self.wrapper.tokenizer):
            logger.warning("%s", lifted)

    def prepare_subset(self, progress: Progress, limit: int) -> int:
        splits = self._clips()
        clips = splits.pop("train")
        self.evaluation_sizes = {split: len(clips) for split, clips in splits.items()}
        sampled = self.prepare_split("train", clips[:: -(-len(clips) // limit)], progress)
        self.train, self.evaluation = sampled, {}
        self._require_language(sampled)
        return len(clips)

    def _clips(self) -> dict[str, list[Clip]]:
        """Read the tables; return the clips of each split that the settings select."""
        data = self.profile.data
        splits = read_with_validation(data.dataset_path, data.text_column, data.pseudo_share, not data.local_data)
        splits = {split: self._select_clips(split, clips) for split, clips in splits.items()}
        limits = {split: data.max_train_samples if split == "train" else data.max_eval_samples for split in splits}
        return {split: clips[: limits[split] or None] for split, clips in splits.items()}

    def prepare_split(self, split: str, clips: list[Clip], progress: Progress) -> SpeechData:
        """Compute or load the features of one split, and select its clips according to the settings.

        Raises:
            BadInput: too many broken files, clips or transcripts that are too long, or no clip is left.
        """
        data, window, max_tokens = self.profile.data, self.wrapper.log_mel.seconds, self.wrapper.text_positions
        languages = [self._language_of(clip) for clip in clips]
        too_long = too_long_for(window)
        if data.long_audio == "refuse":  # known from the column ``duration`` before hours of decoding
            self._drop_long(clips, [], {i for i, clip in enumerate(clips) if (clip.duration or 0) > window}, too_long)
        tokens = self.wrapper.tokenise([clip.text for clip in clips])
        long = {i for i, text in enumerate(tokens) if len(text) - 1 > max_tokens}
        too_wordy = f"with transcripts of more than {max_tokens} tokens"
        fitting = self._drop_long(clips, list(range(len(clips))), long, too_wordy)
        cache, phase = cache_root(data.cache_dir), f"preparing the recordings ({split})"
        store = open_features([c.audio for c in clips], self.wrapper.log_mel, cache, data.data_workers, progress, phase)
        self._check_broken(split, clips, store)
        positions = [i for i in fitting if i not in store.errors]
        long = {i for i in positions if store.seconds[i] > window + 1e-3}
        positions = self._drop_long(clips, positions, long, too_long)
        self._detect_languages(store, positions, languages, progress)
        selected = [i for i in positions if self.languages is None or languages[i] in {"", *self.languages}]
        if positions and not selected:
            raise self._nothing_selected(split, [languages[i] for i in positions])
        if not selected:
            raise NoUsableClips(f"{split}: no clip is left", "check the warnings before this line")
        positions = selected
        selected_tokens = [tokens[position][: max_tokens + 1] for position in positions]
        spoken = [languages[i] for i in positions]
        return SpeechData([clips[i] for i in positions], selected_tokens, store, positions, spoken, self.windows)

    def table(self, split: str) -> str:
        data = self.train if split == "train" else self.evaluation[split]
        lines = [[clip.id, clip.text, language] for clip, language in zip(data.clips, data.languages, strict=True)]
        return hashlib.blake2b(json.dumps(lines).encode(), digest_size=8).hexdigest()

    def _language_of(self, clip: Clip) -> str:
        if not clip.language:
            return ""
        code = language_code(clip.language, f"{clip.location}, column language")
        self.wrapper.check_language(code, f"{clip.location}, column language")
        return code

    def _is_selected(self, clip: Clip) -> bool:
        """Whether a clip's language is selected, as far as known before detection."""
        if self.languages is None:
            return True
        code = self._language_of(clip) or self.default_language
        if not code and self.profile.model.language != AUTO_LANGUAGE:
            message = f"{clip.location}: {clip.id} has no language, so it is unknown whether 'languages' includes it"
            raise BadInput(message, "add a column 'language', or set language = auto")
        return not code or code in self.languages

    def _select_clips(self, split: str, clips: list[Clip]) -> list[Clip]:
        selected = [clip for clip in clips if self._is_selected(clip)]
        if clips and not selected:
            raise self._nothing_selected(split, [self._language_of(clip) or self.default_language for clip in clips])
        return selected

    def _nothing_selected(self, split: str, spoken: Sequence[str]) -> NoUsableClips:
        counts = ", ".join(f"{code or 'unknown'} ({count})" for code, count in Counter(spoken).most_common())
        languages = ", ".join(sorted(self.languages or ()))
        message = f"{split}: no clip is in one of the languages {languages}: they are in {counts}"
        return NoUsableClips(message, "name one of theirs in 'languages', or set languages = all")

    def _detect_languages(
        self, store: FeatureStore, positions: Sequence[int], languages: list[str], progress: Progress
    ) -> None:
        """Detect unknown ``languages`` in place, if set to automatic."""
        unknown = [i for i in positions if not languages[i]]
        if self.profile.model.language != AUTO_LANGUAGE or not unknown:
            return
        root = cache_root(self.profile.data.cache_dir)
        heard = detect_clip_languages(self.language_detector, store, unknown, self.device, root, progress)
        for i, code in zip(unknown, heard, strict=True):
            languages[i] = code

    @property
    def language_detector(self) -> WhisperModelWrapper:
        """The model that detects a clip's language."""
        return self.wrapper

    def _check_broken(self, split: str, clips: Sequence[Clip], store: FeatureStore) -> None:
        share = len(store.errors) / max(1, len(clips))
        for position, error in list(store.errors.items())[:_MAX_LISTED]:
            logger.warning("%s: %s: %s; left out", clips[position].location, clips[position].id, error)
        allowed = self.profile.data.max_broken_share
        broken = f"{len(store.errors)} of {counted(len(clips), 'recording')} broken"
        if share > allowed:
            first_broken = next(iter(store.errors))
            named = f"first {clips[first_broken].location}: {clips[first_broken].id}: {store.errors[first_broken]}"
            raise BadInput(f"{split}: {broken}, more than {share_text(allowed)}; {named}", REPAIR_HINT)
        if store.errors:
            logger.warning("%s: %s and left out", split, broken)

    def _drop_long(self, clips: Sequence[Clip], positions: list[int], long: set[int], problem: str) -> list[int]:
        """Return the remaining positions when those in ``long`` are too long: all of them if they are truncated."""
        if not long:
            return positions
        affected, policy = [clips[i] for i in sorted(long)], self.profile.data.long_audio
        if policy == "refuse":
            settings = (self.profile.data.dataset_path, self.profile.model.language)
            raise long_clip_error(affected, problem, self.wrapper.log_mel.seconds, *settings)
        done = "cut (their transcripts may say more than is heard)" if policy == "cut" else "left out"
        logger.warning("%s %s %s: %s", counted(len(affected), "clip"), problem, done, list_clips(affected))
        return [i for i in positions if i not in long] if policy == "skip" else positions

    def _require_language(self, data: SpeechData) -> None:
        unknown = not self.default_language and not all(data.languages)
        if self.wrapper.is_multilingual and self.profile.model.from_scratch and unknown:
            raise BadInput("a model from scratch cannot tell the language", "set language, or add a column 'language'")

    def build_model(self) -> nn.Module:
        model = self.wrapper.build()
        self.ensure_language(model, self.train)
        self._encoded = None
        return model

    def build_stage(self, stages: StageMaker) -> nn.Module:
        train = getattr(self, "train", None)  # nothing, where a trained model is only used
        if train is not None and not (self.default_language or all(train.languages)):
            raise BadInput("no stage of a model can tell the language", "set language, or add a column 'language'")
        return self.wrapper.build_stage(stages)

    def build_for_shards(self) -> nn.Module:
        self._caches_encoder = False  # whose weights are whole only while it computes
        return self.build_model()

    def cache_for(self, model: nn.Module) -> EncoderCache | None:
        """Return the cache of the encoder's outputs for the training clips; ``None`` if they vary."""
        encoder, data = unwrap(model).model.encoder, self.train
        is_stage = not isinstance(self.wrapper.reader, type)  # which cannot compute what is missing
        if not self._caches_encoder or self.profile.data.augmentation or is_stage or not is_constant(encoder):
            return None
        if self._encoded is None:
            root = cache_root(self.profile.data.cache_dir)
            self._encoded = EncoderCache(root, encoder, data.store.key, len(data.store))
        return self._encoded

    def ensure_language(self, model: nn.Module, data: SpeechData) -> None:
        """Detect the default language from a few clips if no language was given."""
        if self.default_language or all(data.languages):
            return
        clips = torch.from_numpy(np.stack([data.store[i] for i in data.positions[:_DETECTION_CLIPS]]))
        clips = clips.to(next(model.parameters()).device)
        with evaluating(model), torch.no_grad():
            votes = Counter(self.wrapper.detect_languages(model, self.wrapper.encode_audio(model, clips)))
        self.default_language = votes.most_common(1)[0][0]
        logger.warning(
            "language is not set: the model detects %r; set language if that is wrong", self.default_language
        )

    def identity(self, sample: SpeechSample) -> dict[str, Any]:
        window = self.wrapper.log_mel.fill(sample.features, sample.silence)
        fields = {name: getattr(sample, name) for name in ("tokens", "text", "language", "longest")}
        return {"features": window, **fields}

    def collate(self, samples: Sequence[SpeechSample], rngs: Sequence[np.random.Generator] | None) -> Batch:
        """Return features [batch, mels, frames], decoder input ids and labels [batch, longest prompt + text - 1].

        Position ``t`` of the labels is the token after position ``t`` of the decoder's input; prompt and padding are
        ``-100``.
        """
        languages = [sample.language or self.default_language for sample in samples]
        inputs = self.wrapper.decoder_inputs(languages, [sample.tokens for sample in samples])
        labels, start = torch.full_like(inputs, IGNORED), self.wrapper.prompt_length - 1
        for row, sample in zip(labels, samples):
            row[start : start + len(sample.tokens)] = torch.tensor(sample.tokens)
        return {
            "input_features": window_batch(samples, self.wrapper.log_mel, self.profile.data.augmentation, rngs),
            "silence": [sample.silence for sample in samples],
            "positions": [sample.position for sample in samples] if rngs is not None else [],
            "decoder_input_ids": inputs,
            "labels": labels,
            "tokens": float(sum(len(sample.tokens) for sample in samples)),
            "texts": [sample.text for sample in samples],
            "languages": languages,
            "longest": max(sample.longest for sample in samples),
            "indices": [sample.index for sample in samples],
        }

    def lengths(self) -> npt.NDArray[np.int64] | None:
        """Window lengths of the training clips in frames."""
        return self.train.frames if self.windows.are_cut else None

    def labels(self, of: Literal["label", "speaker"]) -> Sequence[str]:
        if of == "label":
            return self.train.languages
        return [first_of(clip.columns, SPEAKER_COLUMNS) for clip in self.train.clips]

    def evaluation_lengths(self, split: str) -> npt.NDArray[np.int64] | None:
        """Transcript lengths in tokens, as a batch generates until its last text ends."""
        return np.array([len(tokens) for tokens in self.evaluation[split].tokens], dtype=np.int64)

    def pad_to_length(self, batch: Batch, length: int) -> Batch:
        features, silence = batch["input_features"], torch.tensor(batch["silence"])
        count, mels, frames = features.shape
        if frames >= length:
            return batch
        padding = silence[:, None, None].expand(count, mels, length - frames)
        return {**batch, "input_features": torch.cat([features, padding], dim=2)}

    def weight(self, batch: Batch) -> float:
        """Number of transcript tokens, including end tokens."""
        return float(batch["tokens"])

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return self._loss(model, batch, self.encode_for_training(model, batch))

    def encode_for_training(self, model: nn.Module, batch: Batch) -> Any:
        """Return the encoder's output for a training batch, from the cache if the encoder is constant."""
        features, positions = batch["input_features"], batch["positions"]
        cache = self.cache_for(model) if positions else None
        if cache is None:
            return self.wrapper.encode_audio(model, features)
        return (
            cache(features, positions, lambda missing: self.wrapper.encode_audio(model, missing).last_hidden_state),
        )

    @staticmethod
    def _loss(model: nn.Module, batch: Batch, encoded: Any) -> torch.Tensor:
        text = {name: batch[name] for name in ("decoder_input_ids", "labels")}
        with unpacked():
            loss: torch.Tensor = model(encoder_outputs=encoded, **text, use_cache=False).loss
        return loss

    def evaluate(self, model: nn.Module, batch: Batch, generate: bool) -> dict[str, float]:
        return self.answer(model, batch, generate)[0]

    def answer(self, model: nn.Module, batch: Batch, generate: bool) -> tuple[dict[str, float], list[Answer]]:
        encoded = self.wrapper.encode_audio(model, batch["input_features"])
        weight = self.weight(batch)
        sums = {"loss_sum": float(self._loss(model, batch, encoded)) * weight, "weight": weight}
        answers: list[Answer] = []
        if generate:
            bound = generation_bound(
                batch["longest"], self.profile.evaluation.eval_max_new_tokens, self.wrapper.text_positions
            )
            transcripts = self.wrapper.generate(model, encoded, batch["languages"], bound)
            pairs = list(
                zip(batch["texts"], [transcript.text for transcript in transcripts], batch["languages"], strict=True)
            )
            sums |= count_errors(*([self._normalised(pair[side], pair[2]) for pair in pairs] for side in (0, 1)))
            sums.update(
                texts=float(len(transcripts)), cut_texts=float(sum(transcript.cut for transcript in transcripts))
            )
            answers = [
                Answer(index, *transcript) for index, transcript in zip(batch["indices"], transcripts, strict=True)
            ]
        return sums, answers

    def predictions(self, split: str, answers: Sequence[Answer]) -> list[Prediction]:
        return self.predictions_of(self.evaluation[split], answers)

    def predictions_of(self, data: SpeechData, answers: Sequence[Answer]) -> list[Prediction]:
        """Return the predictions for a split's clips, in the order of its table."""
        predictions = []
        for answer in sorted(answers):
            clip, language = data.clips[answer.sample], data.languages[answer.sample] or self.default_language
            normalised = self._normalised(clip.text, language), self._normalised(answer.text, language)
            seconds = data.store.seconds[data.positions[answer.sample]]
            predictions.append(prediction_of(clip, answer.text, normalised, answer.cut, language, seconds))
        return predictions

    def caption(self, sample: SpeechSample) -> str:
        return sample.text

    def sound(self, split: str, index: int) -> bytes | str:
        return self.evaluation[split].sound(index)

    def _normalised(self, text: str, language: str) -> str:
        return self._rates.normalised(text, "en" if self.profile.model.speech_task == "translate" else language)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``loss``, and ``wer`` and ``cer`` (shares, 0.05 is 5 %) if text was generated.

        ``cut`` is the share of texts that reached the length limit; it is omitted if there are none.
        """
        metrics = super().metrics(sums)
        if sums.get("words"):
            metrics["wer"] = sums.get("word_edits", 0.0) / sums["words"]
        if sums.get("chars"):
            metrics["cer"] = sums.get("char_edits", 0.0) / sums["chars"]
        if sums.get("cut_texts") and sums.get("texts"):
            metrics["cut"] = sums["cut_texts"] / sums["texts"]
        return metrics

    def save(self, model: nn.Module, directory: Path) -> None:
        codes = {code or self.default_language for code in self.train.languages}
        self.wrapper.save(model, directory, sorted(codes - {""}))
