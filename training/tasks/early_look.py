"""What can be said of a data set before anything that trains is loaded; whoever starts a run looks here first."""

from __future__ import annotations

from profiles.schema import Profile
from training.tasks.speech_dataset import is_on_hub, read_divided


def check_data(profile: Profile) -> None:
    """Read the tables of a profile's data set, and see whether its files are there; nothing is decoded.

    What is held out of the training clips is told.

    Raises:
        BadInput: it cannot be used; the message says what, where and what to do.
    """
    data = profile.data
    if profile.model.task == "custom" or is_on_hub(data.dataset_path):
        return
    if profile.model.task == "causal_lm":
        from training.tasks.conversations import conversation_files, read_conversations
        from training.tasks.texts import text_files  # loads numpy

        files = conversation_files(data.dataset_path)
        if files:
            read_conversations(files)
        else:
            text_files(data.dataset_path)
    else:
        read_divided(data.dataset_path, data.text_column, data.pseudo_share)
