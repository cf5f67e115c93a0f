"""A Whisper checkpoint with its conventions: prompt, tokens, features, adapters, generation and saving."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    AutoTokenizer,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from profiles.errors import BadInput
from profiles.schema import AUTO_LANGUAGE, QUANTISED, ModelSettings
from speech.data.language_codes import language_code
from speech.whisper.checkpoint import (
    files_of,
    kept_alignment_heads,
    make_student,
    read_config,
    spaced_layers,
    student_config,
)
from speech.whisper.encoder import encode_window, run_layers
from speech.whisper.features import LogMel
from speech.whisper.languages import read_generation
from speech.whisper.suppression import model_tokens
from training.tasks.base import StageMaker
from training.tasks.frozen_base import with_quantised_base
from training.tasks.pretrained import (
    adapter_folder,
    add_lora,
    base_of,
    from_pretrained,
    only_errors,
    read_adapter,
    read_checked,
    read_weights,
    recompute_activations,
    save_weights,
)
from training.tasks.published_models import local_folder

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""Targets of ``all-linear``: every linear layer but the output, which shares the embedding's weights."""

TIMESTAMP_STEP = 0.02
"""Seconds between consecutive timestamp tokens."""
_TIMESTAMP_TOKENS = 16
"""Timestamp tokens that a text of one window may have besides its words."""

IGNORED = -100
"""Label of a position that is excluded from the loss."""


class GeneratedText(NamedTuple):
    """One generated text."""

    text: str
    cut: bool
    """Whether generation stopped at the length limit."""


class WhisperModelWrapper:
    """Configuration, tokenizer, feature extractor and generation of one ``WhisperForConditionalGeneration``.

    These are read immediately; :meth:`build` reads the weights. An adapter folder (``adapter_config.json``) stands for
    its base model with the adapters merged.

    Raises:
        BadInput: the model is not found, is not a Whisper, or its folder is damaged.
    """

    reader: Any = WhisperForConditionalGeneration
    """What reads the model, or one stage of it."""

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.adapter = adapter_folder(settings.model_path)
        self.path = local_folder(base_of(self.adapter) if self.adapter else settings.model_path)
        base = read_config(self.path)
        self.layers = spaced_layers(base.decoder_layers, settings.student_layers or base.decoder_layers)
        """Indices of the decoder layers of :attr:`path` that the model has."""
        self.encoder_path = local_folder(settings.encoder_path) if settings.encoder_path else ""
        encoder = read_config(self.encoder_path) if self.encoder_path else None
        self.config: WhisperConfig = student_config(base, encoder, self.layers) if self._is_composed else base
        self.tokenizer: Any = from_pretrained(AutoTokenizer, self._text_path, "tokenizer")
        source = self.encoder_path or self._text_path
        self.extractor: WhisperFeatureExtractor = from_pretrained(WhisperFeatureExtractor, source, "feature extractor")
        self.log_mel = LogMel.from_extractor(self.extractor)
        self.generation: Any = self._read_generation()
        """``GenerationConfig``, completed with Whisper's own fields (``lang_to_id``, ``task_to_id``, ...)."""
        self._check_shapes()
        # Whisper was trained on texts with a leading space, unless the tokenizer strips it
        decoded = self.tokenizer.decode(self.tokenizer.encode(" a", add_special_tokens=False))
        self._leading_space = " " if decoded == " a" else ""
        self._model_tokens = model_tokens(self.tokenizer)
        self._context: list[int] = []
        self.timestamps = bool(getattr(self.generation, "return_timestamps", False)) and self.has_timestamps
        """Whether texts are generated with timestamps, as saved in the model's settings."""

    @property
    def _text_path(self) -> str:
        return str(self.adapter) if self.adapter else self.path

    @property
    def _is_composed(self) -> bool:
        """Whether the model is composed of parts instead of being the one in :attr:`path`."""
        return bool(self.settings.student_layers or self.settings.encoder_path)

    def _read_generation(self) -> Any:
        # an adapter is saved with its own settings, such as suppressed tokens
        folders = [str(self.adapter), self.path] if self.adapter else [self.path]
        generation = read_generation(folders, self.config, self.tokenizer)
        if getattr(generation, "alignment_heads", None):
            generation.alignment_heads = kept_alignment_heads(generation.alignment_heads, self.layers)
        return generation

    def _check_shapes(self) -> None:
        frames = 2 * self.config.max_source_positions  # the second convolution halves the frames
        for unit, ours, models in (
            ("mels", self.log_mel.mels, self.config.num_mel_bins),
            ("frames", self.log_mel.frames, frames),
        ):
            if ours != models:
                message = f"model {self.path}: its feature extractor gives {ours} {unit}, but it takes {models}"
                raise BadInput(message, "correct preprocessor_config.json")
        self._check_masks()
        if len(self.tokenizer) > self.config.vocab_size:
            message = f"model {self.path}: {len(self.tokenizer)} tokens, but vocab_size is {self.config.vocab_size}"
            raise BadInput(message, "correct config.json")

    def _check_masks(self) -> None:
        """Reject SpecAugment masks that are longer than the axis that they mask."""
        config = self.config
        if not getattr(config, "apply_spec_augment", False):
            return
        for axis, size, unit in (("time", self.log_mel.frames, "frames"), ("feature", self.log_mel.mels, "mels")):
            length = getattr(config, f"mask_{axis}_length")
            if getattr(config, f"mask_{axis}_prob") > 0 and not 1 <= length <= size:
                message = f"model {self.path}: mask_{axis}_length is {length}, but it hears {size} {unit}"
                raise BadInput(message, "correct config.json, or set apply_spec_augment to false there")

    @cached_property
    def languages(self) -> dict[str, int]:
        """Token of each supported language by its code."""
        return {token.strip("<|>"): token_id for token, token_id in self.generation.lang_to_id.items()}

    @property
    def is_multilingual(self) -> bool:
        """Whether the prompt contains language and task."""
        return bool(self.generation.is_multilingual)

    @property
    def max_positions(self) -> int:
        """The decoder's positions, for prompt and text together."""
        return int(self.config.max_target_positions)

    @property
    def text_positions(self) -> int:
        """The decoder's positions that remain for a text."""
        return self.max_positions - self.prompt_length - len(self._context)

    @property
    def has_timestamps(self) -> bool:
        """Whether the vocabulary has timestamp tokens: one every 20 ms up to the length of the window."""
        no_times = self.generation.no_timestamps_token_id
        return no_times is not None and self.config.vocab_size > int(no_times) + self.log_mel.seconds / TIMESTAMP_STEP

    @property
    def first_timestamp(self) -> int:
        """Token of the time 0; further ones are :data:`TIMESTAMP_STEP` apart, and text tokens are below it."""
        no_times = self.generation.no_timestamps_token_id
        return self.config.vocab_size if no_times is None else int(no_times) + 1

    def configure_generation(self, prompt: str = "", timestamps: bool | None = None) -> None:
        """Set the previous text (``prompt``), and whether to generate timestamps; ``None``: as saved.

        A prompt that is too long for the decoder is truncated from the left.

        Raises:
            BadInput: the model has no tokens for these.
        """
        if timestamps and not self.has_timestamps:
            raise BadInput(f"model {self.path} predicts no times", "leave out --timestamps")
        if timestamps is not None:
            self.timestamps = timestamps
        if prompt.strip():
            start = self.tokenizer.get_vocab().get("<|startofprev|>")
            if start is None:
                raise BadInput(f"model {self.path} takes no prompt: it has no token <|startofprev|>", "leave it out")
            ids = self.tokenizer.encode(self._leading_space + prompt.strip(), add_special_tokens=False)
            special = set(self.tokenizer.all_special_ids)
            longest = self.max_positions // 2 - 2  # as in OpenAI's own code, less the start token
            self._context = [start, *[token for token in ids if token not in special][-longest:]]

    @property
    def default_language(self) -> str:
        """Code of the configured language, or of the saved model's; empty if there is none."""
        if self.settings.language == AUTO_LANGUAGE:
            return "" if self.is_multilingual else "en"
        if self.settings.language:
            code = language_code(self.settings.language)
            self.check_language(code, "language")
            return code
        saved = getattr(self.generation, "language", None)
        if self.is_multilingual:
            return language_code(saved) if isinstance(saved, str) and saved else ""
        return "en"

    def check_language(self, code: str, source: str) -> None:
        """Raise ``BadInput`` if this model has no token for a language that was given by ``source``."""
        if self.is_multilingual and code not in self.languages:
            have = f"it has: {', '.join(self.languages)}"
            raise BadInput(f"{source}: model {self.path} has no language {code!r}", have)

    def prompt(self, language: str) -> list[int]:
        """Return the decoder's prompt: start, language, task, no timestamps (the last three if the model has them)."""
        ids = [int(self.generation.decoder_start_token_id)]
        if self.is_multilingual:
            ids.append(self.languages[language])
            ids.append(self.generation.task_to_id[self.settings.speech_task])
        if self.generation.no_timestamps_token_id is not None:
            ids.append(int(self.generation.no_timestamps_token_id))
        return ids

    def prompts(self) -> dict[str, list[int]]:
        """Return the :meth:`prompt` of every supported language."""
        return {code: self.prompt(code) for code in (self.languages if self.is_multilingual else ["en"])}

    @property
    def prompt_length(self) -> int:
        return len(self.prompt(next(iter(self.languages)) if self.is_multilingual else "en"))

    def decoder_inputs(self, languages: Sequence[str], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the decoder's inputs [texts, longest prompt + text - 1]: prompt and all but the last token of a text,
        padded with end tokens."""
        rows = [[*self.prompt(code), *text[:-1]] for code, text in zip(languages, tokens, strict=True)]
        inputs = torch.full((len(rows), max(map(len, rows))), int(self.tokenizer.eos_token_id))
        for index, row in enumerate(rows):
            inputs[index, : len(row)] = torch.tensor(row)
        return inputs

    def tokenise(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text with the end token, without the prompt; special tokens spelled out in a text
        (``<|endoftext|>``) are removed, and an empty text has only the end token."""
        cleaned = [self._model_tokens.sub(" ", text).strip() for text in texts]
        led = [self._leading_space + text if text else "" for text in cleaned]
        ids = self.tokenizer(led, add_special_tokens=False)["input_ids"] if led else []
        return [[*text, int(self.tokenizer.eos_token_id)] for text in ids]

    def build(self) -> nn.Module:
        """Return the model on the CPU in float32, with freezing, adapters and checkpointing as in the settings.

        Raises:
            BadInput: the weights are missing, damaged or of another shape; a LoRA target does not exist.
        """
        model = self._read_with_generation()
        if self.settings.base_precision in QUANTISED:
            model = with_quantised_base(model, self.settings.base_precision)
        # Sinusoids (Radford et al. 2022, section 2.2) are not trained; transformers leaves loaded ones trainable
        model.model.encoder.embed_positions.requires_grad_(False)
        if self.settings.gradient_checkpointing:
            recompute_activations(model)
        if self.settings.freeze_encoder:
            model.freeze_encoder()
        if self.settings.tuning == "lora":
            exclude = r"model\.encoder\..*" if self.settings.freeze_encoder else None
            return cast(nn.Module, add_lora(model, self.settings, LORA_TARGETS, exclude))
        return cast(nn.Module, model)

    def build_stage(self, stages: StageMaker) -> nn.Module:
        """Return the part of the model that this process holds, like :meth:`build` the whole."""
        self.reader = stages.reader(self.reader, self.config)
        model = stages.with_own_adapters(self.build())
        whisper = unwrap(model)
        whisper.encode = partial(run_layers, whisper.model.encoder)
        return model

    def _read_with_generation(self) -> Any:
        model = self.read_model()
        model.generation_config = copy.deepcopy(self.generation)
        return model

    def read_model(self) -> Any:
        if self.settings.from_scratch:
            return self.reader(copy.deepcopy(self.config))

        is_unmodified = self.adapter is None and not self._is_composed
        small = is_unmodified and self.settings.base_precision in QUANTISED
        model = read_weights(self.reader, self.path, as_stored=small)
        if self.adapter is not None:
            folder = self.adapter
            model = read_checked(str(folder), "adapter", lambda local: read_adapter(model, folder))
        if self._is_composed:
            encoder_path = self.encoder_path
            encoder = read_weights(WhisperForConditionalGeneration, encoder_path) if encoder_path else None
            model = make_student(self.config, model, encoder, self.layers)
        return model

    def files(self) -> list[Path]:
        """Return the files of the model's weights and settings, fetched from the hub if needed."""
        return files_of(self.path, str(self.adapter or ""))

    def detect_languages(self, model: nn.Module, encoded: Any) -> list[str]:
        """Return the detected language codes of ``encoded`` audio, restricted to the trained languages if recorded."""
        generation, trained = copy.deepcopy(self.generation), getattr(self.generation, "trained_languages", None)
        if trained:
            token_ids = self.generation.lang_to_id
            generation.lang_to_id = {
                name: token_ids[name] for code in trained if (name := f"<|{code}|>") in token_ids
            } or token_ids
        detected = unwrap(model).detect_language(encoder_outputs=encoded, generation_config=generation).tolist()
        codes = {token_id: code for code, token_id in self.languages.items()}
        return [codes[token_id] for token_id in detected]

    def encode_audio(self, model: nn.Module, features: torch.Tensor) -> Any:
        """Return the encoder's output for ``features`` [batch, mels, frames], for both loss and generation.

        The window may be shorter than the model's own.
        """
        return encode_window(unwrap(model), features)

    def generate(self, model: nn.Module, encoded: Any, languages: Sequence[str], limit: int) -> list[GeneratedText]:
        """Return greedy transcripts of ``encoded`` audio, each of at most ``limit`` tokens."""
        times = _TIMESTAMP_TOKENS if self.timestamps else 0
        bound = min(limit + times, self.text_positions)
        ids = self.generate_tokens(model, encoded, languages, bound, self.timestamps)
        ended = (ids == self.tokenizer.eos_token_id).any(dim=1).tolist() if ids.shape[1] >= bound else [True] * len(ids)
        return [GeneratedText(self.text(row), not end) for row, end in zip(ids.tolist(), ended)]

    def text(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text, without special tokens and timestamps."""
        words = [token for token in tokens if token < self.first_timestamp]
        return str(self.tokenizer.decode(words, skip_special_tokens=True)).strip()

    def generate_tokens(
        self, model: nn.Module, encoded: Any, languages: Sequence[str], bound: int, timestamps: bool, **options: Any
    ) -> torch.Tensor:
        """Return generated tokens [batch, at most ``bound``] for ``encoded`` audio, without the prompt.

        Args:
            options: passed to ``generate`` of transformers.
        """
        generation = copy.deepcopy(self.generation)
        # Whisper adds the prompt to max_length and stays within its positions; it would reject max_new_tokens
        generation.max_length = bound
        generation.num_beams, generation.do_sample = 1, False
        if self.is_multilingual:
            generation.language, generation.task = list(languages), self.settings.speech_task
        if self._context:
            options["prompt_ids"] = torch.tensor(self._context, device=next(model.parameters()).device)
        raw = bool(self._context) or timestamps  # else transformers would decode a window twice, or drop its timestamps
        if raw:
            options["force_unique_generate_call"] = True
        with only_errors("transformers"):  # it warns at every batch of arguments that its own Whisper sets
            ids: torch.Tensor = unwrap(model).generate(
                encoder_outputs=encoded, generation_config=generation, return_timestamps=timestamps, **options
            )
        # With timestamps the prompt lacks the no-timestamps token.
        prompt_length = len(self._context) + self.prompt_length - int(timestamps)
        return ids[:, prompt_length:] if raw else ids

    def save(self, model: nn.Module, directory: Path, languages: Sequence[str] | None = None) -> None:
        """Write a folder that ``transformers.pipeline`` can load, without modifying the live model.

        Args:
            languages: codes it was trained for. A single one becomes the saved model's default; of several, the
                language is detected (here among these). ``None``: as it was saved before.
        """
        save_weights(model, directory, self._read_with_generation, merge=self.settings.lora_merge)
        self.generation_to_save(languages).save_pretrained(str(directory))
        self.tokenizer.save_pretrained(str(directory))
        self.extractor.save_pretrained(str(directory))

    def generation_to_save(self, languages: Sequence[str] | None) -> Any:
        generation = copy.deepcopy(self.generation)
        if self.is_multilingual:
            generation.task = self.settings.speech_task
        if self.is_multilingual and languages is not None:
            generation.language = languages[0] if len(languages) == 1 else None
            generation.trained_languages = list(languages) or None
        return generation


def unwrap(model: nn.Module) -> Any:
    """Return the ``WhisperForConditionalGeneration`` inside a peft model; adapters stay active."""
    return model.get_base_model() if isinstance(model, PeftModel) else model
