"""The examples of docs/hosts.md are readable, and its tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed.hosts.file import Machine, parse_hosts
from distributed.ssh import errors as ssh_errors

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "hosts.md").read_text()


@pytest.mark.parametrize("text", re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL))
def test_every_example_is_a_hosts_file(text: str) -> None:
    assert len(parse_hosts(text).machines) >= 2


def test_every_field_and_every_cause_is_explained() -> None:
    words = set(re.findall(r"`([\w_]+)`", PAGE + (DOCS / "access.md").read_text()))
    kinds = ssh_errors.SshError.__subclasses__()
    assert len(kinds) > 10
    assert {*Machine.model_fields, *(kind.cause for kind in kinds)} <= words
