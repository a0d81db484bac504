"""Stages `baseline`, `decode` and `score`: from frames to words to a word error rate.

`decode` recognises with the network of a training run, `baseline` with the Gaussian
mixtures that made the alignment, `adapted_baseline` with those that fMLLR was estimated
for; what they leave is the same: for each split the words (`swb.txt`) and their times
(`swb.ctm`), and `decode.json`. The acoustic scale is chosen on `dev`, speakers of the
training discs that training does not see, never on the test sets. `score` leaves
`score.json`, and so do the baselines.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from lightning_adpsgd.asr.corpus import Utterance, read_utterances
from lightning_adpsgd.asr.decoding import (
    Decoder,
    Hypothesis,
    SearchOptions,
    decode_all,
    read_graph,
)
from lightning_adpsgd.asr.front_end import FrontEnd
from lightning_adpsgd.asr.gmm import GaussianMixtures
from lightning_adpsgd.asr.lexicon import read_lexicon
from lightning_adpsgd.asr.model import AcousticModel
from lightning_adpsgd.asr.parallel import fork_map
from lightning_adpsgd.asr.scoring import (
    NO_RULES,
    Errors,
    Glm,
    ScoringError,
    read_glm,
)
from lightning_adpsgd.asr.scoring import (
    score as score_words,
)
from lightning_adpsgd.asr.states import read_topology
from lightning_adpsgd.files import write_json, written_whole
from recipes.switchboard.inputs import Inputs, Load, StoredInputs, spoken_inputs
from recipes.switchboard.pipeline import StageError
from recipes.switchboard.settings import Settings

PART_NAMES = {"swb": "SWB", "ch": "CH"}

Scorer = Callable[[Inputs], np.ndarray]
"""From the inputs of an utterance to log-likelihoods [time, num_states]."""


class _Task(NamedTuple):
    settings: Settings
    output: Path
    scorer: Scorer
    decoder: Decoder


def decode(settings: Settings, output: Path) -> None:
    """Recognises dev and the test sets with the network of `settings.run`."""
    scorer = network(settings.directory("train") / "model.ckpt")
    _recognise(settings, output, scorer, settings.decode.acoustic_scales)


def baseline(settings: Settings, output: Path) -> None:
    """Recognises and scores with the Gaussian mixtures that made the alignment."""
    scorer = _mixtures(settings.directory("mixtures"))
    _recognise(settings, output, scorer, settings.decode.gmm_acoustic_scales)
    _score(settings, output, output, f"{settings.states} GMM")


def adapted_baseline(settings: Settings, output: Path) -> None:
    """Recognises and scores with mixtures and frames adapted to the speakers."""
    scorer = _adapted_mixtures(settings.directory("streams") / "mixtures.npz")
    _recognise(settings, output, scorer, settings.decode.gmm_acoustic_scales)
    _score(settings, output, output, f"{settings.states} GMM, fMLLR")


def score(settings: Settings, output: Path) -> None:
    """Counts the errors of `settings.run` on every test set."""
    _score(settings, settings.directory("decode"), output, settings.run)


def _mixtures(folder: Path) -> Scorer:
    scorer = GaussianMixtures.load(folder / "gmm.npz").scorer()
    front_end = FrontEnd.load(folder / "front_end.npz")
    return lambda inputs: scorer(front_end(inputs.log_mel.numpy()))


def _adapted_mixtures(path: Path) -> Scorer:
    scorer = GaussianMixtures.load(path).scorer()
    return lambda inputs: scorer(inputs.fmllr.float().numpy())


def network(path: Path) -> Scorer:
    """The log-likelihoods of a trained network.

    Raises:
        StageError: There is none at `path`.
    """
    try:
        model = AcousticModel.load_from_checkpoint(path, map_location="cpu")
    except FileNotFoundError as error:
        raise StageError(f"{path} does not exist; train first") from error
    model.eval()

    def log_likelihoods(inputs: Inputs) -> np.ndarray:
        return model.log_likelihoods(*inputs).numpy()

    return log_likelihoods


def _recognise(
    settings: Settings, output: Path, scorer: Scorer, scales: Sequence[float]
) -> None:
    lexicon = read_lexicon(settings.directory("lexicon"))
    options = SearchOptions(
        beam=settings.decode.beam, max_active=settings.decode.max_active
    )
    decoder = Decoder(
        read_graph(settings.directory("graph") / "HCLG.fst"),
        lexicon,
        read_topology(settings.directory("mixtures") / "tree.json"),
        options,
    )
    task = _Task(settings, output, scorer, decoder)
    report: dict[str, Any] = {"frame_accuracy": _frame_accuracy(task)}
    sweep = _sweep(task, scales)
    best = min(sweep, key=lambda scale: sweep[scale].wer)
    report |= {
        "acoustic_scale": best,
        "dev_wer": {str(scale): errors.wer for scale, errors in sweep.items()},
    }
    print(
        f"  dev: {report['frame_accuracy']:.1%} of frames right, "
        f"WER {sweep[best].wer:.1%} at acoustic scale {best}",
        flush=True,
    )
    report["incomplete"] = {
        split: _decode_split(task, split, best)
        for split in settings.splits()
        if split in PART_NAMES
    }
    write_json(output / "decode.json", report)


def _dev(settings: Settings) -> list[tuple[Utterance, Load]]:
    """Held-out utterances, evenly taken, for the choice of the acoustic scale."""
    spoken = [pair for pair in spoken_inputs(settings, "dev") if pair[0].words]
    most = settings.decode.max_dev_utterances
    if len(spoken) > most:
        spoken = [spoken[index * len(spoken) // most] for index in range(most)]
    return spoken


def _hypotheses(
    task: _Task,
    name: str,
    spoken: Sequence[tuple[Utterance, Load]],
    scales: Sequence[float],
) -> list[list[Hypothesis]]:
    """A hypothesis per scale of each utterance, in the order of `spoken`."""
    loads = [load for _, load in spoken]

    def log_likelihoods(load: Load) -> np.ndarray:
        return task.scorer(load())

    cores = task.settings.cores
    found = decode_all(loads, log_likelihoods, task.decoder, scales, cores)
    bar = tqdm(found, desc=f"decode {name}", total=len(loads), unit="utt")
    return [hypotheses for _, hypotheses in sorted(bar, key=lambda pair: pair[0])]


def _sweep(task: _Task, scales: Sequence[float]) -> dict[float, Errors]:
    spoken = _dev(task.settings)
    hypotheses = _hypotheses(task, "dev", spoken, scales)
    references = {utterance.id: utterance.words for utterance, _ in spoken}
    glm = _glm(task.settings)
    try:
        return {
            scale: score_words(
                references,
                {
                    utterance.id: several[position].text
                    for (utterance, _), several in zip(spoken, hypotheses, strict=True)
                },
                glm=glm,
            )
            for position, scale in enumerate(scales)
        }
    except ScoringError as error:
        raise StageError(f"dev cannot be scored: {error}") from error


def _frame_accuracy(task: _Task) -> float:
    """Fraction of dev frames whose most likely state is the label."""
    states = task.settings.directory("states")
    counts = np.array(json.loads((states / "states.json").read_text())["counts"])
    priors = np.log(np.maximum(counts, 1) / counts.sum()).astype(np.float32)
    labels = states / "dev" / "labels.npy"
    inputs = StoredInputs(task.settings, "dev", labels)
    store = inputs.store
    positions = np.flatnonzero(store.labelled).tolist()

    def num_right(position: int) -> tuple[int, int]:
        likelihoods = task.scorer(inputs(position))
        found = (likelihoods + priors).argmax(axis=1)
        return int((found == store.labels(position).numpy()).sum()), len(found)

    pairs = [pair for _, pair in fork_map(num_right, positions, task.settings.cores)]
    return sum(right for right, _ in pairs) / sum(total for _, total in pairs)


def _decode_split(task: _Task, split: str, scale: float) -> int:
    """Writes words and times; returns how many hypotheses are incomplete."""
    spoken = spoken_inputs(task.settings, split)
    found = [several[0] for several in _hypotheses(task, split, spoken, [scale])]
    texts, times = [], []
    for (utterance, _), hypothesis in zip(spoken, found, strict=True):
        texts.append(" ".join((utterance.id, *hypothesis.text)))
        times += _ctm_lines(utterance, hypothesis)
    _write_lines(task.output / f"{split}.txt", texts)
    _write_lines(task.output / f"{split}.ctm", times)
    incomplete = sum(not hypothesis.is_complete for hypothesis in found)
    if incomplete:
        print(
            f"  WARNING: {split}: no sentence ends with the last frame in {incomplete} "
            f"of {len(found)} utterances; their best unfinished path is taken. A "
            "larger decode.beam may help",
            flush=True,
        )
    return incomplete


def _ctm_lines(utterance: Utterance, hypothesis: Hypothesis) -> list[str]:
    recording, channel = utterance.recording.stem, "AB"[utterance.channel]
    return [
        f"{recording} {channel} {utterance.start_s + word.start_s:.2f} "
        f"{word.duration_s:.2f} {word.word}"
        for word in hypothesis.words
    ]


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    with written_whole(path) as file:
        file.writelines(f"{line}\n" for line in lines)


def _glm(settings: Settings) -> Glm:
    path = settings.directory("prepare") / "eval.glm"
    if not path.exists():
        return NO_RULES
    try:
        return read_glm(path)
    except ScoringError as error:
        raise StageError(str(error)) from error


def _score(settings: Settings, decoded: Path, output: Path, name: str) -> None:
    glm = _glm(settings)
    if glm.num_skipped:
        print(f"  WARNING: {glm.num_skipped} rules of the GLM have a form not applied")
    errors = {
        PART_NAMES[split]: _score_split(settings, decoded, split, glm)
        for split in settings.splits()
        if split in PART_NAMES
    }
    if not errors:
        raise StageError("there is no test set to score: neither SWB nor CH was found")
    total = Errors()
    for part in errors.values():
        total = total.plus(part)
    errors["total"] = total
    report = json.loads((decoded / "decode.json").read_text())
    parts = {part: {"wer": e.wer, **e._asdict()} for part, e in errors.items()}
    write_json(output / "score.json", {"name": name, "parts": parts, **report})
    print(_table(name, errors), flush=True)


def _score_split(settings: Settings, decoded: Path, split: str, glm: Glm) -> Errors:
    spoken = read_utterances(settings.directory("prepare") / f"{split}.jsonl")
    empty = [utterance for utterance in spoken if not utterance.words]
    if empty:
        print(
            f"  WARNING: {split}: {len(empty)} utterances have no reference words and "
            f"are not scored, the first: {empty[0].source}",
            flush=True,
        )
    scored = {utterance.id: utterance for utterance in spoken if utterance.words}
    lines = (decoded / f"{split}.txt").read_text(encoding="utf-8").splitlines()
    hypotheses = {line.split()[0]: line.split()[1:] for line in lines}
    missing = scored.keys() - hypotheses.keys()
    if missing:
        print(
            f"  WARNING: {split}: {len(missing)} utterances have no frames; all their "
            f"words count as deleted, for example {min(missing)}",
            flush=True,
        )
    try:
        return score_words(
            {name: utterance.words for name, utterance in scored.items()},
            {name: words for name, words in hypotheses.items() if name in scored},
            glm=glm,
            sources={name: utterance.source for name, utterance in scored.items()},
        )
    except ScoringError as error:
        raise StageError(f"{split} cannot be scored: {error}") from error


def _table(name: str, errors: dict[str, Errors]) -> str:
    lines = [f"  {name:<14}{'words':>7}{'WER':>8}{'sub':>6}{'del':>6}{'ins':>6}"]
    for part, e in errors.items():
        counts = f"{e.substitutions:>6}{e.deletions:>6}{e.insertions:>6}"
        lines.append(f"  {part:<14}{e.num_words:>7}{e.wer:>8.1%}{counts}")
    return "\n".join(lines)
