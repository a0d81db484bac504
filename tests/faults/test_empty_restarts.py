"""A rendezvous that comes back empty, while learners are killed and come back too."""

from pathlib import Path

from benchmarks import restarts


def test_empty_restarts_under_churn_keep_all_in_and_merge_nothing_untrained(
    tmp_path: Path,
) -> None:
    each, found = restarts.observe(times=2, learners=3, seed=1, folder=tmp_path)
    assert [restart.missing for restart in each] == [[], []]
    assert found["learners killed and started again"] >= 2
    assert found["averages before any weights were taken"] == 0
    assert found["averages of weights of two trainings"] == 0
    assert found["lanes broken"] == 0
    assert found["learners that ended in an error"] == 0
    assert found["series"]["unexplained"] == []
