from __future__ import annotations

import subprocess
import sys

import pytest

from profiles.errors import BadInput
from training.strategies.registry import check_strategy, strategies, strategy_class


@pytest.mark.parametrize("name", strategies())
def test_every_name_has_a_class_of_that_name(name: str) -> None:
    assert strategy_class(name).name == name


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean 'diloco'"):
        check_strategy("dilocco")


@pytest.mark.slow
def test_no_strategy_or_codec_imports_torch_before_it_works() -> None:
    code = "import sys, training.strategies.registry as r; r.load(); r.loss_sources(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
