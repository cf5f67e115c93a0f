"""Stream text from a trained language model: continue a text, or answer in a conversation.

writer = TextWriter("output/.../model")
for piece in writer.generate(writer.prompt([{"role": "user", "content": "Who are you?"}])):
    print(piece, end="", flush=True)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from profiles.errors import BadInput
from profiles.optimisation import TrainingSettings
from profiles.schema import CAUSAL_LM, DataSettings, ModelSettings, Profile
from training.hardware.device import select_device
from training.inference.in_use import model_for
from training.records.model_folders import holds_tokenizer
from training.tasks.pretrained import adapter_folder, base_of, from_pretrained, read_with_adapters
from training.tasks.text.chat_template import renderer_of
from training.tasks.text.message_rows import Message
from training.tasks.text.special_tokens import SpecialTokens

_INCOMPLETE = 0xFFFD
"""Replacement character that a decoder emits for an incomplete multi-byte character."""
_RESPONSE = "muster"
"""A response text that no template contains."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options of text generation."""

    max_tokens: int = 256
    temperature: float = 0.0
    """0 decodes greedily; otherwise logits are divided by it and a token is sampled."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the likeliest tokens with this total probability (Holtzman et al. 2020,
    arXiv:1904.09751)."""
    seed: int = 0


class _Pieces(TextIteratorStreamer):
    """Streams every token's text immediately, also in scripts other than Chinese that put no spaces between words."""

    def _is_chinese_char(self, cp: int) -> bool:
        return cp != _INCOMPLETE


class TextGenerator:
    """A language model that generates text.

    Args:
        model: folder or hub name; adapters are merged into their base model.
        tokenizer: folder or hub name; empty: the model's own.
        workers: of this machine, which hold the model together.

    Raises:
        BadInput: model or tokenizer cannot be read, or there is no tokenizer.
    """

    def __init__(self, model: str | Path, device: str = "auto", tokenizer: str = "", workers: int = 1) -> None:
        self.name = str(model)
        self.tokenizer: Any = from_pretrained(AutoTokenizer, tokenizer or _tokenizer_of(self.name), "tokenizer")
        self._special = SpecialTokens(self.tokenizer)
        self.model: Any = self._read_model(device, workers)
        self.tokens = 0
        """Tokens of the last generated text."""

    def _read_model(self, device: str, workers: int) -> Any:
        if workers == 1:
            return read_with_adapters(AutoModelForCausalLM, self.name).eval().to(select_device(device))
        model = ModelSettings(task=CAUSAL_LM, model_path=self.name)
        training = TrainingSettings(device=device, mixed_precision="off")
        profile = Profile(name="generate", model=model, training=training, data=DataSettings(block_size=2))
        return model_for(self, profile, workers)

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    @property
    def positions(self) -> int:
        """Maximum number of tokens of prompt and text together."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1 << 30)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a conversation up to where the answer begins.

        Raises:
            BadInput: the chat template rejects it.
        """
        return self.exact_prompt(renderer_of(self.tokenizer)(self._special.as_text(messages), True))

    def exact_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text to continue verbatim; for an empty one the token that begins a text.

        Raises:
            BadInput: the text is not valid UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadInput("the prompt is no text in UTF-8", "write or convert it as UTF-8") from error
        ids = self._special.encode(text)
        begin = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return ids or [next((token for token in begin if token is not None), 0)]

    def truncate(self, messages: Sequence[Message], max_tokens: int) -> list[Message]:
        """Return a conversation without the oldest turns that leave no space for an answer; the system text stays."""
        remaining = list(messages)
        system = int(bool(remaining) and remaining[0]["role"] == "system")
        longest = self.positions - min(max_tokens, self.positions // 2)
        while len(remaining) > system + 1 and len(self.prompt(remaining)) > longest:
            del remaining[system : system + 2]  # with its answer: user and assistant take turns
        return remaining

    def generate(self, prompt: Sequence[int], sampling: Sampling = Sampling()) -> Iterator[str]:
        """Yield the generated text token by token; closing the generator stops generation.

        Raises:
            BadInput: the prompt fills the model's positions, or has tokens outside its vocabulary.
        """
        vocabulary_size = self.model.get_input_embeddings().num_embeddings
        if (largest := max(prompt)) >= vocabulary_size:
            message = f"token {largest} of the prompt is outside model {self.name}'s vocabulary of {vocabulary_size}"
            raise BadInput(message, "model and tokenizer do not belong together")
        free_positions = self.positions - len(prompt)
        if free_positions < 1:
            message = f"the prompt has {len(prompt)} tokens, and model {self.name} {self.positions} positions"
            raise BadInput(message, "shorten it")
        streamer: Any = _Pieces(
            self.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        closed, failures = threading.Event(), list[Exception]()

        def generate() -> None:
            try:
                self.tokens = self._generate(
                    prompt, min(sampling.max_tokens, free_positions), sampling, streamer, closed
                )
            except Exception as error:  # noqa: BLE001 - raised again in the reading thread
                failures.append(error)
            finally:
                streamer.end()

        thread = threading.Thread(target=generate, name="generate", daemon=True)
        thread.start()
        try:
            yield from filter(None, streamer)
        finally:
            closed.set()
            thread.join()
        if failures:
            raise failures[0]

    @torch.no_grad()
    def _generate(
        self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling, streamer: Any, closed: threading.Event
    ) -> int:
        ids = torch.tensor([list(prompt)], device=self.model.device)
        torch.manual_seed(sampling.seed)
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        ends = self._ends()
        written = self.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, streamer=streamer,
            stopping_criteria=[lambda ids, scores, **_: torch.full((len(ids),), closed.is_set(), device=ids.device)],
            eos_token_id=ends or None, pad_token_id=self.tokenizer.pad_token_id or (ends or [0])[0],
            **(drawn if sampling.temperature > 0 else greedy),
        )  # fmt: skip
        return int(written.shape[1]) - len(prompt)

    def _ends(self) -> list[int]:
        """Return the end tokens: those of model and tokenizer, and the one that ends a response in the chat template.

        The last one differs if a base model was trained on conversations.
        """
        ends = self.model.generation_config.eos_token_id
        tokens = [*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id]
        if self.has_chat_template:
            render = renderer_of(self.tokenizer)
            talk: list[Message] = [{"role": "user", "content": _RESPONSE}, {"role": "assistant", "content": _RESPONSE}]
            after = self.tokenizer(render(talk, False).rpartition(_RESPONSE)[2], add_special_tokens=False)["input_ids"]
            tokens += [token for token in after[:1] if token in self.tokenizer.added_tokens_decoder]
        return list(dict.fromkeys(cast(int, token) for token in tokens if token is not None))


def _tokenizer_of(model: str) -> str:
    """Return the path or hub name of a model's tokenizer.

    Raises:
        BadInput: the folder holds none.
    """
    adapter = adapter_folder(model)
    if adapter is not None and not holds_tokenizer(adapter):
        return base_of(adapter)
    if Path(model).is_dir() and not holds_tokenizer(Path(model)):
        raise BadInput(f"model {model} holds no tokenizer", "save one into its folder, or name it with --tokenizer")
    return model
