"""The counters of a learner's communication, before there is any."""

from dataclasses import astuple

from lightning_adpsgd.mixing.statistics import Statistics, Tally


def test_counters_begin_at_nothing() -> None:
    assert not any(astuple(Statistics()))
    assert not any(astuple(Tally()))
