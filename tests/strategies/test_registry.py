from __future__ import annotations

import subprocess
import sys

import pytest

from profiles.errors import BadInput
from training.strategies.registry import STRATEGY_NAMES, check_strategy, strategy_class


@pytest.mark.parametrize("name", STRATEGY_NAMES)
def test_every_name_has_a_class_of_that_name(name: str) -> None:
    assert strategy_class(name).name == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'diloco'"):
        check_strategy("dilocco")


def test_the_registry_does_not_import_torch() -> None:
    code = "import sys, training.strategies.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
