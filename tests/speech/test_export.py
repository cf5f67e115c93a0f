"""Exports: written whole or not at all, the same texts as the original, a manifest that is true."""

from __future__ import annotations

import importlib
import json
import logging
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_speech import WORDS, tiny_tokenizer
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from profiles.errors import BadInput, RunFailed
from profiles.installation import package_line
from speech.export import exporters
from speech.export.export import ExportRequest, export
from speech.export.exporters import CheckResult, Exporter, TranscriptPair, compare
from speech.export.formats import FORMATS, ModelSource, find_format, find_source
from speech.export.ggml_model import q5_0, q8_0
from speech.whisper.model import WhisperModelWrapper
from training.records.plan import RunMetadata
from training.records.run_files import sha256


def request_of(trained: Path, out: Path, to: str = "hf", **more: Any) -> ExportRequest:
    """An export of the four words' model, checked with their four recordings."""
    files = tuple(trained / f"audio/clip{index}.wav" for index in range(3))
    source = more.pop("source", None) or ModelSource(trained / "model", None)
    return ExportRequest(source, FORMATS[to], out, **{"files": files, **more})


def told(text: str) -> None:
    """Stages that nobody watches."""


def checked(request: ExportRequest, exporter: Exporter | None = None) -> CheckResult:
    """Export, and return what was heard."""
    outcome = export(request, told, exporter)
    assert outcome.result is not None
    return outcome.result


@pytest.mark.slow
def test_ctranslate2_writes_the_same_texts(trained_whisper: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    outcome = checked(request_of(trained_whisper, tmp_path / "out", "ctranslate2"))
    assert [(one.original, one.exported) for one in outcome.transcripts] == [(word, word) for word in WORDS[:3]]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["check"] == {"checked": True, "samples": 3, "texts_the_same": 3, "words_differing": 0, "bound": 0.1}
    assert manifest["source"]["sha256"] == {
        "model.safetensors": sha256(trained_whisper / "model" / "model.safetensors")
    }
    found = {path.name for path in (tmp_path / "out").iterdir()} - {"manifest.json"}
    assert {"model.bin", "tokenizer.json", "preprocessor_config.json"} <= found
    assert {file["name"]: file["sha256"] for file in manifest["files"]} == {
        name: sha256(tmp_path / "out" / name) for name in found
    }
    assert not any(word in json.dumps(manifest["check"]) for word in WORDS)


@pytest.mark.slow
def test_ctranslate2_in_whole_numbers_is_smaller(trained_whisper: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    sizes = []
    for quantize in ("", "int8"):
        out = tmp_path / f"out{quantize}"
        export(request_of(trained_whisper, out, "ctranslate2", quantize=quantize, bound=9.0), told)
        sizes.append((out / "model.bin").stat().st_size)
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.slow
def test_a_plain_folder_has_a_card_and_opens(trained_whisper: Path, tmp_path: Path) -> None:
    metrics = {"before": {"validation": {"wer": 0.8, "loss": 3.0}}, "after": {"validation": {"wer": 0.053}}}
    config = {
        "model": {"model_path": "openai/whisper-tiny", "tuning": "full"},
        "data": {"dataset_path": str(trained_whisper)},
    }
    run = RunMetadata(
        run_id="20261122-000000-abcd", start_time="", profile="mine", dataset="/home/ann/re|cordings", config=config,
        metrics=metrics,
    )  # fmt: skip
    source = ModelSource(trained_whisper / "model", run)
    outcome = checked(request_of(trained_whisper, tmp_path / "out", source=source, files=(), quantize="float16"))
    assert outcome.identical == 3  # of the validation split
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| validation | WER | 80.0 % | 5.3 % |" in card
    assert 'license: "apache-2.0"' in card
    assert "ann" not in card
    assert "| data | re cordings |" in card
    wrapper = WhisperModelWrapper(settings_of(tmp_path / "out"))
    assert wrapper.build().get_parameter("proj_out.weight").dtype == torch.float32
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 0.6 * (
        trained_whisper / "model" / "model.safetensors"
    ).stat().st_size


def settings_of(folder: Path) -> Any:
    from profiles.schema import ModelSettings

    return ModelSettings(model_path=str(folder))


@pytest.mark.slow
def test_adapters_are_merged_or_stay_apart(trained_whisper: Path, adapter: Path, tmp_path: Path) -> None:
    source = ModelSource(adapter, None)
    merged = checked(request_of(trained_whisper, tmp_path / "merged", source=source))
    assert merged.identical == 3
    assert (tmp_path / "merged" / "config.json").is_file()
    apart = export(request_of(trained_whisper, tmp_path / "apart", source=source, adapter=True), told)
    assert apart.manifest["check"]["checked"] is False
    assert (tmp_path / "apart" / "adapter_model.safetensors").is_file()
    assert "PeftModel" in (tmp_path / "apart" / "README.md").read_text()


def test_other_texts_are_refused_and_nothing_is_left(trained_whisper: Path, tmp_path: Path) -> None:
    other = Exporter(exporters.exporter_of("hf").write, lambda *_: ["one", "two", "something"])
    with pytest.raises(RunFailed, match=r"differs in 33 % of the words: clip2.wav: 'three' became 'something'"):
        export(request_of(trained_whisper, tmp_path / "deep" / "out"), told, other)
    assert list(tmp_path.iterdir()) == []
    allowed = checked(request_of(trained_whisper, tmp_path / "deep" / "out", bound=0.4), other)
    assert allowed.transcripts[2] == TranscriptPair("clip2.wav", "three", "something")


def test_nothing_is_overwritten_unasked(trained_whisper: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(request_of(trained_whisper, out, check=False), told)
    (out / "note.txt").write_text("mine")
    with pytest.raises(BadInput, match="this export exists"):
        export(request_of(trained_whisper, out, check=False), told)
    assert (out / "note.txt").exists()
    export(request_of(trained_whisper, out, check=False, overwrite=True), told)
    assert not (out / "note.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    strange = tmp_path / "strange"
    strange.mkdir()
    with pytest.raises(BadInput, match="not an export of Muster"):
        export(request_of(trained_whisper, strange, overwrite=True), told)


def test_a_failed_export_leaves_the_old_one(trained_whisper: Path, tmp_path: Path) -> None:
    export(request_of(trained_whisper, tmp_path / "out", check=False), told)

    def broken(*_: object) -> None:
        raise BadInput("the disk is full")

    request = request_of(trained_whisper, tmp_path / "out", check=False, overwrite=True)
    with pytest.raises(BadInput, match="disk is full"):
        export(request, told, Exporter(broken, broken))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_missing_converter_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput) as error:
        find_format("ctranslate2", "")
    assert error.value.hint == package_line("ctranslate2")
    with pytest.raises(BadInput, match="--quantize q9: gguf has no such precision"):
        find_format("gguf", "q9")
    with pytest.raises(BadInput, match="choose among: hf, ctranslate2, gguf"):
        find_format("ggfu", "")


def test_whisper_cpp_gets_no_model_that_it_would_misread(trained_whisper: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="whisper.cpp cannot run model .*: its vocabulary is not that of OpenAI"):
        export(request_of(trained_whisper, tmp_path / "out", "gguf", check=False), told)
    assert list(tmp_path.iterdir()) == []


WORD = "ab"


def openai_like(folder: Path) -> Path:
    """A Whisper with the vocabulary and window of OpenAI's English-only ones, and little else; it hears ``WORD``."""
    tokenizer = tiny_tokenizer()
    symbols = sorted(token for token in tokenizer.get_vocab() if not token.startswith("<|"))
    pairs = [one + other for one in symbols for other in symbols][: 50256 - len(symbols)]
    text = {token: index for index, token in enumerate([*symbols, *pairs])}
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|x{index}|>" for index in range(104)), "<|notimestamps|>"]
    from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

    tokenizer = WhisperTokenizer(vocab={**text, **{name: 50256 + i for i, name in enumerate(special)}}, merges=[])
    tokenizer.add_special_tokens({"extra_special_tokens": special[1:]})
    ids = {"decoder_start_token_id": 50257, "eos_token_id": 50256, "pad_token_id": 50256, "bos_token_id": 50256}
    size = {"d_model": 32, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 80}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    config = WhisperConfig(vocab_size=51864, begin_suppress_tokens=None, **ids, **size, **heads)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    decoder = model.model.decoder
    with torch.no_grad():
        decoder.layer_norm.bias[0] = 10.0
        decoder.embed_tokens.weight[:, 0] = 0.0
        decoder.embed_tokens.weight[text[WORD], 0] = 4.0
        decoder.embed_tokens.weight[ids["eos_token_id"], 0] = 8.0  # the end is likelier, and comes not first
    model.generation_config = GenerationConfig(**ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)
    return folder


def parsed(data: bytes) -> tuple[tuple[int, ...], list[bytes], dict[str, tuple[int, tuple[int, ...], bytes]]]:
    """Sizes, tokens and weights (type, shape, data) of a ggml file of whisper.cpp."""
    at = 0

    def take(form: str) -> tuple[Any, ...]:
        nonlocal at
        found = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return found

    sizes = take("12I")
    mels, bins = take("2i")
    at += 4 * mels * bins
    tokens = [take(f"{take('I')[0]}s")[0] for _ in range(take("i")[0])]
    weights = {}
    while at < len(data):
        dimensions, length, kind = take("3i")
        shape = tuple(reversed(take(f"{dimensions}i")))
        name = take(f"{length}s")[0].decode()
        block, size = {0: (1, 4), 1: (1, 2), 8: (32, 34), 6: (32, 22)}[kind]
        weights[name] = kind, shape, take(f"{int(np.prod(shape)) // block * size}s")[0]
    return sizes, tokens, weights


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["", "q8_0"])
def test_whisper_cpp_reads_what_was_written(tmp_path: Path, quantize: str) -> None:
    folder = openai_like(tmp_path / "model")
    source = ModelSource(folder, None)
    export(ExportRequest(source, FORMATS["gguf"], tmp_path / "out", quantize, check=False), told)
    file = tmp_path / "out" / "ggml-model.bin"
    sizes, tokens, weights = parsed(file.read_bytes())
    assert sizes == (0x67676D6C, 51864, 1500, 32, 2, 1, 448, 32, 2, 1, 80, 2007 if quantize else 1)
    assert len(tokens) == 50256
    assert sorted(tokens[:256]) == [bytes([byte]) for byte in range(256)]
    state = WhisperForConditionalGeneration.from_pretrained(folder).state_dict()
    assert len(weights) == len(state) - 1  # the output shares the embedding's
    kind, shape, data = weights["decoder.blocks.0.cross_attn.query.weight"]
    expected = state["model.decoder.layers.0.encoder_attn.q_proj.weight"].numpy()
    assert (kind, shape) == (8 if quantize else 1, (32, 32))
    if not quantize:
        np.testing.assert_array_equal(np.frombuffer(data, "<f2").reshape(shape), expected.astype(np.float16))
    assert weights["encoder.conv1.bias"][:2] == (0, (32, 1))
    pytest.importorskip("pywhispercpp")
    from speech.export import ggml_model

    wrapper = WhisperModelWrapper(settings_of(folder))
    clip = SimpleNamespace(samples=np.zeros(16000, np.float32), language="en")
    texts = ggml_model.EXPORTER.transcribe(tmp_path / "out", exporters.MergedWhisper(folder, wrapper, None), [clip])
    assert texts == [WORD]
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(RunFailed, match="whisper.cpp cannot run the exported model"):
        ggml_model.EXPORTER.transcribe(tmp_path / "out", exporters.MergedWhisper(folder, wrapper, None), [clip])


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([1e-6, 1.0, 300.0]))
def test_blocks_stand_for_the_weights(seed: int, size: float) -> None:
    weight = (np.random.default_rng(seed).normal(size=(3, 64)) * size).astype(np.float32)
    weight[0, :32] = 0
    blocks = weight.reshape(-1, 32)
    eight = np.frombuffer(q8_0(weight), np.uint8).reshape(-1, 34)
    scale = eight[:, :2].copy().view("<f2").astype(np.float32)
    error = np.abs(scale * eight[:, 2:].view(np.int8) - blocks)
    assert (error <= 0.51 * scale + 0.001 * np.abs(blocks) + 1e-7 * 127).all()
    five = np.frombuffer(q5_0(weight), np.uint8).reshape(-1, 22)
    scale = five[:, :2].copy().view("<f2").astype(np.float32)
    fifth = np.unpackbits(five[:, 2:6], axis=1, bitorder="little")
    low = np.concatenate([five[:, 6:] & 15, five[:, 6:] >> 4], axis=1)
    numbers = (low | (fifth << 4)).astype(np.float32) - 16
    error = np.abs(scale * numbers - blocks)
    assert (error <= 1.01 * np.abs(scale) + 0.001 * np.abs(blocks) + 1e-7 * 16).all()


@pytest.mark.slow
def test_onnx_writes_the_same_texts(trained_whisper: Path, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    outcome = checked(request_of(trained_whisper, tmp_path / "out", "onnx"))
    assert outcome.identical == 3
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"encoder_model.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx", "tokenizer.json"} <= names


@pytest.mark.slow
def test_core_ml_goes_beside_the_ggml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for coremltools: what it is asked for, and where it goes."""
    asked: dict[str, Any] = {}

    def convert(traced: Any, **options: Any) -> Any:
        asked.update(options, shape=tuple(traced(torch.zeros(1, 80, 3000)).shape))
        return SimpleNamespace(save=lambda path: Path(path).mkdir())

    fake = SimpleNamespace(
        convert=convert,
        TensorType=lambda name, shape=(): (name, shape),
        ComputeUnit=SimpleNamespace(ALL="all"),
    )
    monkeypatch.setitem(sys.modules, "coremltools", fake)
    monkeypatch.setattr("shutil.which", lambda name: None)
    source = ModelSource(openai_like(tmp_path / "model"), None)
    export(ExportRequest(source, FORMATS["coreml"], tmp_path / "out", check=False), told)
    monkeypatch.delitem(sys.modules, "speech.export.coreml_model")
    assert asked["inputs"] == [("logmel_data", (1, 80, 3000))]
    assert asked["outputs"] == [("output", ())]
    assert asked["shape"] == (1, 1500, 32)
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"ggml-model.bin", "ggml-model-encoder.mlpackage"}


def test_core_mls_import_says_nothing_off_a_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warning = 'import logging\nlogging.getLogger(__name__ + ".models").warning("Failed to load _MLModelProxy")\n'
    (tmp_path / "coremltools.py").write_text(warning)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(logging.getLogger("coremltools"), "level", logging.NOTSET)
    for name in ("coremltools", "speech.export.coreml_model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # both are forgotten at the end
        del sys.modules[name]
    importlib.import_module("speech.export.coreml_model")
    assert not caplog.records


def test_without_recordings_it_says_how_to_give_some(trained_whisper: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no recordings to check .*--check-with FILE.* --no-check"):
        export(request_of(trained_whisper, tmp_path / "out", files=()), told)
    broken = tmp_path / "broken.wav"
    broken.write_text("no sound")
    with pytest.raises(BadInput, match=r"broken.wav: not a readable sound file"):
        export(request_of(trained_whisper, tmp_path / "out", files=(broken,)), told)


def test_difference_counts_normalised_words() -> None:
    clips = [SimpleNamespace(name=str(index), language="en") for index in range(2)]
    found = compare(clips, ["Left, right.", "stop"], ["left right", "stop stop"])
    assert found.word_difference == pytest.approx(1 / 3)
    assert found.identical == 0
    silent_ones = compare(clips, ["", ""], ["", "word"])
    assert silent_ones.word_difference == 1.0
    assert compare(clips, ["\ufffd", "..."], ["\ufffd", "..."]).word_difference == 0.0  # nothing in them is a word


def test_the_run_of_a_model_is_found(trained_whisper: Path, tmp_path: Path) -> None:
    run = tmp_path / "20261122-000000-abcd-mine"
    run.mkdir()
    shutil.copytree(trained_whisper / "model", run / "model")
    metadata = RunMetadata(run_id="20261122-000000-abcd", start_time="2026-11-22T00:00:00+00:00", profile="mine")
    (run / "metadata.json").write_text(metadata.model_dump_json())
    source = find_source(tmp_path, "mine")
    assert source.name == "mine"
    assert source.run is not None
    assert (source.base, source.dataset) == ("", "")


@pytest.mark.slow
def test_a_model_of_two_languages_is_checked_in_the_language_it_hears(
    trained_whisper: Path, multilingual_whisper: Path, tmp_path: Path
) -> None:
    source = ModelSource(multilingual_whisper, None)
    outcome = checked(request_of(trained_whisper, tmp_path / "out", source=source))
    assert outcome.identical == 3


@pytest.mark.parametrize("languages", [["fr"], ["de", "en"]])
def test_an_exported_model_keeps_its_languages(
    multilingual_whisper: Path, trained_whisper: Path, tmp_path: Path, languages: list[str]
) -> None:
    wrapper, source = WhisperModelWrapper(settings_of(multilingual_whisper)), ModelSource(tmp_path / "model", None)
    wrapper.save(wrapper.build(), source.folder, languages)
    export(request_of(trained_whisper, tmp_path / "out", source=source, check=False), told)
    saved = WhisperModelWrapper(settings_of(tmp_path / "out"))
    assert saved.generation.trained_languages == languages
    assert saved.default_language == ("fr" if languages == ["fr"] else "")


def test_only_a_whisper_is_exported(trained_whisper: Path, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(BadInput, match="'gpt2', not whisper") as caught:
        export(request_of(trained_whisper, tmp_path / "out", source=ModelSource(tmp_path / "gpt", None)), told)
    assert "only a Whisper is exported" in caught.value.hint and not (tmp_path / "out").exists()
