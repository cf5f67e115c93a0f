from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from https_site import Site, serving

from training.exchange.links.certificates import issue_run_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    issue_run_certificates(folder, "tests", [], ["127.0.0.1"])
    return folder / "coordinator"


@pytest.fixture
def site(certificates: Path) -> Iterator[Site]:
    with serving(certificates) as running_site:
        yield running_site
