"""What all tests share: one thread, no network, no traces in the home folder, lab tests only where they can run."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.preloaded.python import PreloadedPython, use_preloaded
from training.tasks.published_models import made_folder

# Before anything imports torch or transformers; inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MUSTER_OPENING_PAUSE", "0")  # tests press keys as soon as they see the screen

sys.dont_write_bytecode = False  # every process that tests start would compile again what this one has loaded

settings.register_profile("house", deadline=None, derandomize=True)
settings.register_profile("fast", settings.get_profile("house"), max_examples=10)

_LAB = ("lab", "alone", "lab and not alone")
"""Expressions of ``-m`` that choose tests of the lab only."""
_TINY_EN = Path(os.environ.get("MUSTER_TINY_EN") or made_folder("openai/whisper-tiny.en"))  # of the user's own cache


@pytest.fixture(autouse=True, scope="session")
def _own_cache() -> object:
    """Keep caches and approvals of this session out of the user's folders."""
    with tempfile.TemporaryDirectory(prefix="muster-tests-") as folder:
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = folder
        yield


@pytest.fixture(scope="session")
def whisper_tiny_en() -> Path:
    """Folder of OpenAI's tiny.en, 38 M weights, which ``examples/whisper_tiny_en.py`` makes; skips where it is not."""
    if not (_TINY_EN / "model.safetensors").is_file():
        pytest.skip("needs tiny.en: .venv/bin/python examples/whisper_tiny_en.py, or its folder in MUSTER_TINY_EN")
    return _TINY_EN


def pytest_configure(config: pytest.Config) -> None:
    """Let tests start processes with a Python that has loaded PyTorch; xdist's workers share their controller's.

    They hear Ctrl-C, although a shell that starts the tests in the background has it ignored. Without the slow tests,
    properties are shown on fewer examples.
    """
    settings.load_profile("fast" if "not slow" in config.option.markexpr else "house")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        config.add_cleanup(PreloadedPython(at_once=config.getoption("dist", "no") != "no").close)
    use_preloaded()
    config.add_cleanup(_collect_garbage_once)


def _collect_garbage_once() -> None:
    """pytest does it five times at its end, which takes a second a worker: then it finds nothing to look at."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests of the lab are wanted, load no file that has none."""
    if config.option.markexpr not in _LAB or collection_path.suffix != ".py":
        return None
    return "mark.lab" not in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look again and again for garbage among the modules: that is a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: many tests wait, for a process or for an answer."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip lab tests, with the reason, where they cannot run; among several workers begin with the long journeys.

    Those have their own time limit. At the end there are short tests then, and no processor waits for a long one.
    """
    if hasattr(config, "workerinput") and config.option.markexpr not in _LAB:
        items.sort(key=lambda item: item.get_closest_marker("timeout") is None)
    if sys.platform == "linux" and os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root on Linux: network namespaces, real sshd")
    for item in items:
        if "lab" in item.keywords:
            item.add_marker(skip)
