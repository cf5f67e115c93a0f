"""The memory that control groups leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from training.hardware.resources import free_memory, memory_limit, total_memory


def write_groups(root: Path, group: str, files: dict[str, str]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("4:memory:/box\n", {"memory/box/memory.limit_in_bytes": "800"}, 800),
        ("4:memory:/box/inner\n", {"memory/box/memory.limit_in_bytes": "800"}, 800),
        ("4:cpu:/box\n", {"memory/box/memory.limit_in_bytes": "800"}, None),
        ("0::/box\n", {"box/memory.max": "900\n", "memory.max": "max\n"}, 900),
        ("0::/box\n", {"box/memory.max": "max\n"}, None),
        ("0::/box\n", {"box/memory.max": "-5\n"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, group: str, files: dict[str, str], expected: int | None) -> None:
    write_groups(tmp_path, group, files)
    assert memory_limit(tmp_path) == expected
    whole = psutil.virtual_memory().total
    assert total_memory(tmp_path) == ((expected, True) if expected else (whole, False))


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/box\n", {"box/memory.max": "900", "box/memory.current": "500", "memory.max": "max"}, 400),
        ("0::/box\n", {"box/memory.max": "900", "box/memory.current": "950"}, 0),
        ("0::/box\n", {"box/memory.max": "900", "box/memory.current": "800",
                       "box/memory.stat": "anon 7\ninactive_file 300\n"}, 400),
        ("4:memory:/box\n", {"memory/box/memory.limit_in_bytes": "900", "memory/box/memory.usage_in_bytes": "800",
                             "memory/box/memory.stat": "inactive_file 9\ntotal_inactive_file 300\n"}, 400),
    ],
)  # fmt: skip
def test_what_is_left_of_the_tightest_limit_is_free(
    tmp_path: Path, group: str, files: dict[str, str], expected: int
) -> None:
    write_groups(tmp_path, group, files)
    assert free_memory(tmp_path) == expected


def test_without_a_limit_the_machine_says_what_is_free(tmp_path: Path) -> None:
    assert 0 < free_memory(tmp_path) <= psutil.virtual_memory().total
