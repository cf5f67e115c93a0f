from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.hardware import resources
from training.hardware.resources import Quota, quota, threads


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


FIRST = {"sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "40000\n", "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("3:cpu,cpuacct:/box\n", FIRST, Quota(0.4, 0.1)),
        ("3:cpu:/box/inner\n", FIRST, Quota(0.4, 0.1)),
        ("3:cpuset:/box\n", FIRST, None),
        ("0::/box\n", {"sys/fs/cgroup/box/cpu.max": "150000 100000\n"}, Quota(1.5, 0.1)),
        ("0::/box/inner\n", {"sys/fs/cgroup/box/cpu.max": "40000 20000\n",
                             "sys/fs/cgroup/box/inner/cpu.max": "max 100000\n"}, Quota(2.0, 0.02)),
        ("0::/not/seen/from/inside\n", {"sys/fs/cgroup/cpu.max": "40000 100000\n"}, Quota(0.4, 0.1)),
        ("3:cpu:/box\n", dict.fromkeys(FIRST, "-1\n"), None),
        ("", {}, None),
    ],
)  # fmt: skip
def test_quotas_of_both_kinds_of_control_groups(
    groups: str, files: dict[str, str], expected: Quota | None, tmp_path: Path
) -> None:
    assert quota(system(tmp_path, groups, files)) == expected


@given(st.text(max_size=60), st.text(max_size=20))
def test_whatever_the_files_say(tmp_path_factory: pytest.TempPathFactory, groups: str, limit: str) -> None:
    root = tmp_path_factory.mktemp("system")
    (root / "proc/self").mkdir(parents=True)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups + "\n0::/\n", encoding="utf-8", errors="replace")
    (root / "sys/fs/cgroup/cpu.max").write_text(limit, encoding="utf-8", errors="replace")
    found = quota(root)
    assert found is None or found.cores > 0


@pytest.mark.parametrize(
    ("free", "chosen", "usual", "expected"),
    [(0.4, 0, 8, 1), (1.5, 0, 8, 2), (8.0, 0, 4, 4), (0.4, 3, 8, 3)],
)
def test_threads_follow_the_quota(free: float, chosen: int, usual: int, expected: int) -> None:
    assert threads(chosen, usual, free) == expected


def test_a_quota_is_below_what_the_system_grants() -> None:
    assert 0 < resources.free_cores() <= (os.cpu_count() or 1)
