"""Fixtures of this folder."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported

from tests.tasks.tiny_tasks import make_profile, no_hub  # noqa: F401 - fixtures
