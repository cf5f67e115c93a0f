"""Samples before and after training, in the report and in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.html_report.evidence import read_evidence
from app.html_report.page import page
from app.html_report.showcase import showcase
from app.run_view.tables.showcase import showcase_document, showcase_lines
from speech.report.recordings import MOST_SOUND
from tests.report.report_runs import write_run
from training.tasks.outputs.predictions import FOLDER
from training.tasks.outputs.showcase import NAME, Sample, Showcase

HOSTILE = "<script>alert(1)</script>"


def made(kind: Any, **fields: Any) -> Showcase:
    sample = Sample.model_validate({"id": HOSTILE, "why": "improved most", **fields})
    return Showcase(kind=kind, split="test", step=9, of=3, samples=(sample,))


CLIP: dict[str, Any] = {
    "reference": "open the door",
    "before": "over a",
    "after": "open the",
    "first": 1,
    "last": 1 / 3,
}


def test_a_clip_can_be_heard_and_differing_words_are_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    made("speech", **CLIP, sound="QUJD").write(run / FOLDER / NAME)
    whole = page(read_evidence(run))
    part = whole[whole.index("<h2>Before and after</h2>") :].split("</section>")[0]
    assert '<audio controls preload="metadata" src="data:audio/mpeg;base64,QUJD"></audio>' in part
    assert "<dt>after</dt><dd>open the <del>door</del></dd>" in part and "<mark>over</mark>" in part
    assert "WER 100.0 % → 33.3 %" in part and "Of 3 held-out clips" in part
    assert HOSTILE not in part and "&lt;script&gt;" in part
    longest = 3 * 90_000 * 4 // 3  # of sound, see test_thirty_seconds_of_sound_are_small
    assert len(whole) + longest + MOST_SOUND < 2_000_000


def test_a_clip_without_sound_says_why() -> None:
    assert "No such file" in showcase(made("speech", **CLIP, soundless="No such file"))


def test_texts_and_items_are_shown_too(tmp_path: Path) -> None:
    text = showcase(made("text", prompt="once upon", reference="a time", before="xx", after="a tide"))
    assert "<dt>prompt</dt><dd>once upon</dd><dt>before</dt><dd>xx</dd><dt>after</dt><dd>a tide</dd>" in text
    item = showcase(made("items", reference="target 7", first=2.5, last=0.25))
    assert "loss 2.500 → 0.2500" in item and "target 7" in item


def test_a_run_that_shows_nothing_has_no_such_part(tmp_path: Path) -> None:
    run = write_run(tmp_path, [])
    assert "Before and after" not in page(read_evidence(run))
    assert showcase_lines(run) == [] and showcase_document(run) is None


def test_a_terminal_marks_words_by_signs(tmp_path: Path) -> None:
    made("speech", **CLIP | {"id": "c7"}, sound="QUJD").write(tmp_path / FOLDER / NAME)
    assert showcase_lines(tmp_path) == [
        "Held-out clips before and after training, step 9; *wrong*, (left out)",
        "  improved most, c7, WER 100.0 % -> 33.3 %",
        "    said    open the door",
        "    before  (open) *over* (the) *a* (door)",
        "    after   open the (door)",
    ]
    found = showcase_document(tmp_path)
    assert found is not None and "sound" not in found["samples"][0] and found["samples"][0]["after"] == "open the"
