"""The memory that control groups leave."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from training.resources import memory_limit, total_memory


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
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path) == expected
    whole = psutil.virtual_memory().total
    assert total_memory(tmp_path) == ((expected, True) if expected else (whole, False))
