"""A strategy in a file of somebody's own: found, refused, given its options, trained with, and sent along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from contract import CHECKS
from members import settings_of
from stand_ins import Half

import muster
from app.cli.train.trial_run import shortened
from distributed.planning.documents.cluster import Cluster, ClusterMachine, Link, Measurement
from distributed.planning.documents.document import Job
from distributed.planning.planner import plan
from distributed.preparation.code_sync import collect
from profiles.errors import BadInput
from profiles.files.resolve import load_profile, profile_from_options, save_profile
from profiles.schema import Profile, StrategySettings
from training.records.plan import RunPlan
from training.run.local_plan import plan_local_run
from training.strategies.base import Strategy, StrategyContext
from training.strategies.registry import (
    ENTRY_POINTS,
    check_strategy,
    cost_model,
    forget,
    register_installed,
    strategies,
    strategy_class,
)
from training.strategies.user_strategy import (
    load_user_strategy,
    settings_for,
    settings_name,
    sync_schedule_of,
    unload_user_strategy,
)

STAND_INS = Path(__file__).with_name("stand_ins.py")
OWN = STAND_INS.read_text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of two strategies, of which one registers itself as those of Muster do."""
    path = tmp_path / "mine.py"
    registered = OWN.replace("class Half(", "@register\nclass Half(")
    path.write_text(registered.replace("import torch\n", f"import torch\n{IMPORT}\n", 1))
    return path


IMPORT = "from training.strategies.registry import register"


def profile(**options: Any) -> Profile:
    return profile_from_options("p", {"task": "causal_lm", "model_path": "owner/name", **options})


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("way", "options"), [("Half", "late = true"), ("All + half", "interval = 3")])
def test_it_keeps_the_contract(file: Path, check: Callable[[StrategySettings], None], way: str, options: str) -> None:
    text = f"{file}:{way}".replace("half", f"{file}:Half")
    check(settings_of(text, codec="fp32", strategy_options=options))


def test_nothing_is_left_of_it_among_those_that_all_machines_have(file: Path) -> None:
    known = list(strategies())
    assert strategy_class(f"{file}:Half").name == "half"
    assert list(strategies()) == known


def test_its_options_are_read_checked_and_written_back(file: Path) -> None:
    settings = StrategySettings(strategy=f"{file}:All", strategy_options="interval = 7")
    assert sync_schedule_of(settings).interval == 7
    assert sync_schedule_of(settings.model_copy(update={"strategy_options": "whole.interval=9"})).interval == 9
    assert unload_user_strategy(load_user_strategy(settings)).strategy_options == "whole.interval = 7"
    assert (
        StrategySettings.model_validate_json(unload_user_strategy(load_user_strategy(settings)).model_dump_json()).owned
        == settings.owned
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("interval = 0", "strategy_options: whole.interval: .*greater than or equal to 1"),
        ("intervall = 3", "has no option 'intervall' .*did you mean 'interval'"),
        ("interval", "'interval' is not name = value"),
    ],
)
def test_options_that_do_not_fit_are_refused(file: Path, options: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        load_user_strategy(StrategySettings(strategy=f"{file}:All", strategy_options=options))


def test_options_without_a_strategy_of_ones_own_are_refused() -> None:
    with pytest.raises(BadInput, match="strategy_options.*is for a strategy of your own"):
        profile(strategy="diloco", strategy_options="interval = 3")


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (None, "Half", "mine.py: No such file"),
        ("def (", "Half", "mine.py is not Python: invalid syntax"),
        ("class Halb: ...", "Half", "mine.py has no class 'Half' .*did you mean 'Halb'"),
    ],
)
def test_a_file_that_cannot_be_is_refused_before_anything_runs(
    tmp_path: Path, text: str | None, name: str, said: str
) -> None:
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(f"{text}\nraise SystemExit('it was run')\n")
    for ask in (check_strategy, strategy_class, lambda text: profile(strategy=text)):
        with pytest.raises(BadInput, match=said) as refused:
            ask(f"{path}:{name}")
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Mine: ...", "mine.py:Mine is no strategy"),
        ("raise OSError('no disk')\nclass Mine: ...", r"cannot be imported: OSError: no disk \(mine.py, line 1\)"),
        ("from training.strategies.base import Strategy as Mine", "mine.py:Mine lacks end_step, synchronised"),
        ("from training.strategies.diloco import DiLoCo\nclass Mine(DiLoCo): name = 'my own'", "needs a name"),
    ],
)
def test_a_class_that_cannot_be_is_refused_when_it_is_needed(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(BadInput, match=said):
        strategy_class(f"{tmp_path}/mine.py:Mine")


def test_one_that_is_derived_from_another_has_its_options(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from training.strategies.diloco import DiLoCo\nclass Mine(DiLoCo): ...\n")
    settings = StrategySettings(strategy=f"{tmp_path}/mine.py:Mine", owned={"diloco": {"sync_interval": 7}})
    assert sync_schedule_of(settings).interval == 7
    assert sync_schedule_of(settings.model_copy(update={"strategy_options": "sync_interval = 8"})).interval == 8


def test_a_file_is_relative_to_where_it_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.ini").write_text(
        "[profile:p]\ntask = causal_lm\nmodel_path = owner/name\nstrategy = mine.py:Half + diloco\ndataset = o/n\n"
    )
    found = load_profile("p", config=tmp_path / "config.ini").profile.strategy
    assert found.strategy == f"{file}:Half + diloco" and found.user_strategy == f"{file}:Half"
    monkeypatch.chdir(tmp_path)
    assert profile(strategy="mine.py:Half").strategy.strategy == f"{file}:Half"
    values = {"task": "causal_lm", "model_path": "o/n", "strategy": "mine.py:Half + diloco"}
    saved = save_profile("s", values, tmp_path / "config.ini")
    assert "strategy = ../../mine.py:Half + diloco" in saved.read_text()


def test_it_travels_with_the_run(file: Path) -> None:
    (file.parent / "beside.py").write_text("")
    chosen = profile(strategy=f"{file}:Half + diloco", strategy_options="late = true")
    assert chosen.user_code == {"strategy": f"{file}:Half"}
    found = collect(plan_local_run(chosen, 2))
    assert found.plan.profile.strategy.strategy == "inputs/strategy/mine.py:Half + diloco"
    assert sorted(found.trees["inputs/strategy"].files) == ["beside.py", "mine.py"]
    assert RunPlan.model_validate_json(found.plan.model_dump_json()) == found.plan


def test_a_rehearsal_is_a_plan_that_others_can_read(file: Path) -> None:
    short = shortened(plan_local_run(profile(strategy=f"{file}:All", strategy_options="interval = 50"), 2))
    assert (
        RunPlan.model_validate_json(short.model_dump_json()).profile.strategy.strategy_options == "whole.interval = 3"
    )


def test_a_rehearsal_takes_no_more_steps_than_the_run() -> None:
    assert shortened(plan_local_run(profile(max_steps=2), 1)).profile.training.max_steps == 2


def planned(text: str) -> Any:
    machines = tuple(ClusterMachine(name=name, measurements=(Measurement(batch=8, seconds=1.0),)) for name in "ab")
    link = Link(source="a", target="b", mbit=900.0, mbit_back=900.0, rtt_ms=0.6)
    size = {"trainable": 39_000_000, "total": 39_000_000, "samples": 32_000}
    found = plan(Cluster(machines=machines, links=(link,)), Job(**size, strategy=text, max_loss_increase=0.02))
    return next(one for one in found.ranking if not one.choice.alone)


def test_a_plan_of_it_is_predicted_where_it_says_what_it_costs(file: Path) -> None:
    assert planned(f"{file}:Half").predicted and planned(f"{file}:Half").exchange > 0
    file.with_name("free.py").write_text("from stand_ins import Half\nclass Free(Half): costs = None\n")
    assert cost_model(f"{file.parent}/free.py:Free") is None
    assert not planned(f"{file.parent}/free.py:Free").predicted


def test_a_class_names_its_file() -> None:
    from stand_ins import Half

    assert settings_name(Half) == f"{STAND_INS}:Half"
    assert settings_name(strategies()["diloco"]) == "diloco"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryPoint]:
    """A package that is installed here, with a strategy."""
    (tmp_path / "site-packages" / "others").mkdir(parents=True)
    (tmp_path / "site-packages" / "others" / "__init__.py").write_text("")
    (tmp_path / "site-packages" / "others" / "averages.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    point = EntryPoint("whole", "others.averages:All", ENTRY_POINTS)
    register_installed(point)
    yield point
    forget("whole")


@pytest.mark.usefixtures("package")
def test_a_strategy_of_an_installed_package_is_one_like_the_others() -> None:
    assert "whole" in strategies() and check_strategy("whole + sparta") == "whole + sparta"
    assert profile(strategy="whole", **{"whole.interval": "9"}).strategy.owned["whole"].model_dump() == {"interval": 9}


@pytest.mark.usefixtures("package")
def test_machines_without_the_package_are_sent_it_where_it_is_used() -> None:
    found = collect(plan_local_run(profile(strategy="whole + sparta", **{"whole.interval": "9"}), 2))
    there = found.plan.profile.strategy
    assert (there.strategy, there.strategy_options) == ("others.averages:All + sparta", "whole.interval = 9")
    assert sorted(found.trees["inputs/strategy"].files) == ["others/__init__.py", "others/averages.py"]
    unused = collect(plan_local_run(profile(strategy="diloco"), 2))
    assert "whole" not in {*there.owned, *unused.plan.profile.strategy.owned}
    assert "inputs/strategy" not in unused.trees


def test_a_package_whose_strategy_cannot_be_used_is_named() -> None:
    with pytest.raises(BadInput, match="package json: its strategy 'x' cannot be used: .*TypeError: json:loads is no"):
        register_installed(EntryPoint("x", "json:loads", ENTRY_POINTS))
    with pytest.raises(BadInput, match="package no_such: its strategy 'x' cannot be used: ModuleNotFoundError"):
        register_installed(EntryPoint("x", "no_such:Mine", ENTRY_POINTS))


def sparta_of(**own: Any) -> Strategy:
    settings = settings_of("sparta", owned={"sparta": own})
    return strategy_class("sparta")(StrategyContext(settings, total_steps=1, seed=0))


@pytest.mark.parametrize(
    ("strategy", "name", "options"),
    [
        ("diloco", "diloco", {}),
        (strategies()["diloco"], "diloco", {}),
        (["sparta", strategies()["diloco"]], "sparta + diloco", {}),
        (sparta_of(share=0.25), "sparta", {"sparta.share": 0.25}),
        ((sparta_of(share=0.25), "diloco"), "sparta + diloco", {"sparta.share": 0.25}),
        (muster.DiLoCo(), "diloco", {}),
        (muster.DiLoCo(sync_interval=50), "diloco", {"diloco.sync_interval": 50}),
        ([muster.Sparta(share=0.25), muster.FedAvg], "sparta + fedavg", {"sparta.share": 0.25}),
    ],
)
def test_a_script_names_a_strategy_as_it_likes(strategy: object, name: str, options: dict[str, Any]) -> None:
    text, own = settings_for(strategy)
    assert (text, {option: value for option, value in own.items() if "." in option}) == (name, options)
    profile(strategy=text, **own)


def test_an_instance_of_an_own_class_keeps_its_options(file: Path) -> None:
    kind = strategy_class(f"{file}:All")
    settings = load_user_strategy(StrategySettings(strategy=f"{file}:All", strategy_options="interval = 7"))
    text, own = settings_for(kind(StrategyContext(settings, total_steps=1, seed=0)))
    assert (text, own) == (f"{file}:All", {"strategy_options": "interval = 7"})
    assert settings_for(kind(interval=7)) == (text, own)


def test_options_of_all_strategies_and_misspelt_ones_go_to_the_profile() -> None:
    assert settings_for(muster.AllReduce(codec="bf16"))[1] == {"codec": "bf16"}
    with pytest.raises(BadInput, match="unknown option 'sync_intervall'"):
        profile(**settings_for(muster.DiLoCo(sync_intervall=50))[1])


class Bare(Half):
    def __init__(self, share: float) -> None:
        self.share = share


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (3, "strategy is int, which is no strategy here"),
        ([], "strategy is list"),
        (dict, "strategy is type"),
        (Bare(0.3), "an object of Bare was not made with a StrategyContext"),
    ],
)
def test_what_is_no_strategy_is_named(strategy: object, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings_for(strategy)
