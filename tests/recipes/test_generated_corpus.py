import errno
import fcntl
import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import soundfile

from recipes.generated import corpus, layout
from recipes.generated.__main__ import main
from recipes.generated.grammar import NOISES, laughed_word
from recipes.generated.speakers import VARIANTS
from tests import warm
from tests.recipes.conftest import DISCS, SEED

ROOT = Path(__file__).parents[2]
MINUTE: dict[str, Any] = {**DISCS, "seed": SEED}


@pytest.fixture(scope="module")
def tree(discs: Path) -> Path:
    return discs


def files(tree: Path) -> dict[str, bytes]:
    found = sorted(path for path in tree.rglob("*") if path.is_file())
    return {str(path.relative_to(tree)): path.read_bytes() for path in found}


def transcripts(tree: Path) -> dict[Path, list[list[str]]]:
    paths = sorted(tree.glob("LDC97S62/swb_ms98_transcriptions/*/*/*-trans.text"))
    return {p: [line.split() for line in p.read_text().splitlines()] for p in paths}


def audio_of(tree: Path, transcript: Path) -> soundfile.SoundFile:
    name = f"sw0{transcript.name[2:6]}"
    return soundfile.SoundFile(tree / layout.sphere_path(name))


def speech_minutes(tree: Path, names: list[str]) -> float:
    turns = [turn for name in names for turn in corpus.read_turns(tree, name)]
    return sum(turn.end - turn.start for turn in turns) / 8000 / 60


def test_twenty_calls_lie_on_four_discs_with_both_transcripts(tree):
    discs = [
        len(list(tree.glob(f"LDC97S62/swb1_d{k}/data/*.sph"))) for k in range(1, 5)
    ]
    assert discs == [5, 5, 5, 5]
    assert len(transcripts(tree)) == 40
    assert (tree / "LDC97S62/swb1_d2/data/sw02002.sph").exists()
    folder = tree / "LDC97S62/swb_ms98_transcriptions/20/2002"
    names = ["sw2002A-ms98-a-trans.text", "sw2002B-ms98-a-trans.text"]
    assert sorted(path.name for path in folder.iterdir()) == names


def test_audio_is_two_channel_mu_law_sphere_at_8_khz(tree):
    for path in tree.rglob("*.sph"):
        with soundfile.SoundFile(path) as file:
            found = (file.format, file.subtype, file.channels, file.samplerate)
            assert found == ("NIST", "ULAW", 2, 8000)


def test_transcripts_cover_their_audio_without_gap_or_overlap(tree):
    for path, lines in transcripts(tree).items():
        with audio_of(tree, path) as audio:
            end = audio.frames / 8000
        ends = ["0.000000", *(line[2] for line in lines)]
        assert [line[1] for line in lines] == ends[:-1]
        assert float(ends[-1]) == pytest.approx(end, abs=1e-6)
        label = path.name.removesuffix("-trans.text")
        assert [line[0] for line in lines] == [
            f"{label}-{k:04d}" for k in range(1, len(lines) + 1)
        ]


def test_speech_is_where_the_transcript_says_and_not_clipped(tree):
    for path, lines in transcripts(tree).items():
        with audio_of(tree, path) as audio:
            side = audio.read()[:, "AB".index(path.name[6])]
        assert np.abs(side).max() < 0.98
        speech = np.zeros(len(side), dtype=bool)
        for _, start, end, *words in lines:
            if words != ["[silence]"]:
                speech[round(float(start) * 8000) : round(float(end) * 8000)] = True
        assert np.std(side[speech]) > 2 * np.std(side[~speech])


def test_every_word_of_the_transcripts_is_in_the_dictionary(tree):
    lines = (tree / layout.DICTIONARY).read_text().splitlines()
    said = {
        laughed_word(word) or word
        for lines in transcripts(tree).values()
        for line in lines
        for word in line[3:]
    }
    unspoken = {"[silence]", *NOISES}
    assert said - unspoken <= {line.split()[0] for line in lines}


def test_there_is_at_least_as_much_speech_as_asked_for(tree):
    train = [f"sw{2001 + k:05d}" for k in range(20)]
    assert DISCS["minutes"] <= speech_minutes(tree, train) < 3.0
    test = [path.stem for path in tree.glob("LDC2002S09/hub5e_00/english/*.sph")]
    assert len(test) == 6
    assert DISCS["test_minutes"] <= speech_minutes(tree, test) < 1.2


def test_segments_reference_and_text_of_the_test_set_agree(tree):
    pem = [line.split() for line in (tree / layout.SEGMENTS).read_text().splitlines()]
    stm = (tree / layout.REFERENCE).read_text().splitlines()
    assert stm[:3] == [
        ';; LABEL "O" "Overall" "Overall"',
        ';; LABEL "en" "callhm" "CallHome"',
        ';; LABEL "sw" "swbd" "Switchboard"',
    ]
    references = [line.split() for line in stm[3:]]
    assert [(r[0], r[1], r[3], r[4]) for r in references] == [
        (p[0], p[1], p[3], p[4]) for p in pem
    ]
    for name, side, who, _, _, label, *words in references:
        assert who == f"{name}_{side}"
        assert label in {f"<O,{name[:2]},{g},{name[:2]}-{g}>" for g in "FM"}
        assert words == [word.upper() for word in words]
        assert not any("[" in word for word in words)
    texts = list(tree.glob("LDC2002T43/reference/english/*.txt"))
    spoken = sum(text.read_text().count("\n\n") - 1 for text in texts)
    assert spoken == len(pem)


def test_test_segments_lie_within_their_audio(tree):
    for line in (tree / layout.SEGMENTS).read_text().splitlines():
        name, _, _, start, end = line.split()
        info = soundfile.info(tree / layout.sphere_path(name))
        assert 0 <= float(start) < float(end) <= info.duration


def test_forty_training_and_twelve_test_speakers_none_in_both():
    plans = corpus.plan_parts({"train": 24, "sw": 2.5, "en": 2.5}, seed=1)
    identities = {
        part: [
            (speaker.voice, speaker.rate, speaker.pitch)
            for plan in plans
            for speaker in plan.speakers
            if plan.name.startswith(part)
        ]
        for part in ("sw0", "sw_", "en_")
    }
    assert [len(people) for people in identities.values()] == [40, 6, 6]
    everybody = [who for people in identities.values() for who in people]
    assert len(set(everybody)) == 52


def test_callhome_voices_are_unknown_to_training():
    far = {variant for variants in VARIANTS["en"] for variant in variants}
    assert not far & {variant for variants in VARIANTS["train"] for variant in variants}


def test_more_hours_make_more_calls_of_at_most_five_minutes():
    plans = corpus.plan_parts({"train": 600, "sw": 20, "en": 20}, seed=1)
    assert len(plans) == 120 + 4 + 4
    assert max(plan.speech_s for plan in plans) == 300


def test_bytes_depend_on_the_seed_alone(tree, tmp_path):
    corpus.write_corpus(tmp_path / "again", **MINUTE, processes=1)
    assert files(tmp_path / "again") == files(tree)


def test_another_seed_says_other_things(tree, tmp_path):
    corpus.write_corpus(tmp_path / "c", minutes=0.1, test_minutes=0.1, seed=8)
    said = [(tmp_path / "c" / layout.REFERENCE).read_text(), (tree / layout.REFERENCE)]
    assert said[0] != said[1].read_text()


def test_test_sentences_are_not_the_training_ones(tree):
    train = {
        " ".join(line[3:]) for lines in transcripts(tree).values() for line in lines
    }
    names = [path.stem for path in tree.glob("LDC2002S09/hub5e_00/english/*.sph")]
    test = [turn.tokens for name in names for turn in corpus.read_turns(tree, name)]
    long = [" ".join(tokens) for tokens in test if len(tokens) >= 8]
    assert long
    assert sum(text in train for text in long) <= 0.2 * len(long)


def test_an_interrupted_corpus_is_completed_without_touching_what_is_whole(
    tree, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    lost = copy / layout.sphere_path("sw02003")
    lost.with_name(f".{lost.name}.part").write_bytes(lost.read_bytes()[:5000])
    lost.unlink()
    (copy / ".generated/sw02003.json").unlink()
    kept = copy / layout.sphere_path("sw02004")
    before = kept.stat().st_mtime_ns
    corpus.write_corpus(copy, **MINUTE)
    assert files(copy) == files(tree)
    assert kept.stat().st_mtime_ns == before


def test_a_second_command_in_one_folder_is_refused_with_the_remedy(tmp_path, capsys):
    copy = tmp_path / "copy"
    (copy / ".generated").mkdir(parents=True)
    with (copy / ".generated/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["--out", str(copy), "--minutes", "0.5"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"recipes.generated: `tree` {copy} is being written by ano")
    assert told.endswith("wait until that has ended, or give another folder\n")
    assert files(copy) == {".generated/lock": b""}


def test_a_folder_without_locks_is_written_all_the_same(
    tree, tmp_path, monkeypatch, capsys
):
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    refuse = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    corpus.write_corpus(copy, **MINUTE)
    assert files(copy) == files(tree)
    assert "has no locks (No locks available); a sec" in capsys.readouterr().out
    refuse.side_effect = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output"):
        corpus.write_corpus(copy, **MINUTE)


def test_a_killed_command_leaves_nothing_that_the_next_one_stumbles_over(
    tree, tmp_path
):
    copy = tmp_path / "copy"
    shutil.copytree(tree, copy)
    for record in (copy / ".generated").glob("sw*.json"):
        record.unlink()
    command = [warm.python(), "-c", _WRITES, str(copy), json.dumps(MINUTE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"spoken\n"
        first.kill()
        first.stdout.read()  # the program ends after its command
    assert first.returncode == -signal.SIGKILL
    corpus.write_corpus(copy, **MINUTE)
    assert files(copy) == files(tree)


_WRITES = """
import json, sys
from pathlib import Path
from recipes.generated import corpus

finished = corpus._finished

def tell(process, plan):
    print("spoken", flush=True)
    return finished(process, plan)

if __name__ == "__main__":
    corpus._finished = tell
    corpus.write_corpus(Path(sys.argv[1]), **json.loads(sys.argv[2]))
"""


def test_a_corpus_of_other_arguments_is_refused(tree):
    with pytest.raises(FileExistsError, match=r"'minutes': 0\.5.*'minutes': 2\.0"):
        corpus.write_corpus(tree, **{**MINUTE, "minutes": 2.0})


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not a generated corpus"):
        corpus.write_corpus(tmp_path, **MINUTE)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf"), 1e6])
def test_impossible_amounts_of_speech_are_refused(tmp_path, minutes):
    with pytest.raises(ValueError, match="`minutes` of train must be"):
        corpus.write_corpus(tmp_path / "c", minutes=minutes)
    assert not (tmp_path / "c").exists()


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("precious")
    assert main(["--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("recipes.generated: `tree`")
    assert told.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--out", str(tmp_path / "file/corpus")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("recipes.generated: ")
    assert told.count("\n") == 1


def test_the_record_of_a_call_says_who_spoke(tree):
    record = json.loads((tree / ".generated/en_4392.json").read_text())
    assert [speaker["snr_db"] > 0 for speaker in record["plan"]["speakers"]] == [
        True
    ] * 2
    assert (
        record["num_samples"]
        == soundfile.info(tree / layout.sphere_path("en_4392")).frames
    )
