"""The commands by name; their modules are imported when they are called."""

from __future__ import annotations

from app.cli.command_entry import CommandEntry

COMMANDS = {
    "transcribe": CommandEntry("speech.commands.transcribe", "Transcribe sound files.", "model", trains=True),
    "export": CommandEntry(
        "speech.commands.export",
        "Convert a trained model for other programs, and check that it still transcribes the same.",
        "model",
        trains=True,
    ),
    "prepare": CommandEntry(
        "speech.commands.recordings",
        "Make a data set from recordings anywhere: download, check, and split by speaker; resumable.",
        "data",
        trains=True,
    ),
    "segment": CommandEntry(
        "speech.commands.recordings",
        "Cut long recordings at pauses, and assign to each clip the words of the transcript spoken in it.",
        "data",
        trains=True,
    ),
    "patches": CommandEntry(
        "speech.commands.transcripts",
        "Show what the files in a data set's folder 'patches' change: texts, protected samples, samples left out.",
        "data",
        trains=True,
    ),
    "blacklist": CommandEntry(
        "speech.commands.transcripts",
        "List training samples whose transcript is contradicted by a model that never trained on them.",
        "data",
        trains=True,
    ),
    "pseudo-label": CommandEntry(
        "speech.commands.transcripts",
        "Let a model write transcripts of recordings into pseudo.csv; continues where it was interrupted.",
        "data",
        trains=True,
    ),
}
