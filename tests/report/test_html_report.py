"""The report as a file, and in a real browser that may not load anything."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from app.demo.services import write_demo_run
from app.html_report.charts import charts_of
from app.html_report.evidence import read_evidence
from app.html_report.page import body, embedded, show_report, write_report
from app.html_report.sections import label
from cli_typer import main
from distributed.planning.documents.document import Choice
from distributed.planning.feedback import PredictionComparison
from profiles.errors import BadInput
from tests.app.app_events import evaluation, step, sync
from tests.report.report_runs import write_run
from tests.web.chromium import Page, chromium, needs_chromium
from training.records.events import ErrorEvent, Event, MemberEvent, RunEvent, SnapshotEvent, StepEvent, WarningEvent
from training.records.run_folder import RunFolder
from training.tasks.outputs.predictions import BEFORE, Prediction, write_predictions
from training.tasks.outputs.predictions import FOLDER as EVALUATION
from training.tasks.outputs.predictions import NAME as PREDICTIONS
from training.tasks.outputs.showcase import NAME as SHOWCASE
from training.tasks.outputs.showcase import Sample, Showcase

pytestmark = pytest.mark.slow

HOSTILE = "</script><script>window.hit=1</script><img src=http://evil.test/x onerror=window.hit=1>\x1b[31m\u202e"


def events(name: str = "worker") -> list[Event]:
    start: list[Event] = [RunEvent(status="running", total_steps=40, time=0)]
    start += [MemberEvent(member=rank, status="joined", name=f"{name}-{rank}", device="cpu", time=0) for rank in (0, 1)]
    steps = [step(n, member=rank, loss=2 / n + rank, bytes_sent=7) for n in range(1, 41) for rank in (0, 1)]
    syncs = [sync(n, member=rank, correlation=1 - 0.125 * n * rank) for n in range(1, 5) for rank in (0, 1)]
    return [*start, evaluation(0, 0.9), *steps, *syncs, evaluation(40, 0.2)]


def hostile_events() -> list[Event]:
    lost = MemberEvent(member=0, status="lost", name=HOSTILE, message=HOSTILE, time=50)
    said = [WarningEvent(message=HOSTILE, time=50), ErrorEvent(member=0, message=HOSTILE, hint=HOSTILE, time=51)]
    result = evaluation(40, 0.3, HOSTILE).model_copy(update={"metrics": {HOSTILE: 1.0, "wer": 0.4}})
    return [*events(HOSTILE), result, lost, *said]


def shown(path: Path) -> str:
    evidence = read_evidence(path)
    return body(evidence, charts_of(evidence))


@pytest.mark.parametrize(("template", "words"), [("{{ messages }}", " chat "), ("", " generate ")])
def test_a_report_says_how_a_language_model_is_asked(tmp_path: Path, template: str, words: str) -> None:
    run = write_run(tmp_path, events())
    (run / "model").mkdir()
    (run / "model/config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    (run / "model/tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert f"{words}{run / 'model'}" in shown(run)


def test_a_report_says_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    run = write_run(tmp_path, events(), strategy_reason="twice as fast")
    page = shown(run)
    for words in ("twice as fast", "worker-1", "90.0 % → 20.0 %", "train p", "no finished model", "torch"):
        assert words in page
    assert "no prediction was kept with this run" in page
    charts = {chart.id: chart for chart in charts_of(read_evidence(run))}
    usual = {"loss", "rates", "learning-rate", "throughput", "time", "bytes", "syncs"}
    assert charts.keys() == {*usual, "correlation"}
    assert charts["correlation"].figure["data"][0]["y"][-1] == 0.75 and "1: the same. Last: 0.75." in page


def test_lines_of_one_chart_differ_without_their_colours(tmp_path: Path) -> None:
    measured = [evaluation(40, 0.5, split).model_copy(update={"metrics": {"wer": 0.5, "cer": 0.3}})
                for split in ("validation", "test")]  # fmt: skip
    charts = {chart.id: chart for chart in charts_of(read_evidence(write_run(tmp_path, [*events(), *measured])))}
    signs = [line["marker"]["symbol"] for line in charts["rates"].figure["data"]]
    assert len(set(signs)) == len(signs) > 2


def test_long_names_are_told_apart_and_whole_under_the_pointer(tmp_path: Path) -> None:
    name = "laboratory-of-the-university-of-applied-sciences-desk"
    lost = MemberEvent(member=1, status="lost", name=f"{name}-1", message="gone", time=50)
    charts = {chart.id: chart.figure for chart in charts_of(read_evidence(write_run(tmp_path, [*events(name), lost])))}
    bars = charts["time"]["data"][0]
    assert bars["y"] == [f"laboratory-of-the-u…lied-sciences-desk-{rank} ({rank})" for rank in (0, 1)]
    assert bars["customdata"] == [f"{name}-0", f"{name}-1"]
    assert [(line["name"][-6:], line["meta"]) for line in charts["syncs"]["data"]] == [
        ("desk-0", f"{name}-0"), ("desk-1", f"{name}-1")
    ]  # fmt: skip
    (gone,) = charts["loss"]["layout"]["annotations"]
    assert gone["text"].endswith("desk-1 lost") and gone["hovertext"] == f"{name}-1 lost"
    assert f'"{name}-1 ' in json.dumps(charts["loss"]["data"])  # of the machines below


def test_a_run_without_a_step_still_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path, [ErrorEvent(message="no data", time=1)], status="failed", error_message="no data")
    (run / "plan.json").write_text("broken")
    page = shown(run)
    assert "No step was taken" in page
    assert page.count("no data") == 2
    assert charts_of(read_evidence(run)) == []


def test_a_stop_on_request_is_no_error(tmp_path: Path) -> None:
    page = shown(write_run(tmp_path, events(), status="cancelled", error_message="the snapshot of step 40 is kept"))
    assert '<span class="status calm">stopped</span>' in page
    assert "<p>the snapshot of step 40 is kept</p>" in page
    assert 'class="error"' not in page


def test_predicted_stands_beside_measured(tmp_path: Path) -> None:
    choice = Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b"))
    both: dict[str, Any] = {"predicted_step": 0.5, "measured_step": 0.6, "predicted_wait": 0.1, "measured_wait": 0.2}
    shares = {"predicted_share": 0.2, "measured_share": 0.3, "predicted_bytes_per_hour": 1e9}
    found = PredictionComparison(choice=choice, steps=40, members=(), measured_bytes_per_hour=2e9, **both, **shares)
    run = write_run(tmp_path, events(), metrics={"prediction": found.document()})
    page = shown(run)
    assert "500 ms" in page and "600 ms" in page and "1.20" in page
    assert "prediction" in {chart.id for chart in charts_of(read_evidence(run))}


def test_the_plan_and_its_ranking_are_shown_where_they_were_kept(tmp_path: Path) -> None:
    run = write_demo_run(tmp_path, 3)
    page = shown(run)
    assert "trained 1:57 (1:55 promised; demo-pc alone 4:17)" in page and "; demo-studio back at step " in page
    assert "<div><b>0:08</b><span>to start</span></div>" in page
    assert '<td>the whole run</td><td class="number">1:55</td><td class="number">1:57</td>' in page
    assert "<summary>Strategies that were not considered</summary>" in page
    assert "<td>chosen</td>" in page and "more are in planning.json" in page and "measured / predicted" in page
    assert "demo-studio lost" in json.dumps(charts_of(read_evidence(run))[0].figure)
    (run / "planning.json").write_text("{}")
    assert "No plan was kept with this run" in shown(run)
    RunFolder.open(run).update_metadata(hosts=RunFolder.open(run).metadata.hosts[:1])
    assert "No plan was kept" not in shown(run) and "One machine trained alone." in shown(run)


def test_a_figure_that_never_changes_is_a_row_and_no_flat_chart(tmp_path: Path) -> None:
    changes = ((1.0,), (1.0, 1.0), (1.0, 2.0))
    runs = [
        write_run(tmp_path / str(number), [step(10), *(sync(n, delta_norm=value) for n, value in enumerate(norms, 1))])
        for number, norms in enumerate(changes)
    ]
    drawn = [{chart.id for chart in charts_of(read_evidence(run))} for run in runs]
    assert ["delta-norm" in names for names in drawn] == [False, False, True]
    assert ["<td>delta norm</td><td>1</td>" in shown(run) for run in runs] == [True, True, False]


def test_names_and_messages_from_outside_are_only_text(tmp_path: Path) -> None:
    run = write_run(tmp_path, hostile_events(), profile=HOSTILE, model=HOSTILE, config={HOSTILE: HOSTILE})
    text = write_report(run).read_text()
    assert "<img" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert text.count("</script>") == 3
    assert "\x1b" not in text and "\u202e" not in text
    assert "</" not in embedded({"name": HOSTILE})
    assert "<" not in label(HOSTILE)


def test_a_report_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path, events())
    first = write_report(run)
    assert first == run / "report.html"
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert first.stat().st_size < 2e6
    before = first.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(BadInput):
        write_report(run)
    assert first.read_bytes() == before
    assert [path.name for path in run.iterdir() if "report" in path.name] == ["report.html"]


def test_the_command_names_the_file_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "output", events())
    out = tmp_path / "r.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert main(["report", "nothing", "--output", str(tmp_path / "output")]) == 2
    assert main(["report", str(run), "--out", str(tmp_path / "missing" / "r.html")]) == 2
    assert capsys.readouterr().err.count("error:") == 2


def test_without_a_display_the_path_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def opens(address: str) -> bool:
        opened.append(address)
        return True

    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION", "TEXTUAL_DRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    run = write_run(tmp_path, events())
    assert show_report(write_report(run), opens) == f"report: {run.resolve() / 'report.html'}"
    monkeypatch.setenv("DISPLAY", ":0")
    assert show_report(write_report(run), opens).startswith("report opened: ")
    monkeypatch.setenv("TEXTUAL_DRIVER", "textual.drivers.web_driver:WebDriver")
    assert show_report(write_report(run), opens).startswith("report: ")
    assert opened == [(run.resolve() / "report.html").as_uri()]


def test_machines_stand_under_the_loss_on_its_axis(tmp_path: Path) -> None:
    lost = MemberEvent(member=1, status="lost", name="worker-1", message="silent", time=20.5)
    back = MemberEvent(member=1, status="joined", name="worker-1", time=30.5)
    saved = SnapshotEvent(member=0, step=20, path="", bytes=1, seconds=0.1, time=20)
    away = [one for one in events() if not (isinstance(one, StepEvent) and one.member == 1 and 20 < one.step <= 30)]
    every = sorted([*away, lost, back, saved], key=lambda event: event.time)
    chart = charts_of(read_evidence(write_run(tmp_path, every)))[0]
    traces = {trace.get("name"): trace for trace in chart.figure["data"]}
    assert traces["lost or left"]["x"] == [20] and "worker-1 lost: silent" in traces["lost or left"]["text"]
    assert traces["back"]["x"] == [pytest.approx(30, abs=1)] and traces["snapshot"]["x"] == [20]
    assert traces["waiting"]["fillpattern"]["shape"] == "/"  # not told by its colour alone
    assert all("xaxis" not in trace for trace in traces.values())
    layout = chart.figure["layout"]
    assert layout["yaxis2"]["ticktext"] == ["worker-0", "worker-1"]
    assert layout["yaxis2"]["domain"][1] < layout["yaxis"]["domain"][0]
    assert traces.keys() & {"promised", "at the promised pace"} == set()


def test_long_names_beside_the_bands_are_told_apart(tmp_path: Path) -> None:
    names = charts_of(read_evidence(write_run(tmp_path, events("a-machine-of-our-laboratory"))))[0].figure["layout"]
    assert names["yaxis2"]["ticktext"] == ["a-machine-o…laboratory-0", "a-machine-o…laboratory-1"]


def test_many_machines_and_steps_keep_the_page_small(tmp_path: Path) -> None:
    hello = [MemberEvent(member=rank, status="joined", name=f"m{rank}", time=0) for rank in range(30)]
    some = [step(n, member=rank, wait=(n * rank % 7) / 7) for n in range(1, 101) for rank in range(30)]
    evidence = read_evidence(write_run(tmp_path, [*hello, *some]))
    chart = charts_of(evidence)[0]
    assert len(chart.figure["layout"]["yaxis2"]["ticktext"]) == 24 and "6 more machines" in chart.note
    assert len(embedded(chart.figure)) < 300_000


PAPERS = ((8.5, 11.0), (8.27, 11.69))
"""Inches of Letter and A4."""


def told_of_speech(run: Path) -> Path:
    """Add what a speech run tells of its recordings: of 20 speakers, as many words heard as others, three clips."""
    words = [f"word{number:02}" for number in range(20)]
    texts = [" ".join(words[n % 20 : n % 20 + 12]) for n in range(100)]
    heard = [
        Prediction(f"test-{n:04}", "", said, "no", said, said.replace("d0", "d8").replace("d1", "d7"), n % 12, 12, 9,
                   70, speaker=f"speaker-{n % 20}", language="en", duration=1.0 + n % 9)
        for n, said in enumerate(texts)
    ]  # fmt: skip
    for name in (BEFORE, PREDICTIONS):
        write_predictions(run / EVALUATION / name, heard)
    clip = {"reference": texts[0], "before": texts[1], "after": texts[0], "first": 0.5, "last": 0.0, "sound": "QUJD"}
    samples = [Sample.model_validate({"id": f"test-{n}", "why": "improved most", **clip}) for n in range(3)]
    Showcase(kind="speech", split="test", step=240, of=100, samples=tuple(samples)).write(run / EVALUATION / SHOWCASE)
    return run


@needs_chromium
def test_a_usual_run_prints_on_two_pages_and_breaks_no_word_on_a_phone(tmp_path: Path) -> None:
    report = write_report(told_of_speech(write_demo_run(tmp_path, 3, 0, 1e9)))
    lines = "[...document.querySelectorAll('td')].find(one => one.textContent == 'validation').clientHeight / 23"

    async def look() -> None:
        async with chromium() as page:
            await page.open(report.as_uri())
            await page.until_true("document.documentElement.dataset.drawn")
            for width, height in PAPERS:
                answer = await page.send("Page.printToPDF", paperWidth=width, paperHeight=height)
                assert len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(answer["data"]))) == 2
            await page.size(390, 800)
            assert await page.value(lines) < 2

    asyncio.run(look())


@needs_chromium
def test_a_browser_draws_every_chart_and_loads_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path, hostile_events(), profile=HOSTILE)
    report = write_report(run)
    expected = len(charts_of(read_evidence(run)))

    async def look() -> None:
        async with chromium() as page:
            await page.size(1280, 900)
            await page.open(report.as_uri())
            assert await page.until_true("document.documentElement.dataset.drawn") == str(expected)
            lines = "document.querySelectorAll('#loss .scatterlayer .js-line').length"
            assert await page.value(lines) >= 3
            assert await page.value("document.querySelectorAll('#time .barlayer .point').length") == 4
            await page.value(
                "document.querySelectorAll('#loss .updatemenu-button')[1].dispatchEvent(new Event('click'))"
            )
            assert await page.value("document.documentElement.scrollWidth <= 1280")
            assert await page.value("window.hit === undefined")
            assert await page.value("document.querySelectorAll('section img').length") == 0
            assert len(await page.screenshot(tmp_path / "report.png", whole=True)) > 20_000
            assert page.complaints == []
            assert {address.partition(":")[0] for address in page.requests} <= {"file", "data", "blob"}

            # The check itself is checked: with an image from outside in the page, the browser complains.
            report.write_text(report.read_text().replace("<footer>", "<img src='http://evil.test/x'><footer>"))
            await page.open(report.as_uri())
            await page.until_true("document.querySelector('img') && document.documentElement.dataset.drawn")
            await page.until(lambda: refused(page))

    async def refused(page: Page) -> bool:
        return any("Content Security Policy" in complaint for complaint in page.complaints)

    asyncio.run(look())
