"""WhisperTask: prompt and labels, weights, evaluation, adapters, saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_speech import Prepared, tiny_whisper, write_clips, write_csv
from torch import nn
from transformers import AutoProcessor, WhisperConfig, WhisperForConditionalGeneration, pipeline

from profiles.errors import BadInput
from profiles.schema import ModelSettings
from speech.whisper.decoding import generation_bound
from speech.whisper.model import unwrap
from speech.whisper.task import WhisperTask
from training.tasks.pretrained import add_lora, merged_copy


def batch_of(task: WhisperTask, count: int = 4) -> dict[str, object]:
    return dict(task.collate([task.train[i] for i in range(count)], None))


def loss_of(task: WhisperTask, model: nn.Module, batch: dict[str, object]) -> float:
    with torch.no_grad():
        return float(task.loss(model, batch))


@torch.no_grad()
def said_by(task: WhisperTask, model: nn.Module, max_new_tokens: int) -> str:
    """Transcript of the first training clip."""
    heard = task.wrapper.encode_audio(model, task.collate([task.train[0]], None)["input_features"])
    return task.wrapper.generate(model, heard, ["en"], max_new_tokens)[0].text


def test_prompt_is_what_generate_forces(prepared: Prepared, multilingual_whisper: Path) -> None:
    task = prepared(model_path=multilingual_whisper, language="german")
    model = task.build_model()
    features = batch_of(task)["input_features"]
    generation = task.wrapper.generation_to_save(["de"])
    generation.return_timestamps = False
    forced = model._retrieve_init_tokens(features, 4, generation, model.config, 100, {})
    assert forced[0].tolist() == task.wrapper.prompt("de")
    assert task.wrapper.tokenizer.decode(forced[0]) == "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"


def test_english_only_prompt(prepared: Prepared) -> None:
    task = prepared()
    model = task.build_model()
    model.generation_config.return_timestamps = False
    forced = model._retrieve_init_tokens(None, 1, model.generation_config, model.config, 100, {})
    assert forced[0].tolist() == task.wrapper.prompt("en")
    assert task.wrapper.tokenizer.decode(task.wrapper.prompt("en")) == "<|startoftranscript|><|notimestamps|>"


def test_labels_hold_the_text_and_not_the_prompt(prepared: Prepared) -> None:
    task = prepared()
    labels = batch_of(task, 3)["labels"]
    assert isinstance(labels, torch.Tensor)
    decoded = [task.wrapper.tokenizer.decode(row[row != -100]) for row in labels]
    assert decoded == [" one<|endoftext|>", " two<|endoftext|>", " three<|endoftext|>"]


def test_loss_is_the_mean_over_the_weight(prepared: Prepared) -> None:
    task = prepared()
    model = task.build_model().eval()
    whole = batch_of(task, 3)
    parts = [dict(task.collate([task.train[i]], None)) for i in range(3)]
    total = sum(loss_of(task, model, part) * task.weight(part) for part in parts)
    assert task.weight(whole) == sum(task.weight(part) for part in parts) == (3 + 3 + 5) + 2 * 3
    assert loss_of(task, model, whole) == pytest.approx(total / task.weight(whole), abs=1e-5)


def test_language_column_wins_over_the_setting(prepared: Prepared, multilingual_whisper: Path, tmp_path: Path) -> None:
    rows = [(*row, code) for row, code in zip(write_clips(tmp_path, 4), ("de", "French", "", "en"))]
    write_csv(tmp_path / "train.csv", rows, "id,audio_path,text,language")
    write_csv(tmp_path / "validation.csv", rows, "id,audio_path,text,language")
    task = prepared(model_path=multilingual_whisper, dataset_path=tmp_path, language="de")
    assert batch_of(task)["languages"] == ["de", "fr", "de", "en"]


def test_model_is_asked_for_the_language(
    prepared: Prepared, multilingual_whisper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = prepared(model_path=multilingual_whisper)
    task.build_model()
    assert task.default_language in {"en", "de", "fr"}
    assert "language is not set" in caplog.text


def test_from_scratch_needs_a_language(prepared: Prepared, multilingual_whisper: Path) -> None:
    with pytest.raises(BadInput, match="set language"):
        prepared(model_path=multilingual_whisper, from_scratch=True)


def test_unknown_language_names_the_nearest(prepared: Prepared, multilingual_whisper: Path) -> None:
    with pytest.raises(BadInput, match="did you mean 'german'"):
        prepared(model_path=multilingual_whisper, language="germn")


def test_language_the_model_has_no_token_for(prepared: Prepared, multilingual_whisper: Path) -> None:
    with pytest.raises(BadInput, match="has no language 'it'"):
        prepared(model_path=multilingual_whisper, language="it")


def test_evaluation_sums_add_up(prepared: Prepared) -> None:
    task = prepared(eval_max_new_tokens=5)
    model = task.build_model().eval()
    with torch.no_grad():
        sums = task.evaluate(model, batch_of(task), generate=True)
    assert sums["words"] == 4
    assert sums["chars"] == len("one234")  # the normaliser writes all numbers but one as digits
    metrics = task.metrics(sums)
    assert set(metrics) == {"loss", "wer", "cer", "cut"}  # random weights write no end
    assert metrics["loss"] == pytest.approx(sums["loss_sum"] / task.weight(batch_of(task)))


def test_evaluation_without_generation_gives_the_loss_alone(prepared: Prepared) -> None:
    task = prepared(eval_generate=False)
    with torch.no_grad():
        sums = task.evaluate(task.build_model().eval(), batch_of(task), generate=False)
    assert set(task.metrics(sums)) == {"loss"}
    assert task.monitor == "loss"


@pytest.mark.slow
def test_generation_is_bounded_by_the_setting_and_the_positions(prepared: Prepared) -> None:
    task = prepared()
    model = task.build_model().eval()
    never_ends = torch.nn.Parameter(torch.zeros_like(model.proj_out.weight))  # all logits equal: token 0 for ever
    model.proj_out.weight = never_ends
    lengths = [len(said_by(task, model, bound)) for bound in (3, 1000)]
    assert lengths == [3, task.wrapper.max_positions - 2]


class Writes(nn.Module):
    """In place of the output layer: writes token 7 until ``lengths`` tokens of a row are out, then the end token."""

    def __init__(self, task: WhisperTask, lengths: list[int]) -> None:
        super().__init__()
        self.size, self.end = task.wrapper.config.vocab_size, int(task.wrapper.tokenizer.eos_token_id)
        self.lengths, self.written = lengths, 0

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scores = torch.zeros(*states.shape[:-1], self.size)
        for row, length in enumerate(self.lengths):
            scores[row, -1, self.end if self.written >= length else 7] = 1.0
        self.written += states.shape[1] == 1 or self.written == 0
        return scores


def writing(task: WhisperTask, lengths: list[int]) -> nn.Module:
    """A model whose transcripts have these lengths; the loss is left out, it is not the matter."""
    model = task.build_model().eval()
    model.proj_out = Writes(task, lengths)
    task._loss = lambda *_, **__: torch.tensor(0.0)
    return model


@pytest.mark.parametrize(("cap", "bound"), [(0, 20), (3, 3), (200, 20)])
def test_texts_are_bounded_by_the_longest_reference_of_their_split(
    prepared: Prepared, tmp_path: Path, cap: int, bound: int
) -> None:
    rows = write_clips(tmp_path, 4)
    write_csv(tmp_path / "train.csv", rows)
    longest = [(name, audio, "nine words" if name == "clip3" else "a") for name, audio, _ in rows]
    write_csv(tmp_path / "validation.csv", longest)
    model = tiny_whisper(tmp_path / "model", positions=40)
    task = prepared(model_path=model, dataset_path=tmp_path, eval_max_new_tokens=cap)
    data = task.evaluation["validation"]
    batch = dict(task.collate([data[i] for i in range(3)], None))  # the longest one is in another batch
    assert generation_bound(batch["longest"], cap, 38) == bound
    with torch.no_grad():
        sums = task.evaluate(writing(task, [bound - 1, bound, 99]), batch, generate=True)
    assert (sums["texts"], sums["cut_texts"]) == (3, 2)
    assert task.metrics(sums)["cut"] == pytest.approx(2 / 3)


@given(st.integers(1, 500), st.integers(0, 500), st.integers(1, 500))
def test_bound_holds_every_reference_unless_a_person_sets_it_lower(longest: int, cap: int, room: int) -> None:
    bound = generation_bound(longest, cap, room)
    assert 1 <= bound <= room
    assert bound <= (cap or bound)
    assert bound > longest or bound in (cap, room)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_adapters_only(prepared: Prepared, checkpointing: bool) -> None:
    task = prepared(tuning="lora", lora_rank=2, gradient_checkpointing=checkpointing)
    model = task.build_model().train()
    task.loss(model, batch_of(task)).backward()
    trained = {name for name, weights in model.named_parameters() if weights.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained} == {
        "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2",
    }  # fmt: skip
    missing = [name for name, weights in model.named_parameters() if weights.requires_grad and weights.grad is None]
    assert missing == []


def test_gradient_checkpointing_gives_the_same_gradients(prepared: Prepared) -> None:
    gradients = []
    for checkpointing in (False, True):
        task = prepared(gradient_checkpointing=checkpointing)
        model = task.build_model().train()
        task.loss(model, batch_of(task)).backward()
        gradients.append(model.model.encoder.layers[0].fc1.weight.grad)
        assert model.model.encoder.gradient_checkpointing is checkpointing
    torch.testing.assert_close(*gradients)


def test_merged_weights_take_no_memory_that_cannot_be_taken_away(prepared: Prepared, tmp_path: Path) -> None:
    model = prepared(tuning="lora", lora_rank=2).build_model()
    layer = unwrap(model).model.decoder.layers[0].fc1
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
    whole = merged_copy(model, lambda: pytest.fail("the base is there"), tmp_path)
    weight = whole.get_submodule("model.decoder.layers.0.fc1").weight
    assert weight.untyped_storage().filename is not None
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []
    torch.testing.assert_close(weight, layer.base_layer.weight + layer.get_delta_weight("default"))


@pytest.mark.slow
def test_adapters_over_fewer_bits_are_merged_into_the_weights_as_they_are_read_again(
    prepared: Prepared, english_whisper: Path, tmp_path: Path
) -> None:
    """Rounded ones, as the live model holds, must not be saved. What rounds here is not bitsandbytes, which a test of
    its own needs."""
    read: Any = WhisperForConditionalGeneration.from_pretrained
    model = prepared(tuning="lora", lora_rank=2).build_model()
    base, layer = unwrap(model), unwrap(model).model.decoder.layers[0].fc1
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(0.5)
        for name, parameter in base.named_parameters():
            if name.endswith("base_layer.weight"):
                parameter.data = parameter.round(decimals=1).to(torch.bfloat16)
    whole = merged_copy(model, lambda: read(english_whisper, dtype=torch.float16), tmp_path)
    before = read(english_whisper, dtype=torch.float16).float().get_submodule("model.decoder.layers.0")
    after = whole.get_submodule("model.decoder.layers.0")
    torch.testing.assert_close(after.fc1.weight, before.fc1.weight + layer.get_delta_weight("default"))
    assert torch.equal(after.encoder_attn.q_proj.bias, before.encoder_attn.q_proj.bias)
    assert {parameter.dtype for parameter in whole.parameters()} == {torch.float32}
    assert whole.config.dtype == torch.float32 and [path for path in tmp_path.iterdir() if path.is_file()] == []


def kept_memory() -> float:
    """Megabytes of this process that the system can only take away by writing them to swap space."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells it")
def test_merging_leaves_no_holes_as_large_as_the_weights(tmp_path: Path) -> None:
    sizes = {"d_model": 512, "encoder_layers": 8, "decoder_layers": 1, "encoder_ffn_dim": 2048, "vocab_size": 60}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_source_positions": 10}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    base = WhisperForConditionalGeneration(WhisperConfig(**sizes, **heads, **tokens))
    base.name_or_path = "random"
    settings = ModelSettings(model_path="random", tuning="lora", lora_rank=2, lora_target_modules="all-linear")
    model = add_lora(base, settings, ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"))
    before = kept_memory()
    whole = merged_copy(model, lambda: pytest.fail("the base is there"), tmp_path)
    assert kept_memory() - before < 25  # of 110 MB that are merged
    del whole


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_frozen_encoder_has_nothing_to_train(prepared: Prepared, tuning: str) -> None:
    task = prepared(tuning=tuning, freeze_encoder=True)
    trained = [name for name, weights in task.build_model().named_parameters() if weights.requires_grad]
    assert trained
    assert not [name for name in trained if ".encoder." in name]


def test_the_encoders_sinusoids_are_not_trained(prepared: Prepared) -> None:
    trained = {name for name, weight in prepared().build_model().named_parameters() if weight.requires_grad}
    assert {name for name in trained if "embed_positions" in name} == {"model.decoder.embed_positions.weight"}


def test_lora_target_that_is_not_there(prepared: Prepared) -> None:
    task = prepared(tuning="lora", lora_target_modules="q_proj, value_proj")
    with pytest.raises(BadInput, match="no layer 'value_proj' in the model; it has: fc1, fc2, k_proj"):
        task.build_model()


def disturb(model: nn.Module) -> None:
    """Stand in for training: change every trainable weight."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.requires_grad:
                weights.add_(0.1 * torch.randn_like(weights))


@pytest.mark.slow
@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_saved_folder_opens_in_pipeline_and_says_the_same(
    prepared: Prepared, speech_folder: Path, tmp_path: Path, tuning: str
) -> None:
    task = prepared(tuning=tuning)
    model = task.build_model().eval()
    disturb(model)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    task.save(model, tmp_path)
    for name, weights in model.state_dict().items():
        assert torch.equal(weights, before[name])
    batch = batch_of(task, 1)
    again = WhisperForConditionalGeneration.from_pretrained(tmp_path)
    assert loss_of(task, again, batch) == pytest.approx(loss_of(task, model, batch), abs=1e-5)
    listen = pipeline("automatic-speech-recognition", model=str(tmp_path))
    samples, rate = soundfile.read(speech_folder / "audio/clip0.wav", dtype="float32")  # a path would need ffmpeg
    said = listen({"raw": samples, "sampling_rate": rate}, generate_kwargs={"num_beams": 1})
    assert said["text"].strip() == said_by(task, model, 1000)
    assert AutoProcessor.from_pretrained(tmp_path).feature_extractor.feature_size == 16


@pytest.mark.slow
def test_unmerged_adapter_folder_is_a_model_path(prepared: Prepared, tmp_path: Path) -> None:
    task = prepared(tuning="lora", lora_merge=False)
    model = task.build_model().eval()
    disturb(model)
    task.save(model, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    assert "lora_merge" in (tmp_path / "README.md").read_text()
    again = prepared(model_path=tmp_path).build_model().eval()
    assert loss_of(task, again, batch_of(task)) == pytest.approx(loss_of(task, model, batch_of(task)), abs=1e-5)


def test_saved_model_keeps_the_one_language(prepared: Prepared, multilingual_whisper: Path, tmp_path: Path) -> None:
    task = prepared(model_path=multilingual_whisper, language="french")
    task.save(task.build_model(), tmp_path)
    assert prepared(model_path=tmp_path).default_language == "fr"


def test_augmentation_changes_training_batches_only(prepared: Prepared) -> None:
    task = prepared(augmentation=1.0)
    sample = [task.train[0]]
    plain = task.collate(sample, None)["input_features"]
    first, second = (task.collate(sample, [np.random.default_rng(3)])["input_features"] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
