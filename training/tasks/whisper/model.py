"""A Whisper checkpoint with its conventions: prompt, tokens, features, adapters, generation and saving."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
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
from training.tasks.frozen_base import with_quantised_base
from training.tasks.language_codes import language_code
from training.tasks.pretrained import (
    adapter_folder,
    add_lora,
    base_of,
    load,
    load_part,
    read_adapter,
    read_weights,
    recompute_activations,
    save_weights,
)
from training.tasks.published_models import local_folder
from training.tasks.whisper.checkpoint import (
    files_of,
    kept_alignment_heads,
    make_student,
    read_config,
    spaced_layers,
    student_config,
)
from training.tasks.whisper.encoder import encode
from training.tasks.whisper.features import LogMel
from training.tasks.whisper.languages import read_generation
from training.tasks.whisper.suppression import model_tokens

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
"""What ``all-linear`` stands for: every linear layer but the output, which shares the embedding's weights."""

TICK = 0.02
"""Seconds from one token for a time to the next."""
_TIMES = 16
"""Tokens for times that a text of one window may take beside its words."""

IGNORED = -100
"""Label of a position that does not count in the loss."""


class Said(NamedTuple):
    """One generated text."""

    text: str
    cut: bool
    """It had not ended when it reached its bound."""


class WhisperModelWrapper:
    """Everything around one ``WhisperForConditionalGeneration``, named by hub name or local folder.

    The configuration, tokenizer and feature extractor are read at once; :meth:`build` reads the weights. An adapter
    folder (``adapter_config.json``) stands for its base model with the adapters merged.

    Raises:
        BadInput: the model is not found, is no Whisper, or its folder is damaged.
    """

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings
        self.adapter = adapter_folder(settings.model_path)
        self.path = local_folder(base_of(self.adapter) if self.adapter else settings.model_path)
        base_config = read_config(self.path)
        self.layers = spaced_layers(base_config.decoder_layers, settings.student_layers or base_config.decoder_layers)
        """Which layers of the decoder in :attr:`path` are the model's."""
        self.encoder_path = local_folder(settings.encoder_path) if settings.encoder_path else ""
        encoder = read_config(self.encoder_path) if self.encoder_path else None
        self.config: WhisperConfig = (
            student_config(base_config, encoder, self.layers) if self._is_remade else base_config
        )
        self.tokenizer: Any = load_part(AutoTokenizer, self._text_path, "tokenizer")
        hears = self.encoder_path or self._text_path
        self.extractor: WhisperFeatureExtractor = load_part(WhisperFeatureExtractor, hears, "feature extractor")
        self.log_mel = LogMel.from_extractor(self.extractor)
        self.generation: Any = self._read_generation()
        """``GenerationConfig`` with Whisper's own fields (``lang_to_id``, ``task_to_id``, ...) complete."""
        self._check_shapes()
        # Whisper was trained on texts that begin with a space; a tokenizer that drops it gets none
        decoded = self.tokenizer.decode(self.tokenizer.encode(" a", add_special_tokens=False))
        self._lead = " " if decoded == " a" else ""
        self._model_tokens = model_tokens(self.tokenizer)
        self._context: list[int] = []
        self.timestamps = bool(getattr(self.generation, "return_timestamps", False)) and self.knows_times
        """Whether texts are written with times, as the model was saved to."""

    @property
    def _text_path(self) -> str:
        return str(self.adapter) if self.adapter else self.path

    @property
    def _is_remade(self) -> bool:
        """Whether the model is another one than that in :attr:`path`."""
        return bool(self.settings.student_layers or self.settings.encoder_path)

    def _read_generation(self) -> Any:
        # an adapter was saved with settings of its own, such as what it may write
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
        """Refuse SpecAugment with masks longer than what they blank."""
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
        """Token of each language that the model knows, by its code."""
        return {token.strip("<|>"): token_id for token, token_id in self.generation.lang_to_id.items()}

    @property
    def is_multilingual(self) -> bool:
        """Whether language and task are part of the prompt."""
        return bool(self.generation.is_multilingual)

    @property
    def max_positions(self) -> int:
        """The decoder's positions: prompt and text together."""
        return int(self.config.max_target_positions)

    @property
    def room(self) -> int:
        """The decoder's positions that are left for a text."""
        return self.max_positions - self.prompt_length - len(self._context)

    @property
    def knows_times(self) -> bool:
        """Whether there are tokens for times: every 20 ms up to the length of the window."""
        no_times = self.generation.no_timestamps_token_id
        return no_times is not None and self.config.vocab_size > int(no_times) + self.log_mel.seconds / TICK

    @property
    def first_time(self) -> int:
        """Token of the time 0; each further one is :data:`TICK` later, and no text is at or above it."""
        no_times = self.generation.no_timestamps_token_id
        return self.config.vocab_size if no_times is None else int(no_times) + 1

    def write_as(self, prompt: str = "", timestamps: bool | None = None) -> None:
        """Let texts be generated as if ``prompt`` had been said before, with or without times; ``None``: as saved.

        Of a prompt that is longer than the decoder takes, the end counts.

        Raises:
            BadInput: the model has no token for that.
        """
        if timestamps and not self.knows_times:
            raise BadInput(f"model {self.path} predicts no times", "leave out --timestamps")
        if timestamps is not None:
            self.timestamps = timestamps
        if prompt.strip():
            start = self.tokenizer.get_vocab().get("<|startofprev|>")
            if start is None:
                raise BadInput(f"model {self.path} takes no prompt: it has no token <|startofprev|>", "leave it out")
            ids = self.tokenizer.encode(self._lead + prompt.strip(), add_special_tokens=False)
            special = set(self.tokenizer.all_special_ids)
            longest = self.max_positions // 2 - 2  # as OpenAI's own code has it, less the start token
            self._context = [start, *[token for token in ids if token not in special][-longest:]]

    @property
    def default_language(self) -> str:
        """Code of the language set, or of the one the model was saved for; empty if there is none."""
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
        """Raise ``BadInput`` if this model has no token for a language."""
        if self.is_multilingual and code not in self.languages:
            have = f"it has: {', '.join(self.languages)}"
            raise BadInput(f"{source}: model {self.path} has no language {code!r}", have)

    def prompt(self, language: str) -> list[int]:
        """Tokens the decoder starts from: start, language, task, no time stamps (the last three where it has them)."""
        ids = [int(self.generation.decoder_start_token_id)]
        if self.is_multilingual:
            ids.append(self.languages[language])
            ids.append(self.generation.task_to_id[self.settings.speech_task])
        if self.generation.no_timestamps_token_id is not None:
            ids.append(int(self.generation.no_timestamps_token_id))
        return ids

    def prompts(self) -> dict[str, list[int]]:
        """:meth:`prompt` of every language that the model knows."""
        return {code: self.prompt(code) for code in (self.languages if self.is_multilingual else ["en"])}

    @property
    def prompt_length(self) -> int:
        return len(self.prompt(next(iter(self.languages)) if self.is_multilingual else "en"))

    def decoder_inputs(self, languages: Sequence[str], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """What the decoder reads [texts, longest prompt + text - 1] while it writes texts of these tokens: prompts, and
        all but the last token of each text; end tokens fill the rest."""
        rows = [[*self.prompt(code), *text[:-1]] for code, text in zip(languages, tokens, strict=True)]
        inputs = torch.full((len(rows), max(map(len, rows))), int(self.tokenizer.eos_token_id))
        for index, row in enumerate(rows):
            inputs[index, : len(row)] = torch.tensor(row)
        return inputs

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text with the end token, without the prompt. What a text spells of a token of the model's own
        (``<|endoftext|>``) is left out; an empty text has the end token alone."""
        cleaned = [self._model_tokens.sub(" ", text).strip() for text in texts]
        led = [self._lead + text if text else "" for text in cleaned]
        ids = self.tokenizer(led, add_special_tokens=False)["input_ids"] if led else []
        return [[*text, int(self.tokenizer.eos_token_id)] for text in ids]

    def build(self) -> nn.Module:
        """Return the model on the CPU in float32, frozen, adapted and checkpointed as the settings say.

        Raises:
            BadInput: the weights are missing, damaged or of another shape; a LoRA target is not there.
        """
        model = self._read_with_generation()
        if self.settings.base_precision in QUANTISED:
            model = with_quantised_base(model, self.settings.base_precision)
        # Sinusoids (Radford et al. 2022, section 2.2), not to be learnt; transformers lets loaded ones be trained
        model.model.encoder.embed_positions.requires_grad_(False)
        if self.settings.gradient_checkpointing:
            recompute_activations(model)
        if self.settings.freeze_encoder:
            model.freeze_encoder()
        if self.settings.tuning == "lora":
            exclude = r"model\.encoder\..*" if self.settings.freeze_encoder else None
            return cast(nn.Module, add_lora(model, self.settings, LORA_TARGETS, exclude))
        return cast(nn.Module, model)

    def _read_with_generation(self) -> Any:
        model = self.read_model()
        model.generation_config = copy.deepcopy(self.generation)
        return model

    def read_model(self) -> Any:
        if self.settings.from_scratch:
            return WhisperForConditionalGeneration(copy.deepcopy(self.config))

        plain = self.adapter is None and not self._is_remade
        small = plain and self.settings.base_precision in QUANTISED
        model = read_weights(WhisperForConditionalGeneration, self.path, as_stored=small)
        if self.adapter is not None:
            folder = self.adapter
            model = load(str(folder), "adapter", lambda local: read_adapter(model, folder))
        if self._is_remade:
            encoder_path = self.encoder_path
            encoder = read_weights(WhisperForConditionalGeneration, encoder_path) if encoder_path else None
            model = make_student(self.config, model, encoder, self.layers)
        return model

    def files(self) -> list[Path]:
        """Files that the model's weights and settings are in; a hub's are fetched if they are not here yet."""
        return files_of(self.path, str(self.adapter or ""))

    def detect_languages(self, model: nn.Module, heard: Any) -> list[str]:
        """Codes of the languages in what :meth:`hear` gave, of those that the model was trained for if it says so."""
        generation, trained = copy.deepcopy(self.generation), getattr(self.generation, "trained_languages", None)
        if trained:
            token_ids = self.generation.lang_to_id
            generation.lang_to_id = {
                name: token_ids[name] for code in trained if (name := f"<|{code}|>") in token_ids
            } or token_ids
        detected = unwrap(model).detect_language(encoder_outputs=heard, generation_config=generation).tolist()
        codes = {token_id: code for code, token_id in self.languages.items()}
        return [codes[token_id] for token_id in detected]

    def hear(self, model: nn.Module, features: torch.Tensor) -> Any:
        """The encoder's output for ``features`` [batch, mels, frames], to be used by loss and generation alike.

        The window may be shorter than the model's own.
        """
        return encode(unwrap(model), features)

    def generate(self, model: nn.Module, heard: Any, languages: Sequence[str], max_new_tokens: int) -> list[Said]:
        """Greedy transcripts of what :meth:`hear` gave, each at most ``max_new_tokens`` long."""
        times = _TIMES if self.timestamps else 0
        bound = min(max_new_tokens + times, self.room)
        ids = self.write(model, heard, languages, bound, self.timestamps)
        ended = (ids == self.tokenizer.eos_token_id).any(dim=1).tolist() if ids.shape[1] >= bound else [True] * len(ids)
        return [Said(self.text(row), not end) for row, end in zip(ids.tolist(), ended)]

    def text(self, tokens: Sequence[int]) -> str:
        """What tokens say, without special ones and times."""
        words = [token for token in tokens if token < self.first_time]
        return str(self.tokenizer.decode(words, skip_special_tokens=True)).strip()

    def write(
        self, model: nn.Module, heard: Any, languages: Sequence[str], bound: int, timestamps: bool, **options: Any
    ) -> torch.Tensor:
        """Tokens [batch, at most ``bound``] that the decoder writes on what :meth:`hear` gave, the prompt left out.

        Args:
            more: goes to ``generate`` of transformers.
        """
        generation = copy.deepcopy(self.generation)
        # Whisper adds the prompt to max_length and keeps within the positions; max_new_tokens it would refuse
        generation.max_length = bound
        generation.num_beams, generation.do_sample = 1, False
        if self.is_multilingual:
            generation.language, generation.task = list(languages), self.settings.speech_task
        if self._context:
            options["prompt_ids"] = torch.tensor(self._context, device=next(model.parameters()).device)
        raw = bool(self._context) or timestamps  # else transformers would hear a window twice, or lose its times
        if raw:
            options["force_unique_generate_call"] = True
        with _quiet():
            ids: torch.Tensor = unwrap(model).generate(
                encoder_outputs=heard, generation_config=generation, return_timestamps=timestamps, **options
            )
        # With times the prompt lacks the token that says that there are none.
        prompt_length = len(self._context) + self.prompt_length - int(timestamps)
        return ids[:, prompt_length:] if raw else ids

    def save(self, model: nn.Module, directory: Path, languages: Sequence[str] | None = None) -> None:
        """Write a folder that ``transformers.pipeline`` opens; the live model stays as it is.

        Args:
            languages: codes it was trained for. One: the saved model writes it by default; else it detects the
                language, here among these. ``None``: those that it was saved for before.
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
    """The ``WhisperForConditionalGeneration`` inside a peft model; adapters stay active."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back remarks of transformers on arguments that its own Whisper code passes, at every batch."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
