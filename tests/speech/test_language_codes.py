"""Languages as data sets write them, and when one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_speech import write_clips, write_csv
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from profiles.errors import BadInput
from speech.data.language_codes import NAMES, code_of, language_code
from tests.tasks.tiny_tasks import ProfileMaker
from training.workers.data_findings import check_data


def test_the_table_is_whispers() -> None:
    assert NAMES == LANGUAGES
    assert {name: code_of(name) for name in TO_LANGUAGE_CODE} == TO_LANGUAGE_CODE
    assert {code: code_of(code) for code in LANGUAGES} == {code: code for code in LANGUAGES}


@pytest.mark.parametrize(
    ("given", "code"),
    [
        *[("en-US", "en"), ("zh-CN", "zh"), ("zh-Hant-TW", "zh"), ("zh-yue-HK", "yue"), ("pt_BR", "pt")],
        *[("nb-NO", "no"), ("nb", "no"), ("nn-NO", "nn"), ("nob", "no"), ("no", "no"), ("Norwegian Bokmål", "no")],
        *[("jv", "jw"), ("jv_id", "jw"), ("fil", "tl"), ("fil_ph", "tl"), ("iw", "he"), ("in", "id"), ("ji", "yi")],
        *[("cmn_hans_cn", "zh"), ("yue_hant_hk", "yue"), ("deu", "de"), ("GER", "de"), ("arb", "ar"), ("pes", "fa")],
        *[("sr-Latn-RS", "sr"), ("ca-valencia", "ca"), ("de_DE.UTF-8", "de"), ("sr_RS@latin", "sr")],
        *[("Portuguese (Brazil)", "pt"), ("Filipino", "tl"), ("<|de|>", "de"), (" DE ", "de"), ("haw", "haw")],
    ],
)
def test_codes_of_data_sets(given: str, code: str) -> None:
    assert language_code(given) == code


@pytest.mark.parametrize("given", ["ga-IE", "xx", "klingon", "english-only", "12", "e", "-", "de facto"])
def test_what_whisper_does_not_know_is_refused(given: str) -> None:
    with pytest.raises(BadInput, match="train.csv, line 2: Whisper knows no language"):
        language_code(given, "train.csv, line 2")


@pytest.fixture
def spoken(tmp_path: Path) -> Path:
    """A data set whose second clip has the language that the test writes into ``LANGUAGE``."""
    rows = [(*row, code) for row, code in zip(write_clips(tmp_path, 3), ("en-US", "LANGUAGE", ""))]
    write_csv(tmp_path / "train.csv", rows, "id,audio_path,text,locale")
    return tmp_path


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("ga-IE", "train.csv, line 3, column language: Whisper knows no language 'ga-IE'"),
        ("it-IT", "train.csv, line 3, column language: model .* has no language 'it'.*it has: de, en, fr"),
        ("fr", ""),
    ],
)
def test_a_language_that_cannot_be_used_is_refused_before_a_run(
    spoken: Path, make_profile: ProfileMaker, multilingual_whisper: Path, language: str, said: str
) -> None:
    table = spoken / "train.csv"
    table.write_text(table.read_text().replace("LANGUAGE", language))
    model = spoken / "model"
    shutil.copytree(multilingual_whisper, model)
    settings = json.loads((model / "generation_config.json").read_text())
    settings |= {"is_multilingual": True, "lang_to_id": {"<|en|>": 1, "<|de|>": 2, "<|fr|>": 3}}
    (model / "generation_config.json").write_text(json.dumps(settings))
    profile = make_profile(model_path=model, dataset_path=spoken)
    if not said:
        check_data(profile)
        return
    with pytest.raises(BadInput, match=said):
        check_data(profile)


@pytest.mark.parametrize("option", ["language", "languages"])
def test_so_is_one_of_the_settings(
    spoken: Path, make_profile: ProfileMaker, english_whisper: Path, option: str
) -> None:
    (spoken / "train.csv").write_text((spoken / "train.csv").read_text().replace("LANGUAGE", "en"))
    with pytest.raises(BadInput, match=f"{option}: Whisper knows no language 'germn'"):
        check_data(make_profile(model_path=english_whisper, dataset_path=spoken, **{option: "germn"}))
