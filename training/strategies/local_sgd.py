"""Local SGD: each member trains alone; every H steps all continue from the mean of their weights.

Stich 2018 (arXiv 1805.09767), algorithm 1: ``theta_i <- theta_i - eta g_i``, and in every ``H``-th step
``theta_i <- sum_k w_k theta_k / W``, with ``w_k`` samples (or tokens) of member ``k`` since the last mean. The state of
each member's optimizer stays with it.

Training does not overlap with the exchange. DiLoCo with an outer learning rate of 1 and no momentum computes the same,
and can overlap.
"""

from __future__ import annotations

from typing import ClassVar

from training.strategies.averaging import Averaging, AveragingCosts, AveragingOptions
from training.strategies.registry import register


class LocalSGDOptions(AveragingOptions):
    """Options of :class:`LocalSGD`."""


class LocalSGDCosts(AveragingCosts):
    """One mean of all weights every H steps."""

    interval_option = "local_sgd.sync_interval"


@register
class LocalSGD(Averaging):
    """Average all weights every ``H`` steps."""

    name: ClassVar[str] = "local_sgd"
    summary: ClassVar[str] = "weights averaged every so many steps, each machine's optimizer its own"
    options = LocalSGDOptions
    costs = LocalSGDCosts()
