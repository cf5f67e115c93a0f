"""What all tests share: one thread, no network, no traces in the home folder, lab tests only where they can run."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.preloaded.python import PreloadedPython, use_preloaded
from training.tasks.published_models import created_folder

# Before anything imports torch or transformers; inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MUSTER_OPENING_PAUSE", "0")  # tests press keys as soon as they see the screen

sys.dont_write_bytecode = False  # every process that tests start would compile again what this one has loaded

_FEW, _USUAL = 10, 25
settings.register_profile("deep", deadline=None, max_examples=200)
settings.register_profile("house", deadline=None, derandomize=True, max_examples=_USUAL)
# Else what is drawn follows from the numbers and words in all of Muster's modules that other tests have loaded by then.
providers._get_local_constants = providers.Constants
settings.register_profile("fast", settings.get_profile("house"), max_examples=_FEW)

_LAB = {"lab": "mark.lab", "alone": "mark.alone", "lab and not alone": "mark.lab"}
"""Expressions of ``-m`` that choose tests of the lab only, and what a file with such tests holds."""
_ALL, _FAST = "not alone", "not slow and not lab"
_SLOW_FILE = re.compile(r"^pytestmark = .*mark\.(slow|lab)\b", re.MULTILINE)
_SLOW_TEST, _TEST = (re.compile(line, re.MULTILINE) for line in (r"^@pytest\.mark\.slow$", r"^(async )?def test_"))
_ROOT = Path(__file__).parents[1]
_COPIED = (
    "app", "distributed", "profiles", "speech", "training", "config.ini", "cli_typer.py", "wizard.py",
    "constraints.txt", "requirements.lock", "requirements-train.lock",
)  # fmt: skip
_TINY_EN = Path(os.environ.get("MUSTER_TINY_EN") or created_folder("openai/whisper-tiny.en"))  # of the user's own cache


@pytest.fixture(autouse=True, scope="session")
def _own_cache() -> object:
    """Keep caches, approvals and keys of this session out of the user's folders."""
    with tempfile.TemporaryDirectory(prefix="muster-tests-", ignore_cleanup_errors=True) as folder:  # some still write
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_STATE_HOME"] = folder
        os.environ["HOME"] = folder
        yield


@pytest.fixture(autouse=True)
def _own_numbers(request: pytest.FixtureRequest) -> None:
    """What a test draws without a seed, and how it rounds, is its own, whatever other tests have done before."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed notes for each GPU, with source lines, who asks
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
        torch.set_num_threads(1)  # a worker of a run in this process has set its own


@pytest.fixture(scope="session")
def whisper_tiny_en() -> Path:
    """Folder of OpenAI's tiny.en, 38 M weights, which ``examples/whisper_tiny_en.py`` makes; skips where it is not."""
    if not (_TINY_EN / "model.safetensors").is_file():
        pytest.skip("needs tiny.en: .venv/bin/python examples/whisper_tiny_en.py, or its folder in MUSTER_TINY_EN")
    return _TINY_EN


def pytest_configure(config: pytest.Config) -> None:
    """Let tests start processes with a Python that has loaded PyTorch; xdist's workers share their controller's.

    They hear Ctrl-C, although a shell that starts the tests in the background has it ignored. Properties are shown on
    the same few examples in each run, fewer without the slow tests; on others, and more of them, with
    ``MUSTER_TESTS_DEEP``.
    """
    usual = "fast" if "not slow" in config.option.markexpr else "house"
    settings.load_profile("deep" if os.environ.get("MUSTER_TESTS_DEEP") else usual)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.fsync = _fsync_nothing  # as in the copies of a preloaded Python
    if not hasattr(config, "workerinput"):
        config.add_cleanup(PreloadedPython(at_once=config.getoption("dist", "no") != "no").close)
    use_preloaded()
    config.add_cleanup(_collect_garbage_once)


def _fsync_nothing(descriptor: int) -> None:
    """No test has a power failure; to wait for the disk would take a run's start tenths of a second."""


def _collect_garbage_once() -> None:
    """pytest does it five times at its end, which takes a second a worker: then it finds nothing to look at."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Load no file of which no test is wanted: without tests of the lab, where only those are; wholly slow, where none
    is."""
    expression = config.option.markexpr
    if collection_path.suffix != ".py" or expression not in (*_LAB, _FAST):
        return None
    text = collection_path.read_text(encoding="utf-8")
    return (_is_slow_file(text) if expression == _FAST else _LAB[expression] not in text) or None


def _is_slow_file(text: str) -> bool:
    tests = len(_TEST.findall(text))
    return _SLOW_FILE.search(text) is not None or 0 < tests == len(_SLOW_TEST.findall(text))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Do not look again and again for garbage among the modules: that is a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # tests make little garbage: to look for it after each 700 objects takes 5 %
        gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More than there are processors: many tests wait, for a process or for an answer, and those of the lab longest."""
    return (os.cpu_count() or 1) + (2 if config.option.markexpr == _ALL else 1)


@pytest.hookimpl(trylast=True)  # once it is known which ones are wanted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip lab tests, with the reason, where they cannot run; share the others out among several workers."""
    if not os.environ.get("MUSTER_TESTS_DEEP"):
        for function in {getattr(item, "function", None) for item in items}:
            _show_on_fewer(function)
    if hasattr(config, "workerinput") and config.option.markexpr not in _LAB:
        items[:] = shared_out(items, config.workerinput["workercount"] if config.option.markexpr == _ALL else 1)
    if sys.platform == "linux" and os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root on Linux: network namespaces, real sshd")
    for item in items:
        if "lab" in item.keywords:
            item.add_marker(skip)


def _show_on_fewer(function: object) -> None:
    """Bound the examples of a property also where it names a number itself, which no profile does: to half of it, or as
    few as usual."""
    name = "_hypothesis_internal_use_settings"
    own = getattr(function, name, None)
    if own is not None:
        most = _FEW if settings.default is settings.get_profile("fast") else max(_USUAL, own.max_examples // 2)
        setattr(function, name, settings(own, max_examples=min(most, own.max_examples)))


def shared_out(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order of which each worker is given an equal part.

    A part begins with tests of the lab, which wait, or with long journeys, which compute; those have their own time
    limit. Then come other slow ones. The short ones are last, and whoever has nothing left takes them from others: no
    processor waits for a long one.
    """
    kinds: list[list[pytest.Item]] = [[], [], [], [], []]
    for item in items:
        kinds[_kind(item)].append(item)
    every, given = range(workers), list[pytest.Item]()
    places = [every[::2], every[::2], every[1::2] or every, every]
    for place in every:
        share = len(given) + (len(items) - len(given)) // (workers - place)
        for kind, those in zip(kinds, places):
            if place in those:
                given += _piece(kind, those.index(place), len(those))
        wanted = max(0, share - len(given))
        given += kinds[4][:wanted]
        del kinds[4][:wanted]
    return given + kinds[4]


def _kind(item: pytest.Item) -> int:
    marks = {mark.name for mark in item.iter_markers()}
    if "lab" in marks:
        return 0 if "timeout" in marks else 1
    return 2 if "timeout" in marks else 3 if "slow" in marks else 4


def _piece(items: list[pytest.Item], number: int, pieces: int) -> list[pytest.Item]:
    return items[number * len(items) // pieces : (number + 1) * len(items) // pieces]


@pytest.fixture
def project_copy(tmp_path: Path) -> Path:
    """The project in another folder, so that what a program saves beside itself stays out of this one."""
    folder, ignore = tmp_path / "muster", shutil.ignore_patterns("saved")
    folder.mkdir()
    for name in _COPIED:
        source = _ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy2(source, folder / name)
    (folder / "examples").symlink_to(_ROOT / "examples")
    return folder
