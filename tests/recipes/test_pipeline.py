"""Stages are run once, whole or not at all, and never again with other settings."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from recipes.hybrid.pipeline import contents, outputs, runner
from recipes.hybrid.pipeline.contents import Contents
from recipes.hybrid.pipeline.fingerprint import STAMP
from recipes.hybrid.pipeline.groups import LmSettings
from recipes.hybrid.pipeline.overrides import override
from recipes.hybrid.pipeline.runner import run_stages
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.pipeline.stage import Stage, StageError, stage_in
from recipes.hybrid.stages import STAGES


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "corpus").mkdir()
    return Settings(corpus=tmp_path / "corpus", out=tmp_path / "run")


class Recorder:
    """Three stages that append to each other's file and note their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: set[str] = set()
        self.said = ""

    def stages(self) -> tuple[Stage, ...]:
        return (
            Stage("check", "c", self._stage("check", ()), (), ("corpus",)),
            Stage("lm", "l", self._stage("lm", ("check",)), ("check",), ("lm",)),
            Stage("train", "t", self._stage("train", ("lm",)), ("lm",), ("seed",)),
        )

    def _stage(self, name: str, inputs: tuple[str, ...]):
        def run(settings: Settings, output: Path) -> None:
            self.calls.append(name)
            found = "".join(
                (settings.directory(i) / "text").read_text() for i in inputs
            )
            left = sorted(p.name for p in output.glob("piece*"))
            (output / f"piece{len(left)}").touch()
            if name in self.failing:
                raise OSError("disk full")
            (output / "text").write_text(f"{found} {name}{len(left)}{self.said}")

        return run


def test_stages_run_in_order_and_read_each_other(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]
    text = (settings.directory("train") / "text").read_text()
    assert text.split() == ["check0", "lm0", "train0"]


def test_finished_stages_are_skipped(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages(), last="lm")
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]


def test_a_stage_that_is_not_asked_for_is_neither_run_nor_checked(settings: Settings):
    recorder = Recorder()
    check, lm, train = recorder.stages()
    stages = (check, lm._replace(wanted=lambda s: s.seed == 1), train)
    train_alone = (check, stages[1], train._replace(inputs=("check",)))
    with pytest.raises(FileNotFoundError):  # train reads what lm did not leave
        run_stages(settings, train_alone)
    assert recorder.calls == ["check", "train"]
    run_stages(dataclasses.replace(settings, seed=1), stages)
    assert recorder.calls == ["check", "train", "lm", "train"]
    other = dataclasses.replace(settings, lm=LmSettings(order=2))
    run_stages(other, stages, first="train", last="train", redo=True)
    assert recorder.calls[-1] == "train"


def test_what_several_stages_can_leave_is_asked_of_the_one_in_question(
    settings: Settings,
):
    check, *_ = Recorder().stages()
    stages = (check, Stage("graph", "g", check.run, ("states",)))
    for states, stage in (("monophone", "align"), ("triphone", "triphone")):
        chosen = dataclasses.replace(settings, states=states)
        with pytest.raises(StageError, match=f"start with --from {stage}"):
            run_stages(chosen, stages)


def test_a_failed_stage_leaves_no_output_and_can_go_on(settings: Settings):
    recorder = Recorder()
    recorder.failing = {"lm"}
    with pytest.raises(OSError, match="disk full"):
        run_stages(settings, recorder.stages())
    assert not settings.directory("lm").exists()
    recorder.failing = set()
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "lm", "train"]
    # the second attempt found the piece of the first
    assert (settings.directory("lm") / "text").read_text().endswith("lm1")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Under which files can be made and emptied, but not filled."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_an_attempt_on_a_full_disk_leaves_the_work_of_the_one_before(
    settings: Settings, capsys
):
    recorder = Recorder()
    recorder.failing = {"check"}
    with pytest.raises(OSError, match="disk full"):
        run_stages(settings, recorder.stages())
    with full_disk(), pytest.raises(OSError, match="File too large"):
        run_stages(settings, recorder.stages())
    recorder.failing = set()
    run_stages(settings, recorder.stages())
    assert (settings.directory("check") / "text").read_text() == " check1"


def test_a_stage_whose_files_do_not_reach_the_disk_is_not_finished(
    settings: Settings, monkeypatch
):
    fsync = os.fsync

    def fails(number: int) -> None:
        if os.readlink(f"/proc/self/fd/{number}").endswith("/text"):
            raise OSError(errno.EIO, "Input/output error")
        fsync(number)

    with monkeypatch.context() as patch:
        patch.setattr(runner.os, "fsync", fails)
        with pytest.raises(OSError, match=r"Input/output error: '.*/text'"):
            run_stages(settings, Recorder().stages(), last="check")
    assert not settings.directory("check").exists()
    run_stages(settings, Recorder().stages(), last="check")
    assert settings.directory("check").exists()


@pytest.mark.parametrize("cut_off_at", ["_sync_files", "write_json", "Path.rename"])
def test_what_was_cut_off_before_it_had_its_name_is_not_thrown_away(
    settings: Settings, monkeypatch, cut_off_at: str
):
    def breaks(*_: object) -> None:
        raise OSError("cut off")

    recorder = Recorder()
    with monkeypatch.context() as patch:
        patch.setattr(f"{runner.__name__}.{cut_off_at}", breaks)
        with pytest.raises(OSError, match="cut off"):
            run_stages(settings, recorder.stages(), last="check")
    assert not settings.directory("check").exists()
    run_stages(settings, recorder.stages(), last="check")
    found = settings.directory("check")
    names = {"piece0", "piece1", "text"}
    assert {path.name for path in found.iterdir()} == {*names, STAMP}
    assert json.loads((found / STAMP).read_text())["outputs"].keys() == names


def test_what_was_cut_off_after_it_had_its_name_is_tidied(
    settings: Settings, monkeypatch
):
    def breaks(_: Path) -> None:
        raise OSError("cut off")

    run_stages(settings, Recorder().stages(), last="check")
    found = settings.directory("check")
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_tidy", breaks)
        with pytest.raises(OSError, match="cut off"):
            run_stages(settings, Recorder().stages(), last="check", redo=True)
    (found / runner.PARTS).mkdir()
    run_stages(settings, Recorder().stages(), last="check")
    assert {path.name for path in found.iterdir()} == {"piece0", "text", STAMP}
    assert {path.name for path in found.parent.iterdir()} == {"check", ".check.lock"}


def test_files_are_on_the_disk_before_their_stamp(settings: Settings, monkeypatch):
    synced: list[tuple[int, bool]] = []
    stamp = settings.out / f"exp/.check.partial/{STAMP}"

    def sync(number: int) -> None:
        synced.append((os.fstat(number).st_ino, stamp.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    run_stages(settings, Recorder().stages(), last="check")
    text = settings.directory("check") / "text"
    assert (text.stat().st_ino, False) in synced


def test_pieces_that_are_soon_made_again_are_thrown_away_under_other_settings(
    settings: Settings,
):
    recorder = Recorder()
    recorder.failing = {"lm"}
    with pytest.raises(OSError, match="disk full"):
        run_stages(settings, recorder.stages())
    recorder.failing = set()
    changed = dataclasses.replace(settings, lm=LmSettings(order=2))
    run_stages(changed, recorder.stages())
    assert (settings.directory("lm") / "text").read_text().endswith("lm0")


def test_work_left_under_other_settings_is_kept_until_it_is_given_up(
    settings: Settings,
):
    recorder = Recorder()

    def train(settings: Settings, output: Path) -> None:
        recorder.calls.append("train")
        left = sorted(output.glob("checkpoints/*"))
        (output / "checkpoints").mkdir(exist_ok=True)
        (output / f"checkpoints/{len(left)}.ckpt").write_text("of eight hours")
        if "train" in recorder.failing:
            raise OSError("interrupted")

    [table] = [stage for stage in STAGES if stage.name == "train"]
    stages = [
        Stage("train", "t", train, depends=("train",), work=table.work),
    ]
    recorder.failing = {"train"}
    with pytest.raises(OSError, match="interrupted"):
        run_stages(settings, stages)
    recorder.failing = set()
    changed = override(settings, "train.num_workers=2")
    problem = r"num_workers was 0, is 2\. Restore them.*--from train --redo"
    with pytest.raises(StageError, match=problem):
        run_stages(changed, stages)
    run_stages(settings, stages)
    trained = settings.directory("train") / "checkpoints"
    assert len([*trained.iterdir()]) == 2  # it has continued
    recorder.failing = {"train"}
    with pytest.raises(OSError, match="interrupted"):
        run_stages(settings, stages, redo=True)
    recorder.failing = set()
    run_stages(changed, stages, redo=True)
    assert len([*trained.iterdir()]) == 1


def test_a_changed_setting_is_refused_with_both_values(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    changed = dataclasses.replace(settings, lm=LmSettings(order=2))
    with pytest.raises(
        StageError, match=r"`lm`.*lm\.order was 3, is 2.*--from lm --redo"
    ):
        run_stages(changed, recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]


def test_a_stage_of_another_edition_counts_as_changed(settings: Settings):
    check, lm, train = Recorder().stages()
    run_stages(settings, (check, lm, train))
    stages = (check, lm._replace(edition="longer words"), train)
    problem = r"stage `lm`.*settings\.edition was absent, is longer words.*--from lm"
    for first in ("lm", "train"):
        with pytest.raises(StageError, match=problem):
            run_stages(settings, stages, first=first)
    run_stages(settings, stages, first="lm", redo=True)
    run_stages(settings, stages)


def test_a_setting_of_a_later_stage_changes_nothing_before(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages(), last="lm")
    run_stages(dataclasses.replace(settings, seed=7), recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]


def test_redo_runs_finished_stages_again(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    changed = dataclasses.replace(settings, lm=LmSettings(order=2))
    run_stages(changed, recorder.stages(), first="lm", redo=True)
    assert recorder.calls == ["check", "lm", "train", "lm", "train"]


def test_what_was_made_from_an_older_output_is_refused(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    recorder.said = "anew"
    run_stages(settings, recorder.stages(), first="lm", last="lm", redo=True)
    with pytest.raises(StageError, match=r"`train`.*inputs\.lm was \w+, is \w+"):
        run_stages(settings, recorder.stages())


def test_what_was_made_from_the_same_output_stays_whenever_it_was_made(
    settings: Settings,
):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    run_stages(settings, recorder.stages(), first="lm", last="lm", redo=True)
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "train", "lm"]


def _stand_ins(calls: list[str]) -> list[Stage]:
    """The stages of the recipe; each leaves a file, and `lm` one for each model."""

    def stand_in(name: str) -> Callable[[Settings, Path], None]:
        def run(settings: Settings, output: Path) -> None:
            calls.append(name)
            (output / f"{name}.arpa").write_text(name)
            if name == "lm":
                (output / "large.arpa").write_text(f"{settings.lm.large_order}")

        return run

    return [stage._replace(run=stand_in(stage.name)) for stage in STAGES]


def _of_version_0_2_0(settings: Settings, stages: Sequence[Stage]) -> None:
    """Writes stamps as that version did: groups as a whole, and inputs by stamps."""
    for stage in stages:
        stamp = settings.directory(stage.name) / STAMP
        if not stamp.exists():
            continue
        content = json.loads(stamp.read_text())
        del content["outputs"]
        of_settings = content["fingerprint"]["settings"]
        for name in [name for name in of_settings if "." in name]:
            del of_settings[name]
        for name in stage.apart:
            group, value = name.split(".")
            found = getattr(getattr(settings, group), value)
            of_settings[group][value] = json.loads(json.dumps(found, default=str))
        content["fingerprint"]["inputs"] = {
            stage_in(name): contents.digest_of(
                (settings.directory(stage_in(name)) / STAMP).read_bytes()
            )
            for name in (*stage.inputs, *stage.needs)
        }
        stamp.write_text(json.dumps(content, indent=1))


@pytest.mark.parametrize(
    ("chosen", "changed", "again"),
    [
        ((), ("lm.large_order=4", "decode.nbest=10"), {"lm"}),
        ((), ("decode.acoustic_scales=0.2,0.4", "decode.best_epoch=false"), set()),
        ((), ("decode.beam=11",), {"baseline"}),
        ((), ("graph.silence_probability=0.4",), {"graph", "baseline"}),
        (("kaldi.experiment=/tri4",), ("kaldi.arpa=/lm",), set()),
        (("kaldi.experiment=/tri4",), ("kaldi.graph=/graph",), {"graph"}),
    ],
)
def test_what_decoding_alone_reads_leaves_a_finished_training_valid(
    settings: Settings,
    chosen: tuple[str, ...],
    changed: tuple[str, ...],
    again: set[str],
):
    settings, calls = override(settings, *chosen), []
    stages = _stand_ins(calls)
    run_stages(settings, stages)
    assert "train" in calls
    calls.clear()
    other, after = override(settings, *changed), {"decode", "score", "export"}
    for stage in stages:
        if stage.name in again | after and stage.wanted(other):
            with pytest.raises(
                StageError, match=f"stage `{stage.name}`.*other settings"
            ):
                run_stages(other, stages, last=stage.name)
            run_stages(other, stages, stage.name, stage.name, redo=True)
    run_stages(other, stages)
    assert {*calls} <= again | after


def test_an_attempt_of_version_0_2_0_goes_on(settings: Settings, tmp_path: Path):
    (tmp_path / "lm").write_text("a model")
    chosen = override(settings, "kaldi.experiment=/tri4", f"kaldi.arpa={tmp_path}/lm")
    found: list[list[str]] = []

    def adapt(settings: Settings, output: Path) -> None:
        found.append(sorted(path.name for path in output.glob("*.npz")))
        (output / "ubm.npz").write_text("of an hour")
        if len(found) == 1:
            raise OSError("interrupted")

    [stage] = [stage for stage in STAGES if stage.name == "adapt"]
    stage = stage._replace(run=adapt, inputs=(), wanted=lambda _: True)
    with pytest.raises(OSError, match="interrupted"):
        run_stages(chosen, [stage._replace(apart=())])
    run_stages(chosen, [stage])
    assert found == [[], ["ubm.npz"]]


def test_folders_of_version_0_2_0_are_taken_as_they_are(settings: Settings):
    chosen = override(
        settings, "kaldi.experiment=/tri4", "kaldi.arpa=/lm", "kaldi.graph=/graph"
    )
    calls: list[str] = []
    stages = _stand_ins(calls)
    run_stages(chosen, stages)
    _of_version_0_2_0(chosen, stages)
    calls.clear()
    run_stages(chosen, stages)
    run_stages(chosen, stages, first="score")
    assert not calls
    with pytest.raises(StageError, match=r"`kaldi`.*kaldi\.arpa was /lm, is /other"):
        run_stages(override(chosen, "kaldi.arpa=/other"), stages)


def test_changed_settings_of_stages_before_the_first_are_refused(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    changed = dataclasses.replace(settings, lm=LmSettings(order=2))
    with pytest.raises(StageError, match=r"`lm`.*lm\.order was 3, is 2"):
        run_stages(changed, recorder.stages(), first="train", redo=True)
    assert recorder.calls == ["check", "lm", "train"]


def test_later_stages_need_neither_the_corpus_nor_unread_stages(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages(), last="lm")
    settings.corpus.rmdir()
    shutil.rmtree(settings.directory("check"))
    run_stages(settings, recorder.stages(), first="train")
    assert recorder.calls == ["check", "lm", "train"]


def test_a_failed_redo_keeps_the_finished_output(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    recorder.failing = {"lm"}
    with pytest.raises(OSError, match="disk full"):
        run_stages(settings, recorder.stages(), first="lm", redo=True)
    assert (settings.directory("lm") / "text").exists()


def test_a_changed_corpus_is_refused(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    (settings.corpus / "sw02001.sph").write_bytes(b"another disc")
    with pytest.raises(StageError, match=r"`check`.*corpus\.files"):
        run_stages(settings, recorder.stages())


def _edit(path: Path, text: str) -> None:
    """Other contents of the same size and time."""
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_transcript_that_was_edited_is_refused_though_its_size_is_the_same(
    settings: Settings,
):
    path = settings.corpus / "text"
    path.write_text("a uno dos\n")
    run_stages(settings, Recorder().stages())
    _edit(path, "a uno uno\n")
    problem = r"`check`.*contents\.corpus was \w+, is \w+ \(changed since: "
    problem += rf"{path}\).*--from check --redo"
    with pytest.raises(StageError, match=problem):
        run_stages(settings, Recorder().stages())


@pytest.mark.parametrize("first", [None, "train"])
def test_another_text_under_the_name_of_a_setting_is_refused(
    settings: Settings, tmp_path: Path, first: str | None
):
    text = tmp_path / "more.txt"
    text.write_text("uno dos\n")
    settings = override(settings, f"lm.text={text}")
    run_stages(settings, Recorder().stages())
    _edit(text, "uno uno\n")
    with pytest.raises(StageError, match=r"`lm`.*contents\.lm\.text was .*--from lm"):
        run_stages(settings, Recorder().stages(), first=first)
    run_stages(settings, Recorder().stages(), first="lm", redo=True)
    text.unlink()  # which is not needed any more
    run_stages(settings, Recorder().stages(), first=first)


def test_what_kaldi_adds_to_its_folders_is_no_change_of_what_was_read(
    settings: Settings, tmp_path: Path
):
    experiment, data = tmp_path / "tri4", tmp_path / "data"
    for folder in (experiment, data):
        folder.mkdir()
    for path in (experiment / "ali.1.gz", data / "segments"):
        path.write_text("uno\n")
    chosen = override(
        settings, f"kaldi.experiment={experiment}", f"kaldi.data={data},{data}"
    )
    stages = [Stage("kaldi", "k", lambda *_: None, depends=("kaldi",))]
    run_stages(chosen, stages)
    for added in (experiment / "decode_eval/lat.1.gz", data / "split4/1/segments"):
        added.parent.mkdir(parents=True)
        added.write_text("dos\n")
    run_stages(chosen, stages)
    for path in (experiment / "ali.1.gz", data / "segments"):
        _edit(path, "dos\n")
        with pytest.raises(StageError, match=r"`kaldi`.*contents\.kaldi\..* was \w+"):
            run_stages(chosen, stages)
        _edit(path, "uno\n")
    run_stages(chosen, stages)


@pytest.fixture
def of_kaldi(settings: Settings, tmp_path: Path) -> Settings:
    """An experiment with alignments and a graph."""
    for path in (tmp_path / "tri4/ali.1.gz", tmp_path / "tri4/graph/HCLG.fst"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("uno\n")
    return override(settings, f"kaldi.experiment={tmp_path}/tri4")


def test_another_graph_of_the_experiment_changes_the_search_and_no_labels(
    of_kaldi: Settings, tmp_path: Path
):
    labels, search = (
        [stage._replace(run=lambda *_: None, inputs=())]
        for name in ("kaldi", "graph")
        for stage in STAGES
        if stage.name == name
    )
    run_stages(of_kaldi, [*labels, *search])
    _edit(tmp_path / "tri4/graph/HCLG.fst", "dos\n")
    run_stages(of_kaldi, labels)
    with pytest.raises(StageError, match=r"`graph`.*contents\.kaldi\.graph"):
        run_stages(of_kaldi, search)


def test_a_graph_of_the_experiment_does_not_count_where_another_is_given(
    of_kaldi: Settings, tmp_path: Path
):
    [stage] = [stage for stage in STAGES if stage.name == "graph"]
    stages = [stage._replace(run=lambda *_: None, inputs=())]
    other = override(of_kaldi, f"kaldi.graph={tmp_path}/graph")
    run_stages(other, stages)
    _edit(tmp_path / "tri4/graph/HCLG.fst", "dos\n")
    run_stages(other, stages)


def test_what_was_interrupted_with_the_digest_of_a_whole_folder_goes_on(
    of_kaldi: Settings,
):
    def run(_: Settings, output: Path) -> None:
        (output / "work").write_text("hours of it")
        raise OSError("interrupted")

    stage = Stage("adapt", "a", run, depends=("kaldi",), work="work")
    with pytest.raises(OSError, match="interrupted"):
        run_stages(of_kaldi, [stage])
    claim = of_kaldi.out / "exp/.adapt.partial/.fingerprint"
    content = json.loads(claim.read_text())
    content["contents"] = {"kaldi.experiment": "of all files"}
    claim.write_text(json.dumps(content))
    run_stages(of_kaldi, [stage._replace(run=lambda *_: None)])
    assert (of_kaldi.directory("adapt") / "work").exists()


def test_a_stamp_with_the_digest_of_a_whole_folder_of_kaldis_is_accepted(
    of_kaldi: Settings,
):
    stages = [Stage("kaldi", "k", lambda *_: None, depends=("kaldi",))]
    run_stages(of_kaldi, stages)
    stamp = of_kaldi.directory("kaldi") / STAMP
    content = json.loads(stamp.read_text())
    content["fingerprint"]["contents"] = {"kaldi.experiment": "of all files"}
    stamp.write_text(json.dumps(content))
    run_stages(of_kaldi, stages)


def test_a_copy_of_the_corpus_with_other_times_is_the_same(settings: Settings):
    path = settings.corpus / "text"
    path.write_text("a uno dos\n")
    run_stages(settings, Recorder().stages())
    path.unlink()
    path.write_text("a uno dos\n")
    os.utime(path, (1, 1))
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    assert recorder.calls == []


class Before:
    """Stages that an earlier version has finished, in the form of its stamps.

    Args:
        settings: settings of the experiment.
        outputs: whether stamps have digests of files.
        contents: whether they have digests of the corpus.
    """

    def __init__(self, settings: Settings, outputs: bool, contents: bool) -> None:
        self.settings, self.recorder = settings, Recorder()
        self.table, self.sound = settings.corpus / "text", settings.corpus / "a.wav"
        self.table.write_text("uno")
        self.sound.write_text("sound")
        for number in range(3):
            stages = self.stages_before()[: number + 1]
            run_stages(settings, stages)
            stamp = settings.directory(stages[-1].name) / STAMP
            content = json.loads(stamp.read_text())
            if not outputs:
                del content["outputs"]
            if not contents:
                content["fingerprint"].pop("contents", None)
            stamp.write_text(json.dumps(content))
        self.recorder.calls.clear()

    def stages_before(self) -> tuple[Stage, ...]:
        check, lm, train = self.recorder.stages()
        return check, lm, train._replace(inputs=("lm/text",))

    def run(self, **options: Any) -> None:
        """Runs the stages as they are now: `check` reads the table and the sound."""
        check, *others = self.stages_before()
        of_corpus, of_sound = (lambda _: [self.table]), (lambda _: [self.sound])
        check = check._replace(of_corpus=of_corpus, of_sound=of_sound)
        run_stages(self.settings, (check, *others), **options)


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("contents", [False, True])
def test_a_stage_of_before_that_is_made_again_and_the_same_leaves_later_ones_valid(
    settings: Settings, outputs: bool, contents: bool
):
    before = Before(settings, outputs, contents)
    for name in ("check", "lm", "check"):
        before.run(first=name, last=name, redo=True)
    before.run()
    assert before.recorder.calls == ["check", "lm", "check"]
    before.run(first="check", redo=True)
    before.run()


@pytest.mark.parametrize("contents", [False, True])
@pytest.mark.parametrize("what", ["sound", "table", "said"])
def test_a_stage_of_before_that_is_made_again_and_another_is_a_change(
    settings: Settings, contents: bool, what: str
):
    """Also if its own files are the same: later stages read the sound, too."""
    before = Before(settings, outputs=True, contents=contents)
    if what == "said":
        before.recorder.said = "dos"
    else:
        path = getattr(before, what)
        path.write_text(path.read_text()[::-1])
    before.run(first="check", last="check", redo=True)
    with pytest.raises(StageError, match=r"exp/lm was made .*inputs\.check was"):
        before.run()


def test_stages_that_were_finished_without_digests_are_accepted(settings: Settings):
    text = settings.out.with_name("more.txt")
    text.write_text("uno dos\n")
    (settings.corpus / "text").write_text("a uno dos\n")
    settings = override(settings, f"lm.text={text}")
    check, lm, _ = Recorder().stages()
    for stages, name in (((check,), "check"), ((check, lm), "lm")):
        run_stages(settings, stages)
        stamp = settings.directory(name) / STAMP
        content = json.loads(stamp.read_text())
        del content["fingerprint"]["contents"]
        stamp.write_text(json.dumps(content))
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["train"]


def test_a_file_is_read_again_only_if_its_time_is_another(tmp_path: Path, monkeypatch):
    path, memory = tmp_path / "text", tmp_path / "memory"
    path.write_text("uno")
    monkeypatch.setattr(contents, "_CLOCK_NS", -(10**12))
    first = Contents(memory, keeps=True)
    digest = first.of(path)
    first.save()
    monkeypatch.setattr(contents, "_digest", lambda *_: "read again")
    assert Contents(memory, keeps=False).of(path) == digest
    os.utime(path, (1, 1))
    assert Contents(memory, keeps=False).of(path) == "read again"


def test_the_corpus_is_read_once_for_all_stages_of_a_first_command(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    """The first stage reads it before the experiment has a folder."""
    for name in ("a.wav", "b.txt"):
        (settings.corpus / name).write_text("1")
    read, digest_of = [], contents._digest

    def noted(path: Path, size: int, whole: bool) -> str:
        read.append(path)
        return digest_of(path, size, whole)

    monkeypatch.setattr(contents, "_digest", noted)
    monkeypatch.setattr(contents, "_CLOCK_NS", -(10**12))  # no file is too young
    check, *_ = Recorder().stages()
    prepare = check._replace(name="prepare", inputs=("check",))
    run_stages(settings, (check, prepare))
    assert [p.name for p in read if p.parent == settings.corpus] == ["a.wav", "b.txt"]


def test_of_sound_and_large_files_in_a_folder_blocks_are_read(
    tmp_path: Path, monkeypatch
):
    sound = tmp_path / "a.sph"
    samples = bytearray(10**6)
    for place, noticed in ((0, True), (len(samples) - 1, True), (10**5, False)):
        sound.write_bytes(samples)
        before = Contents(tmp_path / "none", keeps=False)
        whole, digest = before.of(sound), before.of_files([sound])
        edited = samples.copy()
        edited[place] = 1
        sound.write_bytes(edited)
        after = Contents(tmp_path / "none", keeps=False)
        assert (after.of_files([sound]) != digest) == noticed
        assert after.of(sound) != whole  # named by a setting, it counts whole
    monkeypatch.setattr(contents, "MOST_WHOLE", 10)
    text = tmp_path / "text"
    text.write_bytes(samples)
    digest = Contents(tmp_path / "none", keeps=False).of_files([text])
    edited[0] = 2
    text.write_bytes(edited)
    assert Contents(tmp_path / "none", keeps=False).of_files([text]) != digest


def test_a_stage_without_its_input_says_where_to_start(settings: Settings):
    with pytest.raises(StageError, match=r"`lm` reads `check`.*--from check"):
        run_stages(settings, Recorder().stages(), first="lm")


def test_stages_of_a_training_run_exist_once_per_run(settings: Settings):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    run_stages(dataclasses.replace(settings, run="ddp"), recorder.stages())
    assert recorder.calls == ["check", "lm", "train", "train"]
    folders = {p.name for p in (settings.out / "exp/train").iterdir() if p.is_dir()}
    assert folders == {"hadpsgd", "ddp"}


def test_an_error_has_a_note_of_a_file_that_was_changed_after_its_stage(
    settings: Settings,
):
    recorder, text = Recorder(), settings.directory("lm") / "text"
    writes = [text.read_text, lambda: text.write_text("")]  # nothing, and damage

    def read(settings: Settings, output: Path) -> None:
        writes.pop(0)()
        json.loads(text.read_text())

    stages = (*recorder.stages()[:2], Stage("train", "t", read, ("lm",)))
    with pytest.raises(json.JSONDecodeError) as its_own:
        run_stages(settings, stages)
    assert not hasattr(its_own.value, "__notes__")
    with pytest.raises(json.JSONDecodeError) as damaged:
        run_stages(settings, stages)
    (note,) = damaged.value.__notes__
    assert note.startswith(f"{text} is not as stage `lm` left it. ")
    assert note.endswith(" --from lm --to lm --redo")
    run_stages(settings, stages, first="lm", last="lm", redo=True)
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "lm", "train"]


def test_what_a_stage_says_itself_is_told_without_a_look_at_what_it_reads(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    def refuse(settings: Settings, output: Path) -> None:
        (settings.directory("lm") / "text").write_text("by hand")
        raise StageError("got SIGTERM")

    stages = (*Recorder().stages()[:2], Stage("train", "t", refuse, ("lm",)))
    run_stages(settings, stages, last="lm")
    monkeypatch.setattr(outputs, "digests_in", Mock(side_effect=AssertionError))
    with pytest.raises(StageError, match=r"^got SIGTERM$"):
        run_stages(settings, stages)


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_file_that_was_changed_after_its_stage_is_refused_by_the_one_that_reads_it(
    settings: Settings, is_finished: bool
):
    recorder = Recorder()
    run_stages(settings, recorder.stages(), last=None if is_finished else "lm")
    text = settings.directory("lm") / "text"
    before = text.read_text()
    _edit(text, before.swapcase())
    problem = rf"{text} is not as stage `lm` left it, and stage `train` reads it\. .*"
    for redo in (False, is_finished):
        with pytest.raises(StageError, match=problem + "--from lm --to lm --redo"):
            run_stages(settings, recorder.stages(), first="train", redo=redo)
    _edit(text, before)
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]


def test_what_a_stage_left_and_nobody_touched_is_not_read_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    run_stages(settings, Recorder().stages(), last="lm")
    text, stamp = (settings.directory("check") / name for name in ("text", STAMP))
    while stamp.stat().st_ctime_ns <= text.stat().st_ctime_ns:
        stamp.touch()  # the clock of files is a coarse one
    monkeypatch.setattr(Contents, "of_output", Mock(side_effect=AssertionError))
    run_stages(settings, Recorder().stages(), last="lm")
    text.touch()
    with pytest.raises(AssertionError):
        run_stages(settings, Recorder().stages(), last="lm")


@pytest.mark.parametrize(
    "name", ["logs/attempt_0/wandb/debug.log", "timeline/7.timeline.csv"]
)
def test_what_others_still_write_is_no_change(settings: Settings, name: str):

    def train(settings: Settings, output: Path) -> None:
        (output / name).parent.mkdir(parents=True)
        (output / name).write_text("begun")

    def export(settings: Settings, output: Path) -> None:
        (settings.directory("train") / name).write_text("ended")
        raise ZeroDivisionError

    stages = Stage("train", "t", train), Stage("export", "e", export, ("train",))
    run_stages(settings, stages, last="train")
    (settings.directory("train") / name).write_text("going on")
    with pytest.raises(ZeroDivisionError) as error:
        run_stages(settings, stages)
    assert not hasattr(error.value, "__notes__")


def test_a_copy_goes_on_without_a_look_at_large_shards_of_frames(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    def features(settings: Settings, output: Path) -> None:
        (output / "frames.json").write_text("2 files")
        with (output / "frames.0000.bin").open("wb") as file:
            file.truncate(contents.MOST_WHOLE + 1)

    def align(settings: Settings, output: Path) -> None:
        (output / "labels.json").write_text("[]")

    stages = (
        Stage("features", "f", features),
        Stage("align", "a", align, ("features",)),
    )
    run_stages(settings, stages)
    copy = dataclasses.replace(settings, out=settings.out.with_name("copy"))
    shutil.copytree(settings.out, copy.out)
    for path in copy.directory("features").glob("frames.*"):
        path.touch()
    read, digest = list[str](), contents._digest

    def look(path: Path, size: int, whole: bool) -> str:
        read.append(path.name)
        return digest(path, size, whole)

    monkeypatch.setattr(contents, "_digest", look)
    run_stages(copy, stages)
    assert read == ["frames.json"]


def test_a_finished_copy_on_a_folder_that_can_only_be_read_is_no_error(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    recorder = Recorder()
    run_stages(settings, recorder.stages())
    for name in ("check", "lm"):
        text = settings.directory(name) / "text"
        os.utime(text, (1, 1))
    monkeypatch.setattr(contents, "_CLOCK_NS", -(10**12))  # as if it were later
    refuse = Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(contents, "write_json", refuse)
    run_stages(settings, recorder.stages())
    assert refuse.called
    assert recorder.calls == ["check", "lm", "train"]


def test_a_file_beside_those_of_a_finished_stage_is_no_change(settings: Settings):
    run_stages(settings, Recorder().stages())
    for name in ("labels.rows-21.npy", "wandb/run.log"):
        path = settings.directory("lm") / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("by the next stage")
    run_stages(settings, Recorder().stages())


def test_an_error_stays_the_same_where_what_the_stage_reads_has_gone(
    settings: Settings,
):
    def fail(settings: Settings, output: Path) -> None:
        shutil.rmtree(settings.directory("lm"))
        raise ZeroDivisionError

    stages = (*Recorder().stages()[:2], Stage("train", "t", fail, ("lm",)))
    with pytest.raises(ZeroDivisionError):
        run_stages(settings, stages)


def test_two_processes_cannot_run_the_same_stage(settings: Settings):
    (settings.out / "exp").mkdir(parents=True)
    with (settings.out / "exp/.check.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        problem = r"another process runs this stage \(it .*/exp/\.check\.lock\)\. Wait"
        with pytest.raises(StageError, match=problem):
            run_stages(settings, Recorder().stages())


def test_a_folder_without_locks_gets_stages_and_the_user_is_told(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys
):
    recorder = Recorder()
    refuse = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]
    told = "exp/.lm.lock: this file system has no locks (No locks available); a second"
    assert told in capsys.readouterr().out


def test_a_lock_that_the_disk_fails_to_give_is_no_lack_of_locks(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    refuse = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=r"Input/output error: .*/exp/\.check\.lock"):
        run_stages(settings, Recorder().stages())


def test_a_stage_that_another_process_finished_meanwhile_is_not_run_again(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
):
    recorder, look = Recorder(), runner.is_finished

    def late(stage: Stage, settings: Settings, wanted: dict[str, Any]) -> bool:
        found = look(stage, settings, wanted)
        monkeypatch.setattr(runner, "is_finished", look)
        run_stages(settings, recorder.stages())
        return found

    monkeypatch.setattr(runner, "is_finished", late)
    run_stages(settings, recorder.stages())
    assert recorder.calls == ["check", "lm", "train"]


@pytest.mark.parametrize(
    ("first", "last", "problem"),
    [
        ("trian", None, "`first` must be one of"),
        (None, "trian", "`last` must be one of"),
        ("train", "lm", "'train' comes after 'lm'"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(
    settings: Settings, first: str | None, last: str | None, problem: str
):
    with pytest.raises(StageError, match=problem):
        run_stages(settings, Recorder().stages(), first, last)


def test_every_stage_of_the_recipe_reads_only_earlier_ones():
    for position, stage in enumerate(STAGES):
        earlier = {s.name for s in STAGES[:position]} | {
            "mixtures",
            "states",
            "streams",
            "search",
        }
        read = {stage_in(name) for name in (*stage.inputs, *stage.needs)}
        # the run that realigns is another one, which was finished before
        assert read <= earlier | {"aligner"}


@pytest.mark.parametrize("again", ["realign.run=hadpsgd", "realign.adapted=true"])
def test_other_labels_leave_what_the_first_run_has_finished(
    settings: Settings, again: str
):
    stages = [stage._replace(run=lambda *_: None) for stage in STAGES]
    first = override(settings, "adapt.streams=fmllr", "states=triphone")
    run_stages(first, stages)
    run_stages(override(first, "run=second", again), stages)
    assert (first.out / "exp/export/second").is_dir()


def test_every_setting_that_a_stage_depends_on_exists(settings: Settings):
    for stage in STAGES:
        attrgetter(*stage.depends, *stage.apart, "seed")(settings)
