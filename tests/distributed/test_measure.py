from __future__ import annotations

import contextlib
import itertools
import json
import signal
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import measured_pair as pair

from app.cli.train.measure import machines_of, matrix_lines, remark_lines, speed_lines
from app.wizard.state.assessment import path_of
from distributed.agent.requests import ListMissing, MachineRequest
from distributed.machine.link import HERE_NAME
from distributed.measuring import machine_figures, measure, short_runs
from distributed.measuring.link_figures import (
    AllInterfaces,
    InterfaceFigures,
    PairFigures,
    known_slower,
    rounds,
    saturating_peers,
)
from distributed.measuring.machine_figures import Placement, SpeedFigures, StartBarrier, figures_of
from distributed.measuring.measure import LinkStages, MeasurementResult, MeasureOptions, Stages
from distributed.planning.documents.cluster import ClusterMachine, Measurement, MeasurementCache
from distributed.planning.documents.document import Workload
from distributed.preparation import transfer
from distributed.preparation.code_sync import Inputs, folder_tree
from distributed.ssh.errors import SshError
from profiles.errors import BadInput, MusterError
from profiles.files.resolve import load_profile
from tests.waiting import until
from training.records.plan import MemberPlan

WORKLOAD = Workload(trainable=10, total=20, samples=30)
SPEED = SpeedFigures(
    machine=ClusterMachine(name="a", measurements=(Measurement(batch=4, seconds=0.5, peak=10**9),), cores=2),
    workload=WORKLOAD,
)
FACTS = {"kind": "facts", "system": "linux", "device": "cpu", "cores": 2.0, "memory_total": 9, "memory_free": 8}
TASK = {"kind": "workload", "trainable": 10, "total": 20, "layers": 2, "samples": 30}
STEP = {"kind": "measurement", "batch": 4, "seconds": 0.5, "peak": 1000}


def placed() -> Placement:
    member = MemberPlan(rank=0, name="a", batch_size=4)
    return Placement(cast(Any, SimpleNamespace(name="a")), cast(Any, SimpleNamespace(machine_key="SHA256:x")), member)


def inputs(tuning: str = "full") -> Inputs:
    model = SimpleNamespace(tuning=tuning)
    return cast(Inputs, SimpleNamespace(plan=SimpleNamespace(profile=SimpleNamespace(model=model))))


def lines(*said: dict[str, Any]) -> list[bytes]:
    return [json.dumps(one).encode() + b"\n" for one in said]


@given(st.lists(st.text(min_size=1), unique=True, max_size=17))
def test_every_pair_meets_once_and_nobody_twice_a_round(names: list[str]) -> None:
    found = rounds(names)
    met = [frozenset(one) for pairs in found for one in pairs]
    assert len(met) == len(set(met)) == len(names) * (len(names) - 1) // 2
    assert all(len({name for one in pairs for name in one}) == 2 * len(pairs) for pairs in found)
    assert len(found) <= len(names)


def test_a_short_run_becomes_a_machine() -> None:
    found = figures_of(placed(), inputs(), iter(lines(FACTS, STEP, TASK, {**STEP, "batch": 8, "seconds": 0.9})))
    assert [(one.batch, one.seconds, one.peak) for one in found.machine.measurements] == [
        (4, 0.5, 1000),
        (8, 0.9, 1000),
    ]
    assert (found.machine.identity, found.machine.cores, found.workload.layers) == ("SHA256:x", 2.0, 2)


def test_what_evaluating_a_sample_takes_is_measured_too() -> None:
    task = {**TASK, "evaluated": {"validation": 32, "test": 64}}
    found = figures_of(placed(), inputs(), iter(lines(FACTS, STEP, task, {"kind": "evaluation", "seconds": 0.1})))
    assert (found.machine.evaluation, found.workload.evaluated) == (0.1, {"validation": 32, "test": 64})


def test_the_larger_batch_may_not_fit() -> None:
    failure = {"kind": "failure", "message": "out of memory", "hint": ""}
    assert len(figures_of(placed(), inputs(), iter(lines(FACTS, STEP, TASK, failure))).machine.measurements) == 1


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ([{"kind": "failure", "message": "no data", "hint": "x"}], "could not run the task (no data)"),
        ([FACTS, TASK], "ended without figures"),
        ([FACTS, TASK, {**STEP, "seconds": -1}], "impossible figures"),
        ([{**FACTS, "cores": "many"}, TASK, STEP], "impossible figures"),
    ],
)
def test_a_short_run_that_went_wrong(said: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(SshError) as raised:
        figures_of(placed(), inputs(), iter(lines(*said)))
    assert problem in raised.value.message
    assert "\n" not in raised.value.message


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3)
SAID = st.fixed_dictionaries(
    {"kind": st.sampled_from(["facts", "workload", "measurement", "failure", "?"])},
    optional=dict.fromkeys(("batch", "seconds", "peak", "cores", "total", "samples", "message"), JSON),
)


@pytest.mark.slow
@given(st.lists(SAID.map(lambda said: json.dumps(said).encode()) | st.binary(), max_size=6))
@settings(max_examples=40)
def test_rubbish_instead_of_a_short_run(said: list[bytes]) -> None:
    with pytest.raises(SshError):
        figures_of(placed(), inputs(), iter(said))


def test_what_a_short_run_is_at_is_told_now_and_then() -> None:
    clock = iter(range(100))
    progress = [{"kind": "progress", "phase": "features", "done": done, "total": 9} for done in range(9)]
    steps = [{"kind": "progress", "phase": "steps\x1b of 4 samples", "done": True, "total": None}]
    told: list[str] = []
    figures_of(placed(), inputs(), iter(lines(*progress, FACTS, *steps, STEP, TASK)), told.append, clock.__next__)
    name = placed().member.name
    assert told == [f"{name}: features", f"{name}: features 5 of 9, about 0:04 left", f"{name}: steps of 4 samples"]


def test_earlier_figures_until_they_are_old(tmp_path: Path) -> None:
    cache = MeasurementCache(tmp_path / "new")
    key = {"identity": "SHA256:x"}
    assert cache.get(SpeedFigures, key) is None
    cache.put(key, SPEED)
    assert cache.get(SpeedFigures, key, 3600) == SPEED
    assert cache.get(SpeedFigures, key, 0) is None
    assert cache.get(SpeedFigures, {"identity": "other"}) is None
    assert len(list((tmp_path / "new").iterdir())) == 1


@given(st.binary() | JSON.map(lambda said: json.dumps(said).encode()))
def test_a_damaged_cache_is_measured_again(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    cache = MeasurementCache(tmp_path_factory.mktemp("cache"))
    cache.put({}, SPEED)
    (file,) = cache.folder.iterdir()
    file.write_bytes(content)
    assert cache.get(SpeedFigures, {}) is None


def test_a_busy_link_is_marked() -> None:
    _, sends, other = matrix_lines(MeasurementResult(["a", "b"], [pair(other_mbit=30)]))
    assert (sends, other) == ("a                       100* / 0.5", "b            90* / 0.5")
    assert not pair(other_mbit=4).busy


def test_a_machine_that_others_used_is_named() -> None:
    said = figures_of(placed(), inputs(), iter(lines(FACTS, {**STEP, "others": 0.63}, TASK)))
    (remark,) = [line for line in remark_lines(MeasurementResult(["a"], speeds=[said])) if "other programs" in line]
    assert remark.startswith("a: other programs used 63 % of its processors during the measurement")
    assert remark_lines(MeasurementResult(["a"], speeds=[SPEED])) == []


def test_long_names_are_whole_and_no_line_is_too_long() -> None:
    names = [letter * 64 for letter in "abcd"]
    pairs = [pair(a, b) for a, b in itertools.combinations(names, 2)]
    speeds = [SPEED.model_copy(update={"machine": SPEED.machine.model_copy(update={"name": n})}) for n in names]
    found = MeasurementResult(names, pairs, speeds)
    lines = [*matrix_lines(found), *speed_lines(found), *remark_lines(found)]
    assert max(map(len, lines)) <= 80
    assert all(sum(name in line for line in lines) == 2 for name in names)


def test_the_links_of_a_machine_that_does_not_train_are_shown() -> None:
    lines = matrix_lines(MeasurementResult(["a"], [pair()], local_name="b"))
    assert [line.split()[0] for line in lines] == ["Mbit/s", "a", "b"]


def test_a_row_a_machine() -> None:
    header, row = speed_lines(MeasurementResult(["a"], speeds=[SPEED]))
    assert header.split()[:3] == ["machine", "device", "batch"]
    assert row.split() == ["a", "cpu", "4", "8.0", "954", "MB", "2"]


def test_the_way_that_runs_take_is_named() -> None:
    ways = (("10.0.0.2", "eth0", "eth0", 19.0), ("169.254.7.2", "thunder0", "", 900.0))
    measured = pair(mbit=900, paths=ways, address="169.254.7.2")
    said = remark_lines(MeasurementResult(["a", "b"], [measured]))
    assert said[-2:] == ["  thunder0 to ?, 169.254.7.2: 900 Mbit/s", "  eth0 to eth0, 10.0.0.2: 19 Mbit/s"]
    assert remark_lines(MeasurementResult(["a", "b"], [pair()])) == []


@pytest.mark.parametrize("found", [pair(other_mbit=50), PairFigures(source="a", target="b", problem="refused")])
def test_a_doubtful_link_is_tried_again_unless_a_run_starts_soon(found: PairFigures, tmp_path: Path) -> None:
    tried, stages = scripted(found)
    wishes = (
        MeasureOptions(),
        MeasureOptions(),
        MeasureOptions(doubtful_age=60),
        MeasureOptions(max_age=0, doubtful_age=60),
    )
    counts = []
    for measure_options in wishes:
        wished = replace(measure_options, cache=MeasurementCache(tmp_path))
        pairs, _ = measure.current_links(ends("a", "b"), wished, stages)
        assert pairs == [found]
        counts.append(len(tried))
    assert counts == [1, 2, 2, 3]


def test_speeds_measured_in_use_count_for_a_short_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (Measurement(batch=4, seconds=0.5, others=0.5),)
    busy = SPEED.model_copy(update={"machine": ClusterMachine(name="b", measurements=points)})
    by_age = {60.0: {"a": SPEED, "b": busy}, 10.0: {}}
    monkeypatch.setattr(measure, "cached_speeds", lambda placements, inputs, cache, age: by_age[age])
    assert list(measure.usable_speeds([], inputs(), MeasureOptions(max_age=60, doubtful_age=10))) == ["a"]
    assert list(measure.usable_speeds([], inputs(), MeasureOptions(max_age=60, doubtful_age=90))) == ["a", "b"]


def ends(*names: str) -> list[tuple[Any, str]]:
    return [(cast(Any, SimpleNamespace(name=name)), f"SHA256:{name}") for name in names]


def scripted(found: PairFigures) -> tuple[list[list[frozenset[str]]], LinkStages]:
    """Every link is like ``found``; return the pairs of each time that some are measured, and what measures so."""
    tried: list[list[frozenset[str]]] = []

    def look(probes: Any, tell: Any, known: Any) -> list[PairFigures]:
        wanted = [pair for pair in itertools.combinations(probes, 2) if frozenset(pair) not in known]
        tried.append([frozenset(pair) for pair in wanted])
        return [found.model_copy(update={"source": one, "target": other}) for one, other in wanted]

    def probing(links: Any) -> Any:
        return contextlib.nullcontext({link.name: link for link in links})

    return tried, LinkStages(probing, look, lambda probes, pairs, tell: AllInterfaces())


def unplanned(profile: object, machines: object) -> Any:
    return SimpleNamespace(members=())


class Held:
    """A short run that notes what it is told."""

    link = None

    def __init__(self) -> None:
        self.told: list[object] = []

    def send(self, message: dict[str, Any]) -> None:
        self.told.append(message)

    def signal(self, number: int) -> None:
        self.told.append(number)


@pytest.mark.parametrize(("fails", "word"), [(False, {"go": True}), (True, signal.SIGKILL)])
def test_short_runs_load_while_links_are_measured_and_compute_afterwards(fails: bool, word: object) -> None:
    early, late, told = Held(), Held(), list[object]()

    def speeds(*arguments: Any) -> tuple[list[SpeedFigures], list[MusterError]]:
        gate: StartBarrier = arguments[-1]
        told.append("brought")
        gate.admit(cast(Any, early))
        gate.brought.set()
        until(lambda: early.told)
        gate.admit(cast(Any, late))
        return [SPEED], []

    def links(*_: Any) -> tuple[list[PairFigures], AllInterfaces]:
        told.extend(["links", *early.told])
        if fails:
            raise SshError("a", "cannot run the probe")
        return [pair()], AllInterfaces()

    profile = load_profile("demo-scratch").profile
    with pytest.raises(SshError) if fails else contextlib.nullcontext():
        stages = Stages(unplanned, links, speeds)
        assert measure.measure_ready([], profile, MeasureOptions(), stages).speeds == [SPEED]
    assert told == ["brought", "links"]
    assert early.told == late.told == [word]


def test_skipping_ends_the_short_runs_once_a_machine_has_figures() -> None:
    skip, gate, early, late = threading.Event(), StartBarrier(), Held(), Held()
    with machine_figures.ended_by(skip, gate):
        gate.admit(cast(Any, early))
        gate.open()
        skip.set()
        list(machine_figures._noted(iter(lines(FACTS, STEP)), gate.measured))
        assert not gate.given_up.is_set()
        list(machine_figures._noted(iter(lines(TASK)), gate.measured))
        until(lambda: len(early.told) > 1)
        gate.open()
        gate.admit(cast(Any, late))
    assert early.told == [{"go": True}, signal.SIGKILL] and late.told == [signal.SIGKILL]


def test_a_machine_that_was_skipped_is_guessed_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(machine_key="SHA256:y", system="Darwin")
    members = [MemberPlan(rank=rank, name=name, batch_size=4) for rank, name in enumerate("ab")]
    placements = [Placement(cast(Any, ReceivingLink()), cast(Any, facts), one) for one in members]
    gate, options = StartBarrier(), MeasureOptions(cache=MeasurementCache(tmp_path))

    def measured(placement: Placement, *_: object) -> SpeedFigures:
        if placement.member.name == "a":
            gate.give_up()
            return SPEED
        until(gate.given_up.is_set)
        raise SshError("b", "the short run there ended without figures")

    monkeypatch.setattr(measure, "collect", lambda plan: inputs())
    monkeypatch.setattr(measure, "BlockInputs", lambda *_: SimpleNamespace(of=lambda *_: None, close=lambda: None))
    monkeypatch.setattr(measure, "blocks_to_measure", lambda profile: None)
    monkeypatch.setattr(measure, "cached_speeds", lambda *_: {})
    monkeypatch.setattr(short_runs, "bring", lambda *_, has_code: has_code())
    monkeypatch.setattr(short_runs, "measure_member", measured)
    plan: Any = SimpleNamespace(profile=None)
    (first, second), problems = measure.current_speeds(placements, plan, options, gate)
    assert (first, second.machine.name, second.machine.estimated, problems) == (SPEED, "b", True, [])
    assert second.machine.measurements == SPEED.machine.measurements and second.machine.system == "darwin"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("interface", "interface_back", "medium"),
    [
        ("bridge0", "bridge0", "thunderbolt"),
        ("thunderbolt0", "bridge0", "thunderbolt"),  # a Linux PC and a Mac
        ("en0", "eth0", "ethernet"),
        ("bridge0", "eth0", "ethernet"),
    ],
)
def test_a_thunderbolt_cable_is_recognised_and_told(interface: str, interface_back: str, medium: str) -> None:
    paths = (("169.254.7.2", interface, interface_back, 18_000.0), ("10.0.0.2", "en0", "eth0", 940.0))
    measured = pair(mbit=18_000, paths=paths, address="169.254.7.2", interface=interface, interface_back=interface_back)
    assert measured.link.medium == medium
    words = f"{interface} to {interface_back} (169.254.7.2), the fastest of 2 paths"
    assert path_of(measured) == (f"Thunderbolt, {words}" if medium == "thunderbolt" else words)


class ReceivingLink:
    """A machine that has nothing yet; ``on_piece`` is called for every piece that arrives."""

    name, root = "a", ""

    def __init__(self, on_piece: Callable[[], object] = lambda: None) -> None:
        self._on_piece = on_piece

    def put_agent(self) -> None:
        """It is there."""

    def ask(self, request: MachineRequest, payload: Iterable[bytes] = (), **_: Any) -> Any:
        if isinstance(request, ListMissing):
            return {"trees": request.trees, "blobs": request.blobs, "begun": {}}
        for _piece in payload:
            self._on_piece()


def folder_inputs(folder: Path) -> Any:
    return SimpleNamespace(trees={"inputs/dataset": folder_tree(folder)})


def test_who_gives_up_does_not_wait_for_what_is_being_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while data are on their way to a machine behind a slow link."""
    gate, began, file = StartBarrier(), threading.Event(), tmp_path / "data"
    file.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(transfer, "PROGRESS_INTERVAL", 0.0)
    link: Any = ReceivingLink(lambda: (began.set(), until(gate.given_up.is_set)))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(machine_figures.bring, link, folder_inputs(tmp_path), is_abandoned=gate.given_up.is_set)
        assert began.wait(60)
        gate.give_up()
        with pytest.raises(BadInput, match="took too long to receive"):
            sent.result(60)


def test_a_long_transfer_says_every_few_seconds_how_much_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").write_bytes(bytes(16 << 18))  # 16 pieces of 2 s each
    monkeypatch.setattr(transfer, "PROGRESS_INTERVAL", 0.0)
    clock, lines = itertools.count(step=2.0), list[str]()
    machine_figures.bring(cast(Any, ReceivingLink()), folder_inputs(tmp_path), lines.append, clock=clock.__next__)
    amounts = ("262 kB", "1.0 MB", "1.8 MB", "2.6 MB")
    for line, amount in zip(lines, amounts):
        assert line.startswith(f"a: receiving code, data and model, {amount} of 4.2 MB")
    assert [" left" in line for line in lines] == [False, True, True, True, False]
    assert lines[4:] == ["a: starting the program for the short run there"]


def test_links_are_measured_where_nothing_is_brought_or_that_fails() -> None:
    stages = Stages(unplanned, lambda *_: ([pair()], AllInterfaces()), lambda *_: ([], []))
    profile = load_profile("demo-scratch").profile
    assert measure.measure_ready([], profile, MeasureOptions(), stages).pairs == [pair()]
    with pytest.raises(ZeroDivisionError):
        measure.measure_ready([], profile, MeasureOptions(), replace(stages, speeds=lambda *_: 1 // 0))


def test_another_machine_costs_its_own_links_only(tmp_path: Path) -> None:
    tried, stages = scripted(pair())
    for names in ("ab", "abc", "abc"):
        measure.current_links(ends(*names), MeasureOptions(cache=MeasurementCache(tmp_path)), stages)
    assert tried == [[frozenset("ab")], [frozenset("ac"), frozenset("bc")]]


def test_this_computer_keeps_its_links_under_another_name(tmp_path: Path) -> None:
    tried, stages = scripted(pair())
    interfaces = AllInterfaces(figures=(InterfaceFigures(machine="vm", mbit=290, mbit_back=285, peers=2),))
    stages = replace(stages, interfaces=lambda *_: interfaces)
    options = MeasureOptions(cache=MeasurementCache(tmp_path))
    for name in ("vm", HERE_NAME):
        here = (cast(Any, SimpleNamespace(name=name)), "this machine at 10.0.0.7")
        pairs, measured = measure.current_links([*ends("a", "b"), here], options, stages)
    assert len(tried) == 1
    assert {frozenset((one.source, one.target)) for one in pairs} == set(
        map(frozenset, itertools.combinations(("a", "b", HERE_NAME), 2))
    )
    assert [one.machine for one in measured.figures] == [HERE_NAME]


def test_this_computer_is_named_and_not_counted_where_it_only_starts_the_run(tmp_path: Path) -> None:
    lines: list[str] = []
    options = MeasureOptions(cache=MeasurementCache(tmp_path), tell=lines.append)
    pairs, _ = measure.current_links(ends("a", "b", HERE_NAME), options, scripted(pair())[1])
    assert lines[0].startswith("starting to measure on 2 machines, and how fast this computer, which does not train")
    assert lines[1] == "measuring 1 link"
    assert [one.labels for one in pairs if one.from_starter] == [("a", "this computer"), ("b", "this computer")]


def test_a_machine_carries_what_it_showed_with_several_at_once() -> None:
    whole = AllInterfaces(figures=(InterfaceFigures(machine="a", mbit=290, mbit_back=285, peers=3),))
    second = SPEED.model_copy(update={"machine": ClusterMachine(name="b")})
    cluster = MeasurementResult(["a", "b"], [pair()], [SPEED, second], interfaces=whole).figures.cluster
    assert [cluster.interface(name) for name in "ab"] == [285, 100]


def test_a_link_is_measured_anew_where_this_machine_has_another_address() -> None:
    far = cast(Any, SimpleNamespace(name="far", host="10.0.0.2", machine=SimpleNamespace(is_local=False)))
    places = [
        measure.identity_of_this_machine([far], {"10.0.0.2": address}.__getitem__)
        for address in ("10.0.0.7", "10.0.0.9")
    ]
    assert places[0] != places[1]
    assert measure.identity_of_this_machine([]) == "this machine at "


def test_whose_machines_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    profile = load_profile("nanogpt").profile
    (only,) = machines_of(None, profile, False).machines
    assert only.is_local
    for name in ("distributed_hosts.json", "mine.json"):
        Path(name).write_text(json.dumps({"master": f"{name[:4]}.local"}))
    named = load_profile("nanogpt", {"hosts": "mine.json"}).profile
    found = [machines_of(file, one, False).machines[0].host for file, one in ((None, profile), (None, named))]
    assert found == ["dist.local", "mine.local"]
    with pytest.raises(BadInput, match="no such hosts file"):
        machines_of(Path("none.json"), profile, False)


def test_the_document_of_the_planner() -> None:
    second = SPEED.model_copy(update={"machine": ClusterMachine(name="b:cuda:0", machine="b", device="cuda")})
    found = MeasurementResult(
        ["a", "b"], [pair(wireless=True)], [SPEED, second], local_name="a", model_path="m"
    ).figures
    (link,) = found.cluster.links
    assert (link.source, link.target, link.mbit, link.medium, link.air) == ("a", "b:cuda:0", 100, "wifi", "wifi")
    assert [one.interface_mbit for one in found.cluster.machines] == [100, 100]
    assert [one.wifi for one in found.cluster.machines] == [True, False]
    assert (found.cluster.here, found.workload.model_path) == ("a", "m")


def test_no_document_without_a_machine() -> None:
    with pytest.raises(BadInput, match="no machine has run the task"):
        _ = MeasurementResult(["a", "b"], [pair()]).figures


RATES = {"a": 95.0, "b": 95.0, "c": 95.0, "d": 40.0}
STAR = [pair("fast", name, mbit) for name, mbit in RATES.items()]


@pytest.mark.parametrize(
    ("pairs", "cards", "peers"),
    [
        (STAR, {}, "abcd"),
        (STAR, {"eth0": 1000.0}, "abcd"),
        (STAR, {"eth0": 200.0}, "abc"),
        (STAR, {"eth0": 100.0}, ""),
        (STAR[:1], {}, ""),
        ([pair("fast", name, 940) for name in "abc"], {"eth0": 1000.0}, ""),
        ([pair("fast", name, wireless=True) for name in "ab"], {}, ""),
    ],
)
def test_several_at_once_are_asked_where_a_link_alone_does_not_tell(
    pairs: list[PairFigures], cards: dict[str, float], peers: str
) -> None:
    assert "".join(one.target for one in saturating_peers("fast", pairs, cards)) == peers


def test_who_is_slow_towards_a_fast_machine_is_not_asked_itself() -> None:
    fast = InterfaceFigures(machine="fast", mbit=290, mbit_back=280, peers=4)
    assert known_slower("a", STAR, [fast])
    assert not known_slower("a", STAR, [fast.model_copy(update={"mbit": 100})])
    assert not known_slower("fast", STAR, [])
