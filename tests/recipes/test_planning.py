"""Projections are arithmetic on measured costs, and the page shows the same ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.planning import hours
from recipes.hybrid.planning.__main__ import main
from recipes.hybrid.planning.costs import CORPORA, Cost, measured, read_costs
from recipes.hybrid.planning.hours import GRAPH, stage_minutes, training_hours
from recipes.hybrid.planning.memory import memory_gb
from recipes.hybrid.planning.tables import with_tables
from recipes.switchboard.papers import with_papers

PAGE = Path(__file__).parents[2] / "docs/switchboard.md"
UNIT_COSTS = {
    "check": Cost("recordings", 1.0),
    "prepare": Cost("utterances", 1.0),
    "features": Cost("frames", 1.0),
    "align": Cost("frames", 1.0),
}
PART_COSTS = UNIT_COSTS | {
    name: Cost("units", 1.0)
    for name in (
        "lm: two models of order 4, one pruned",
        "triphone: statistics",
        "triphone: tree",
        "triphone: a realignment",
        "adapt: a round of fMLLR",
        "adapt: an iteration of i-vectors",
        "adapt: 2,048 Gaussians",
        "decode: the papers' network",
        "decode: search",
    )
}


def test_the_page_has_the_tables_of_the_kept_costs():
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text) == text
    for cost in read_costs()[0].values():
        assert cost.per_second > 0


def test_minutes_are_units_by_speed_and_cores():
    corpus = CORPORA[0]
    one, four = (stage_minutes(corpus, PART_COSTS, cores) for cores in (1, 4))
    assert one["check"] == pytest.approx(2438 / 60)
    assert one["features"] == pytest.approx(286 * 360_000 / 60)
    assert four["features"] == pytest.approx(one["features"] / 4)
    assert four["prepare"] == one["prepare"]
    frames, some = 286 * 360_000, 100_000 / 256_000
    assert one["align"] == pytest.approx(frames * (1 + 14 * some) / 60)
    tree, rest = 32_000 / 60, frames * (2 + 8 * some) / 60
    assert one["triphone"] == pytest.approx(tree + rest)
    assert four["triphone"] == pytest.approx(tree + rest / 4)
    assert one["lm"] == four["lm"] == pytest.approx(286 * 10_800 / 60)
    assert one["graph"] == four["graph"] == pytest.approx(GRAPH.seconds / 60)
    test, dev, some_of_dev = 3.7 * 360_000, 4000 * 500, 400 * 500
    scored = test + dev + 2 * some_of_dev
    by_gaussians = some * frames / 350 / 2048
    searched = 3 * test + (4 + 3) * some_of_dev
    assert one["baseline"] == pytest.approx((scored * by_gaussians + searched) / 60)
    decoded_twice = 2 * (test + dev) * (by_gaussians + 1)
    adapted = 4 * frames + 24e6 + 10 * 2 * 2438 + decoded_twice
    assert one["adapt"] == pytest.approx(adapted / 60)
    searched = test + (6 + 3) * some_of_dev
    assert one["decode"] == pytest.approx((scored + searched) / 60)


def test_projections_are_of_the_settings_of_the_papers_recipes(tmp_path: Path):
    chosen = with_papers(Settings(corpus=tmp_path, out=tmp_path), 8, 4)
    assert chosen.align.max_training_utterances == hours.ALIGNED
    assert chosen.triphone.num_leaves == hours.LEAVES
    assert chosen.triphone.num_gaussians == hours.MOST_GAUSSIANS
    assert chosen.triphone.frames_per_gaussian == hours.FRAMES_PER_GAUSSIAN
    assert chosen.lm.max_ngrams == hours.MAX_NGRAMS
    assert chosen.prepare.dev_utterances * 500 == hours.DEV_FRAMES
    assert chosen.decode.max_dev_utterances * 500 == hours.CHOSEN_FRAMES
    assert len(chosen.decode.acoustic_scales) == hours.SCALES
    assert len(chosen.decode.gmm_acoustic_scales) == hours.GMM_SCALES
    assert chosen.adapt.decodings == hours.DECODINGS
    assert chosen.adapt.rounds + 1 == hours.FMLLR_ROUNDS


def test_a_text_takes_the_memory_that_three_million_words_took():
    need = memory_gb(CORPORA[0])["lm: 4-grams before pruning"]
    assert need == pytest.approx(286 * 10_800 / 3e6 * 2.11, rel=0.02)


def test_training_takes_what_the_papers_report():
    swb2000 = CORPORA[1]
    assert training_hours(swb2000, 1) == (192.0, 192.0)
    assert training_hours(swb2000, 64) == (3.0, pytest.approx(5.2))
    best, worst = training_hours(CORPORA[0], 8)
    assert best == pytest.approx(192 * 286 / 1975 / 8)
    assert worst == pytest.approx(best * 5.2 * 64 / 192)


def test_costs_are_read_from_the_stamps_of_a_run(tmp_path: Path):
    for stage in ("check", "prepare", "features", "align"):
        (tmp_path / stage).mkdir()
        (tmp_path / stage / ".done").write_text(json.dumps({"seconds": 2.0}))
    report = {"recordings": {"a": [], "b": []}}
    (tmp_path / "check/report.json").write_text(json.dumps(report))
    (tmp_path / "prepare/train.jsonl").write_text("{}\n" * 6)
    (tmp_path / "features/train").mkdir()
    frames = np.zeros((1600, 40), np.float16)
    np.save(tmp_path / "features/train/frames.npy", frames)
    found = [measured(tmp_path, stage, 2, 14).per_second for stage in UNIT_COSTS]
    assert found[:2] == [0.5, 3.0]
    assert found[2] == pytest.approx(400, rel=0.01)  # the header of .npy counts little
    assert found[3] == pytest.approx(6400, rel=0.01)


def test_the_tables_are_printed(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert "### swb2000: 1975 h, 711 million frames" in capsys.readouterr().out
