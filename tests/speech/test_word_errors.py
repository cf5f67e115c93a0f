"""Error counts by hand in many scripts: no mark that spells is lost, and nothing that does not spell counts."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech.recordings.checks import find_duplicates
from speech.recordings.recording import MissingSource, Recording
from speech.recordings.segments.matching import word_keys
from speech.recordings.segments.transcript import parse_text
from speech.scoring.spelling import american_spellings
from speech.scoring.text_normalisation import WITHOUT_SPACES, characters, fold, normalise
from speech.scoring.word_errors import ErrorRates, count_errors, normalizer_for


def counts(language: str, reference: str, hypothesis: str) -> tuple[int, int]:
    """Return wrong words and words."""
    normal = normalizer_for(language)
    errors = count_errors([normal(reference)], [normal(hypothesis)])
    return int(errors["word_edits"]), int(errors["words"])


@pytest.mark.parametrize(
    ("language", "reference", "hypothesis", "edits", "words"),
    [
        ("hi", "मेरी किताब।", "मेरा कुताबे", 2, 2),  # other vowel signs in both words
        ("hi", "क़लम फ़िल्म", "क़लम फिल्म", 1, 2),  # the first nukta composed or not; the second is missing
        ("bn", "আমি ভাত খাই", "আমি ভেত খেই", 2, 3),
        ("pa", "ਮੈਂ ਘਰ ਗਿਆ", "ਮੈ ਘਰ ਗਿਆ", 1, 3),  # bindi
        ("gu", "કેમ છો", "કામ છો", 1, 2),
        ("ta", "நான் நாளை வருகிறேன்", "நான் நாள வருகிறான்", 2, 3),
        ("te", "నేను ఇంటికి వెళ్తాను", "నేను ఇంటకి వెళ్తాను", 1, 3),
        ("kn", "ನಾನು ಮನೆಗೆ", "ನಾನ ಮನೆಗೆ", 1, 2),
        ("ml", "എന്റെ കമ്പ്യൂട്ടർ", "എന്റ കമ്പ്യൂട്ടർ", 1, 2),
        ("si", "මම ගෙදර යනවා", "මම ගදර යනවා", 1, 3),
        ("th", "น้ำแข็ง", "นำแขง", 2, 4),  # characters with their marks are the words
        ("lo", "ນ້ຳ", "ນຳ", 1, 1),
        ("my", "မြန်မာ", "မြနမာ", 1, 4),
        ("km", "ខ្មែរ", "ខ្មរ", 1, 2),
        ("zh", "今天天气很好。", "今天天气不好", 1, 6),
        ("ja", "ガラス、です", "カラスです", 1, 5),
        ("ar", "مَرْحَبًا بِكُم", "مرحبا بكم", 0, 2),  # points are left out in most texts
        ("ar", "قال نعم", "قال لا", 1, 2),
        ("he", "שָׁלוֹם עולם", "שלום עולם", 0, 2),
        ("fa", "می\u200cخواهم بروم", "میخواهم بروم", 0, 2),
        ("ru", "Мой дом", "Мои дом", 1, 2),  # й is no и
        ("el", "Ο ΣΟΦΟΣ", "ο σοφος", 0, 2),  # the last s of a word has a form of its own
        ("tr", "ISPARTA İzmir", "ısparta izmir", 0, 2),
        ("tr", "sıkıldım", "sikildim", 1, 1),
        ("de", "STRASSE über", "Straße uber", 1, 2),
        ("vi", "má mà ma", "ma mà ma", 1, 3),
        ("yo", "ọ̀bẹ ni", "ọbẹ ni", 1, 2),  # no single character has both marks
        ("ko", "한국어 좋아", "한국어 좋다", 1, 2),
        ("uk", "п’ять", "п'ять", 0, 2),
        ("uz", "o\u02bbzbek tili", "o'zbek tili", 0, 3),  # Whisper's vocabulary writes all of these
        ("haw", "\u02bb\u014dlelo", "`\u014dlelo", 0, 1),
        ("en", "don\u00b4t go", "don't go", 0, 3),
        ("fr", "l’été, <rires> (bruit)", "L'ete", 1, 2),
        ("en", "I don’t know", "I don't know", 0, 4),
        ("en", "hello\u200b wor\u00adld", "hello world", 0, 2),
    ],
)
def test_errors_by_hand(language: str, reference: str, hypothesis: str, edits: int, words: int) -> None:
    assert counts(language, reference, hypothesis) == (edits, words)


def test_british_spelling_is_no_error_whatever_the_folder_of_a_model_holds() -> None:
    assert counts("en", "the colour of the theatre was organised", "the color of the theater was organized") == (0, 7)
    assert len(american_spellings()) == 1738
    assert ErrorRates().of("grey", "gray", "en") == 0.0


def test_where_characters_are_words_the_spaces_between_them_are_no_characters() -> None:
    normal = normalizer_for("zh")
    errors = count_errors([normal("今天天气很好")], [normal("今天天气不好")])
    assert (errors["char_edits"], errors["chars"]) == (1, 6)
    errors = count_errors(["a cat"], ["a hat"])
    assert (errors["char_edits"], errors["chars"]) == (1, 5)


def test_both_ways_to_type_a_thai_am_are_one() -> None:
    assert normalise("น้ำ", "th") == normalise("นํ้า", "th") == "น้ำ"


def test_a_mark_without_a_letter_is_no_word() -> None:
    assert normalise("l´eau ❤️ 1️⃣") == "l eau 1"


@given(st.text(), st.sampled_from(["", "tr", "hi", *sorted(WITHOUT_SPACES)]))
def test_what_is_normalised_stays(text: str, language: str) -> None:
    once = normalise(text, language)
    assert normalise(once, language) == once == once.strip()
    assert fold(text, language) == fold(unicodedata.normalize("NFD", text), language)


def test_texts_that_differ_in_vowel_signs_contradict_each_other() -> None:
    clips = [(Recording(text, MissingSource(""), text, "", split="train"), "digest") for text in ("किताब", "कुताब")]
    assert [exclusion and exclusion.reason.value for exclusion in find_duplicates(clips)] == ["contradiction"] * 2


def test_a_recording_is_aligned_by_words_with_their_marks() -> None:
    assert word_keys(["मेरी", "मेरा", "İzmir"]) == ["मेरी", "मेरा", "izmir"]
    thai = parse_text("น้ำ แข็ง", "th")
    assert [thai.word(number) for number in range(len(thai.words))] == characters("น้ำแข็ง")
