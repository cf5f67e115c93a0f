"""``prepare`` and ``segment``: data sets from recordings, and from long recordings with transcripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.cli.arguments import OUTPUT, Device, Json, Language, Output
from app.cli.terminal import answer, only_data_on_stdout, reporting
from app.console import command_line, say, say_error, visible
from profiles.errors import BadInput, ExitCode, counted
from profiles.quantities import duration_text, share_text

if TYPE_CHECKING:
    from speech.recordings.dataset_folder import Result
    from speech.recordings.preparing import PreparationJob
    from speech.recordings.segments.dataset import RecordingResult
    from speech.recordings.segments.transcribing import TimedTranscriber

_SOURCE = "A table, a folder, a manifest, or the name of a data set of Hugging Face or BigQuery."
_KIND = (
    "table, audiofolder, common-voice, librispeech, voxpopuli, nemo, ljspeech, kaldi, mls, fleurs, pairs, hub or "
    "bigquery; empty: recognised."
)
_MODEL = "Leave out clips in which this multilingual model hears another language."

_source = partial(typer.Option, rich_help_panel="Columns and files of the source")
_limit = partial(typer.Option, rich_help_panel="What is left out")
_download = partial(typer.Option, rich_help_panel="Downloads")
_Roots = Annotated[
    list[Path], _source("--audio-root", metavar="DIR", help="Another folder with the files; may be repeated.")
]
_CaFile = Annotated[
    Path | None, _download("--ca-file", metavar="FILE", help="Certificates to trust besides the system's (PEM).")
]


def prepare(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=_SOURCE)],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the new data set.")] = Path("prepared"),
    kind: Annotated[str, typer.Option(help=_KIND)] = "",
    form: Annotated[Literal["flac", "opus", "wav"], typer.Option("--format", help="Sound format.")] = "flac",
    text_column: Annotated[str, _source("--text-column", metavar="NAME", help="Column of the transcripts.")] = "",
    audio_column: Annotated[str, _source("--audio-column", metavar="NAME", help="Column of the files.")] = "",
    speaker_column: Annotated[str, _source("--speaker-column", metavar="NAME", help="Column of the voices.")] = "",
    audio_root: _Roots = [],  # noqa: B006 - typer copies it
    language: Annotated[str, typer.Option(help="Language where the source names none.")] = "",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Write transcripts in lower case.")] = False,
    longest: Annotated[float, _limit("--longest", metavar="S", min=0.1, max=3600, help="Longest clip.")] = 30,
    shortest: Annotated[float, _limit("--shortest", metavar="S", min=0, help="Shortest clip.")] = 0.1,
    silence: Annotated[float, _limit("--silence", metavar="DB", max=0, help="Least level of the loudest 0.1 s.")] = -60,
    clipped: Annotated[
        float, _limit("--max-clipped", metavar="SHARE", min=0, max=1, help="Largest share of clipped samples.")
    ] = 0.02,
    slowest: Annotated[float, _limit("--min-characters", min=0, help="Fewest characters a second.")] = 0.5,
    fastest: Annotated[float, _limit("--max-characters", min=0, help="Most characters a second.")] = 35,
    validation: Annotated[float, typer.Option(min=0, max=0.5, help="Share held out for validation.")] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=0.4, help="Share held out for the test.")] = 0.1,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Recordings processed at once.")] = 4,
    max_file: Annotated[float, _download("--max-file", metavar="MB", min=0.001, help="Largest download.")] = 500,
    max_total: Annotated[float, _download("--max-total", metavar="GB", min=0.001, help="All of them together.")] = 100,
    ca_file: _CaFile = None,
    allow_private: Annotated[
        bool, _download("--allow-private", help="Also download from addresses that are not public.")
    ] = False,
    check_language: Annotated[str, _limit("--check-language", metavar="MODEL", help=_MODEL)] = "",
    device: Device = "auto",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Make a data set from recordings of any source, and report what became of them.

    Raises:
        BadInput: source, folder or model cannot be used, or nothing is left.
        StoppedByUser: Ctrl-C.
    """
    from speech.recordings.checks import Limits
    from speech.recordings.dividing import HeldOutShares
    from speech.recordings.fetching import FetchLimits
    from speech.recordings.preparing import PreparationJob
    from speech.recordings.recording import Columns, ReadRequest

    _refuse_folder_of_runs(output, check_language)
    job = PreparationJob(
        ReadRequest(source, Columns(audio_column, text_column, speaker_column), tuple(audio_root)),
        out.expanduser(),
        kind,
        form,
        language,
        lowercase,
        threads,
        Limits(shortest, longest, silence, clipped, slowest, fastest),
        HeldOutShares(validation, test),
        FetchLimits(int(max_file * 1e6), int(max_total * 1e9), allow_private=allow_private, ca_file=ca_file),
    )
    return _carry_out(job, check_language, output, device, as_json)


def _refuse_folder_of_runs(output: Path, model: str) -> None:
    """Refuse a folder of runs where no model is looked for: the folder of the new data set was meant."""
    if output != OUTPUT and not model:
        raise BadInput(f"--output {output}: that is a folder of runs", f"write the data set there with --out {output}")


def _carry_out(job: PreparationJob, model: str, output: Path, device: str, as_json: bool) -> ExitCode:
    from speech.recordings.preparing import prepare as prepared

    ear = None
    if model:
        from speech.whisper.samples import LanguageDetector  # imports torch

        ear = LanguageDetector(model, output, device)
    with reporting(f"preparing {visible(job.request.source)}") as progress:
        result = prepared(job, progress, ear)
    following = command_line("distributed-train", "whisper-tiny-lora", "--dataset", str(result.folder))
    if sum(size.clips for size in result.splits.values()) < 2:  # nothing is left to evaluate on
        following = ""
    for note in () if as_json else result.notes:
        say(f"note: {visible(note)}")
    if result.may_pass and not as_json:
        say(f"note: {result.may_pass} could not be downloaded; the same command tries them again")
    next_lines = [f"next: {following}"] if following else ["next: add recordings, and repeat this command"]
    return answer(as_json, {**asdict(result), "next": following}, [*_result_lines(result), *next_lines])


def _result_lines(result: Result) -> Iterator[str]:
    from speech.recordings.dataset_folder import LEFT_OUT

    for split, size in result.splits.items():
        clips = f"{size.clips:6} {'clip' if size.clips == 1 else 'clips'}"
        speakers = f", {counted(size.speakers, 'speaker')}" if size.speakers else ""
        yield f"{split:10} {clips}, {duration_text(size.hours * 3600)}{speakers}"
    total = sum(result.left_out.values())
    if total:
        yield f"left out   {total:6}, each with its reason in {result.folder / LEFT_OUT}"
    for reason, count in result.left_out.items():
        yield f"  {count:6} {reason}, such as {visible(result.examples[reason])}"


_TRANSCRIPT = ".txt, .srt or .vtt; empty: the file beside it of the same name."
_ALIGNER = "Whisper that aligns the text: a folder, a run or a profile."
_DRAFT = "Without a transcript: use what the model hears, for you to correct."


def segment(
    recording: Annotated[Path, typer.Argument(metavar="RECORDING", help="A sound file, or a folder of them.")],
    transcript: Annotated[Path | None, typer.Argument(metavar="[TRANSCRIPT]", help=_TRANSCRIPT)] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the new data set.")] = Path("segments"),
    model: Annotated[str, typer.Option(metavar="MODEL", help=_ALIGNER)] = "",
    longest: Annotated[float, typer.Option(metavar="S", min=1, max=30, help="Longest clip.")] = 30.0,
    agreement: Annotated[
        float, typer.Option(metavar="SHARE", min=0, max=1, help="Lowest agreement of text and sound.")
    ] = 0.6,
    draft: Annotated[bool, typer.Option("--draft", help=_DRAFT)] = False,
    language: Language = "",
    device: Device = "auto",
    output: Output = OUTPUT,
    as_json: Json = False,
) -> ExitCode:
    """Make a data set from long recordings.

    Raises:
        BadInput: recording, transcript, model or folder cannot be used.
    """
    with only_data_on_stdout():
        from speech.data.language_codes import language_code
        from speech.recordings.segments.cutting import SegmentOptions
        from speech.recordings.segments.dataset import find_sources, segment_all
        from training.records.runs import find_model

    _refuse_folder_of_runs(output, model)
    language = language_code(language) if language else ""
    out = out.expanduser()
    sources = find_sources(recording.expanduser(), transcript)
    listens = draft or any(source.transcript for source in sources)
    if listens and not model:
        raise BadInput("no model to align the text with", "add --model MODEL: any Whisper folder, a run or a profile")
    folder = str(find_model(output, model)) if listens else ""

    @cache
    def hear() -> TimedTranscriber:
        from speech.recordings.segments.transcribing import TimedTranscriber  # imports torch

        say(f"listening with {folder}")
        return TimedTranscriber(folder, device, language)

    with reporting(f"segmenting {recording}") as progress:
        outcomes = segment_all(
            sources,
            out,
            folder,
            hear,
            language,
            SegmentOptions(longest, agreement, draft),
            lambda name: lambda phase, done, total: progress(f"{name}: {phase}", done, total),
        )
    return _tell(outcomes, out, as_json)


def _tell(outcomes: Sequence[RecordingResult], out: Path, as_json: bool) -> ExitCode:
    clips = sum(recording.clips for recording in outcomes)
    broken = [recording for recording in outcomes if recording.error or recording.damage]
    for recording in broken:
        say_error(f"{recording.name}: {recording.error or f'{recording.damage}; what comes before is used'}")
    if not clips:
        say_error("no clip was kept", f"see {out / 'left_out.csv'}")
    lines = [line for recording in outcomes if not recording.error for line in _lines(recording)]
    if clips:
        lines.append(f"{out}: {counted(clips, 'clip')} in train.csv; what was left out, and why: left_out.csv")
        lines.append(f"next: {command_line('distributed-train', 'whisper-tiny-lora', '--dataset', str(out))}")
    document = {"folder": str(out), "recordings": [asdict(recording) for recording in outcomes]}
    return answer(as_json, document, lines, ExitCode.BAD_INPUT if broken or not clips else ExitCode.DONE)


def _lines(recording: RecordingResult) -> Iterator[str]:
    length = f"{duration_text(recording.clip_seconds)} of {duration_text(recording.seconds)}"
    yield f"{visible(recording.name)}: {counted(recording.clips, 'clip')}, {length}"
    if recording.transcript_words:
        share = recording.given_words / recording.transcript_words
        yield f"  {share_text(share)} of the transcript's {recording.transcript_words} words are in the clips"
    for reason, count in (recording.reasons or {}).items():
        yield f"  left out: {count} x {visible(reason)}"
