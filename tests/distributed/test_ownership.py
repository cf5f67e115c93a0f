"""Shares of owners: the best there are, against all that a grid has."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_figures import joined, machine

from distributed.planning.documents.cluster import Cluster, Link
from distributed.planning.documents.document import Choice
from distributed.planning.exchange_cost import LEAST_GAIN, ExchangeCosts, best_shards

SMALL = 2_000_000


def longest(resources: Sequence[Sequence[float]], shards: Sequence[float]) -> float:
    return max(
        sum(second * share for second, share in zip(seconds_by_member, shards, strict=True))
        for seconds_by_member in resources
    )


def of_a_grid(resources: Sequence[Sequence[float]], steps: int = 20) -> float:
    """Return the time of the best shards among all multiples of ``1 / steps``."""
    members = len(resources[0])
    cuts = itertools.combinations_with_replacement(range(steps + 1), members - 1)
    grid = ([b - a for a, b in itertools.pairwise((0, *cut, steps))] for cut in cuts)
    return min(longest(resources, [count / steps for count in counts]) for counts in grid)


seconds = st.one_of(st.just(0.0), st.floats(0.01, 10))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.lists(seconds, min_size=n, max_size=n), min_size=1, max_size=9)))
def test_no_shards_are_much_better(resources: list[list[float]]) -> None:
    shards = best_shards(resources)
    members = len(shards)
    assert sum(shards) == pytest.approx(1) and min(shards) >= 0
    equal = longest(resources, [1 / members] * members)
    # Within 5 % equal shards stay; those that own next to nothing own nothing, which moves at most 5 % of the vector.
    tolerance = 0.05 * max(max(seconds_by_member) for seconds_by_member in resources)
    assert longest(resources, shards) <= min(equal, LEAST_GAIN * of_a_grid(resources)) + tolerance


@given(st.integers(2, 8), st.floats(0.1, 10))
def test_equal_parts_have_equal_shards(members: int, rate: float) -> None:
    stars = [[rate * (members - 1 if owner == member else 1) for owner in range(members)] for member in range(members)]
    assert best_shards(stars) == pytest.approx([1 / members] * members)


def test_a_matrix_whose_value_is_known() -> None:
    # Rock, paper, scissors, with what is won made positive: nobody can do better than a third of each.
    assert best_shards([[3, 0, 6], [6, 3, 0], [0, 6, 3]]) == pytest.approx([1 / 3] * 3)
    assert best_shards([[1, 3], [3, 1], [9, 0]]) == pytest.approx([3 / 11, 8 / 11], abs=0.01)


def shards_of(cluster: Cluster, codec: str = "fp32") -> tuple[float, ...]:
    members = tuple(sorted(machine.name for machine in cluster.machines))
    choice = Choice(strategy="allreduce", codec=codec, engine="mesh", members=members)
    return tuple(ExchangeCosts(cluster, SMALL).forecast(choice).shards.values())


def seconds_with(cluster: Cluster, shards: Sequence[float]) -> float:
    """Return how long the network is busy with a vector, worked out link by link: ``U s_j + D s_i`` from i to j."""
    names = sorted(machine.name for machine in cluster.machines)
    size = 4.0 * SMALL
    sent = {(i, j): size * (shards[b] + shards[a]) for (a, i), (b, j) in itertools.permutations(enumerate(names), 2)}
    times = [8e-6 * sent[i, j] / link.mbit for i, j in sent if (link := cluster.link(i, j)) is not None]
    for name in names:
        for end in (0, 1):
            times.append(8e-6 * sum(sent[pair] for pair in sent if pair[end] == name) / cluster.interface(name))
    return max(times)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([10.0, 50.0, 100.0, 300.0]), min_size=6, max_size=6))
def test_shards_of_four_machines_with_any_links(rates: list[float]) -> None:
    names = "abcd"
    pairs = zip(itertools.combinations(names, 2), rates, strict=True)
    links = tuple(Link(source=a, target=b, mbit=rate, mbit_back=rate / 2) for (a, b), rate in pairs)
    cluster = Cluster(machines=tuple(machine(name) for name in names), links=links)
    best = seconds_with(cluster, shards_of(cluster))
    cuts = itertools.combinations_with_replacement(range(13), 3)
    grid = ([(b - a) / 12 for a, b in itertools.pairwise((0, *cut, 12))] for cut in cuts)
    assert best <= 1.08 * min(seconds_with(cluster, shards) for shards in grid)


def test_a_wifi_member_makes_the_exchange_half_as_long_again_with_equal_shards() -> None:
    cluster = joined([machine(name) for name in "abcd"], 1000, {"d": 50})
    shards = shards_of(cluster)
    assert shards == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    assert seconds_with(cluster, [0.25] * 4) / seconds_with(cluster, shards) == pytest.approx(1.5)


def test_who_codes_slowly_owns_less() -> None:
    cluster = joined([machine("a", cores=4), machine("b", cores=4), machine("c", cores=0.1)], 10_000)
    assert shards_of(cluster, "mxfp4")[2] < 0.2
