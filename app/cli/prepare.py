"""``prepare``: recordings from anywhere become a data set to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from app.cli.arguments import Device, Json, Output
from profiles.errors import ExitCode

_SOURCE = "A table, a folder, a manifest, or the name of a data set of Hugging Face or BigQuery."
_KIND = "table, audiofolder, common-voice, librispeech, voxpopuli, nemo, hub or bigquery; empty: recognised."
_MODEL = "Leave out clips in which this multilingual model hears another language."

_Roots = Annotated[
    list[Path], typer.Option("--audio-root", metavar="DIR", help="Another folder with the files; may be repeated.")
]
_CaFile = Annotated[
    Path | None, typer.Option("--ca-file", metavar="FILE", help="Certificates to trust besides the system's (PEM).")
]


def prepare(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=_SOURCE)],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder of the new data set.")],
    kind: Annotated[str, typer.Option("--kind", help=_KIND)] = "",
    form: Annotated[Literal["flac", "opus", "wav"], typer.Option("--format", help="Sound format.")] = "flac",
    text_column: Annotated[str, typer.Option("--text-column", metavar="NAME", help="Column of the transcripts.")] = "",
    audio_column: Annotated[str, typer.Option("--audio-column", metavar="NAME", help="Column of the files.")] = "",
    speaker_column: Annotated[str, typer.Option("--speaker-column", metavar="NAME", help="Column of the voices.")] = "",
    audio_root: _Roots = [],  # noqa: B006 - typer copies it
    language: Annotated[str, typer.Option("--language", help="Language where the source names none.")] = "",
    lowercase: Annotated[bool, typer.Option("--lowercase", help="Write transcripts in lower case.")] = False,
    longest: Annotated[float, typer.Option("--longest", metavar="S", min=0.1, max=3600, help="Longest clip.")] = 30,
    shortest: Annotated[float, typer.Option("--shortest", metavar="S", min=0, help="Shortest clip.")] = 0.1,
    silence: Annotated[
        float, typer.Option("--silence", metavar="DB", max=0, help="Least level of the loudest 0.1 s.")
    ] = -60,
    clipped: Annotated[
        float, typer.Option("--max-clipped", metavar="SHARE", min=0, max=1, help="Largest share of clipped samples.")
    ] = 0.02,
    slowest: Annotated[float, typer.Option("--min-characters", min=0, help="Least a second.")] = 0.5,
    fastest: Annotated[float, typer.Option("--max-characters", min=0, help="Most a second.")] = 35,
    validation: Annotated[float, typer.Option("--validation", min=0, max=0.5, help="Share held out.")] = 0.1,
    test: Annotated[float, typer.Option("--test", min=0, max=0.4, help="Share held out.")] = 0.1,
    threads: Annotated[int, typer.Option("--threads", min=1, max=64, help="Recordings processed at once.")] = 4,
    max_file: Annotated[float, typer.Option("--max-file", metavar="MB", min=0.001, help="Largest download.")] = 500,
    max_total: Annotated[float, typer.Option("--max-total", metavar="GB", min=0.001, help="All downloads.")] = 100,
    ca_file: _CaFile = None,
    allow_private: Annotated[
        bool, typer.Option("--allow-private", help="Also download from addresses that are not public.")
    ] = False,
    check_language: Annotated[str, typer.Option("--check-language", metavar="MODEL", help=_MODEL)] = "",
    device: Device = "auto",
    output: Output = Path("output"),
    as_json: Json = False,
) -> ExitCode:
    """Make a data set from recordings anywhere: download, check, and split by speaker; resumable."""
    from app.cli.preparing import prepare_command
    from training.recordings.checks import Limits
    from training.recordings.dividing import Shares
    from training.recordings.fetching import FetchLimits
    from training.recordings.preparing import Job
    from training.recordings.recording import Columns, Request

    job = Job(
        Request(source, Columns(audio_column, text_column, speaker_column), tuple(audio_root)),
        out.expanduser(),
        kind,
        form,
        language,
        lowercase,
        threads,
        Limits(shortest, longest, silence, clipped, slowest, fastest),
        Shares(validation, test),
        FetchLimits(int(max_file * 1e6), int(max_total * 1e9), allow_private=allow_private, ca_file=ca_file),
    )
    return prepare_command(job, check_language, output, device, as_json)
