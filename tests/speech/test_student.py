"""A model made of parts of others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_speech import tiny_whisper
from transformers import WhisperForConditionalGeneration

from profiles.errors import BadInput
from profiles.files.resolve import profile_from_options
from profiles.schema import ModelSettings
from speech.whisper.checkpoint import kept_alignment_heads, spaced_layers
from speech.whisper.model import WhisperModelWrapper


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("models") / "four", layers=4)


@pytest.mark.parametrize(
    ("layers", "kept", "chosen"), [(4, 2, [0, 3]), (4, 1, [3]), (32, 3, [0, 16, 31]), (2, 2, [0, 1])]
)
def test_layers_are_as_far_apart_as_they_can_be(layers: int, kept: int, chosen: list[int]) -> None:
    assert spaced_layers(layers, kept) == chosen


def test_more_layers_than_there_are() -> None:
    with pytest.raises(BadInput, match="student_layers = 5, but the model's decoder has 4"):
        spaced_layers(4, 5)


def test_heads_of_layers_that_are_gone_align_nothing() -> None:
    assert kept_alignment_heads([[0, 1], [2, 0], [3, 1]], [0, 3]) == [[0, 1], [1, 1]]


@pytest.mark.slow
def test_a_student_has_the_first_and_the_last_layer_and_all_else(four_layers: Path) -> None:
    teacher = WhisperForConditionalGeneration.from_pretrained(four_layers).state_dict()
    wrapper = WhisperModelWrapper(ModelSettings(teacher_path=str(four_layers), student_layers=2))
    student = wrapper.build().state_dict()
    decoder = "model.decoder.layers"
    for name, value in student.items():
        origin = name.replace(f"{decoder}.1.", f"{decoder}.3.")
        assert torch.equal(value, teacher[origin]), name
    assert not any(f"{decoder}.2." in name for name in student)


@pytest.mark.slow
def test_a_saved_student_opens_by_itself(four_layers: Path, tmp_path: Path) -> None:
    wrapper = WhisperModelWrapper(ModelSettings(teacher_path=str(four_layers), student_layers=2))
    wrapper.save(wrapper.build(), tmp_path, [])
    assert WhisperForConditionalGeneration.from_pretrained(tmp_path).config.decoder_layers == 2
    assert WhisperModelWrapper(ModelSettings(model_path=str(tmp_path))).build() is not None


@pytest.mark.slow
def test_encoder_of_one_and_decoder_of_another(four_layers: Path, tmp_path: Path) -> None:
    other = tiny_whisper(tmp_path / "other")
    settings = ModelSettings(model_path=str(four_layers), encoder_path=str(other), student_layers=3)
    mixed = WhisperModelWrapper(settings).build()
    parts = [WhisperForConditionalGeneration.from_pretrained(path).state_dict() for path in (four_layers, other)]
    name = "model.encoder.layers.0.fc1.weight"
    assert torch.equal(mixed.state_dict()[name], parts[1][name])
    name = "model.decoder.embed_tokens.weight"
    assert torch.equal(mixed.state_dict()[name], parts[0][name])
    features = torch.zeros(1, 16, 100)
    assert mixed(input_features=features, decoder_input_ids=torch.tensor([[0]])).logits.shape[:2] == (1, 1)


def test_an_encoder_of_another_width_is_refused(four_layers: Path, tmp_path: Path) -> None:
    wide = tiny_whisper(tmp_path / "wide", width=32)
    with pytest.raises(BadInput, match="that encoder is 32 wide, the model's decoder 16"):
        WhisperModelWrapper(ModelSettings(model_path=str(four_layers), encoder_path=str(wide)))


@pytest.mark.parametrize(
    ("options", "word"),
    [({"from_scratch": True}, "from_scratch"), ({"tuning": "lora", "lora_merge": False}, "lora_merge")],
)
def test_what_does_not_go_with_a_student_is_refused(options: dict[str, object], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        profile_from_options("p", {"model_path": "owner/name", "student_layers": 2, **options})


def test_a_student_without_a_name_is_made_of_its_teacher() -> None:
    assert profile_from_options("p", {"teacher_path": "owner/name"}).model.model_path == "owner/name"
    both = profile_from_options("p", {"teacher_path": "owner/name", "model_path": "owner/other"})
    assert both.model.model_path == "owner/other"
