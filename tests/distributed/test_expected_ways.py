"""Which way each pair of machines is expected to go, as far as measuring the links has shown it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from planner_figures import measured_pair

from app.cli.train.measure import remark_lines
from app.plan_table import explanation_lines, summary_lines
from distributed.launcher import expected_routes
from distributed.measuring.link_figures import PairFigures
from distributed.measuring.measure import MeasurementResult
from distributed.planning.documents.document import Candidate, Choice, Job, Planning, Settings
from distributed.planning.reasons import sentence
from training.records.plan import MemberPlan


def pair(source: str, target: str, address: str = "10.0.0.2") -> PairFigures:
    return measured_pair(source, target, interface_back="en0", address=address)


def chosen(names: Iterable[str], engine: Any = "mesh") -> Settings:
    members = (MemberPlan(rank=rank, name=name, batch_size=1) for rank, name in enumerate(names))
    return Settings(options={}, members=tuple(m.on_device(machine=m.name) for m in members), engine=engine)


def expected_sentences(pairs: list[PairFigures], *names: str, engine: Any = "mesh") -> list[str]:
    return [sentence(reason) for reason in expected_routes(chosen(names, engine), pairs)]


def test_a_pair_is_told_with_address_and_interfaces_and_who_alone_can_dial() -> None:
    pairs = [
        pair("a", "b"),
        pair("c", "a", "10.0.0.1").model_copy(update={"only": True}),
        PairFigures(source="b", target="c", problem="no route"),  # the planner tells of the relay
        pair("a", "unused", "10.0.0.9"),
    ]
    assert expected_sentences(pairs, "a", "b", "c") == [
        "a and b (10.0.0.2, eth0 to en0) exchange directly",
        "only machine c can connect to a (10.0.0.1, eth0 to en0), so it opens the connections of both directions",
    ]
    assert expected_sentences(pairs, "a", "b", "c", engine="nccl") == []


def test_a_pair_that_loses_large_packets_is_told_in_the_plan_and_beside_the_figures() -> None:
    lossy = measured_pair("a", "b", address="10.0.0.2", loses_large=True)
    (sentence,) = expected_sentences([lossy], "a", "b")
    assert sentence.endswith("exchange directly, in small packets: large ones are lost on the way")
    remarks = " ".join(remark_lines(MeasurementResult(["a", "b"], [lossy])))
    assert "a - b: small packets pass, large ones are lost" in remarks


def test_many_pairs_that_go_directly_are_only_counted() -> None:
    names = "abcde"
    pairs = [pair(a, b) for a, b in itertools.combinations(names, 2)]
    pairs[3] = pairs[3].model_copy(update={"only": True})
    sentences = expected_sentences(pairs, *names)
    assert (
        sentences[0] == "9 pairs of machines exchange directly"
        and sentences[1].startswith("only machine a can connect to e")
        and len(sentences) == 2
    )


def test_plan_and_explanation_tell_it() -> None:
    candidate = Candidate(choice=Choice(strategy="allreduce", codec="fp32", engine="mesh", members=("a", "b")))
    reasons = tuple(expected_routes(chosen("ab"), [pair("a", "b")]))
    job = Job(trainable=10, total=10, samples=100)
    planning = Planning(job=job, ranking=(candidate,), chosen=0, reasons=reasons)
    for output_lines in (summary_lines(planning), explanation_lines(planning)):
        assert "a and b (10.0.0.2, eth0 to en0) exchange directly" in " ".join(output_lines)
