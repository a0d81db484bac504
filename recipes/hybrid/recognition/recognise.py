"""Recognition of dev and the test sets, with options chosen on dev.

For each test set it writes the words (`swb.txt`), and the words with times and
confidences (`swb.ctm`, `swb.words.jsonl`); for all of them, one `decode.json`. The
acoustic scale is chosen on `dev`, never on the test sets: `dev` has speakers from the
training discs that training does not see.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein
from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.kaldi.lattices import (
    LabelledLattice,
    labelled_lattice,
    lattice_text,
    write_lattices,
)
from lightning_adpsgd.asr.language.ngram import read_arpa
from lightning_adpsgd.asr.parallel import fork_map, in_order
from lightning_adpsgd.asr.scoring import Errors, ScoringError
from lightning_adpsgd.asr.scoring import score as score_words
from lightning_adpsgd.asr.search.alignment import evenly
from lightning_adpsgd.asr.search.decoding import (
    ConfidentSearch,
    GraphDecoder,
    Lister,
    decode_at_scales,
)
from lightning_adpsgd.asr.search.nbest import NBestOptions
from lightning_adpsgd.asr.search.rescoring import (
    RescoringDecoder,
    Weighed,
    Weights,
    best,
)
from lightning_adpsgd.asr.search.words import Hypothesis
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.inputs import Load, StoredInputs, spoken_inputs
from recipes.hybrid.pipeline.crew import shared
from recipes.hybrid.pipeline.settings import TEST_SPLITS, Settings
from recipes.hybrid.pipeline.stage import StageError
from recipes.hybrid.recognition import kaldi
from recipes.hybrid.recognition.decoder import make_decoder
from recipes.hybrid.recognition.scorers import Scorer
from recipes.hybrid.recognition.scoring import read_rules
from recipes.hybrid.recognition.searching import Task, searched
from recipes.hybrid.recognition.written import Decoded, say, told_of, write_words

_MOST_WIDENINGS = 4
_LOST_SHARE = 0.01
_MARGIN = 2.0


def recognise(
    settings: Settings,
    output: Path,
    scorer: Scorer,
    scales: Sequence[float],
    nbest: int = 0,
    within: str = "",
    labels: str = "states",
) -> None:
    """Recognises dev and the test sets, with the scale that is best on dev.

    Machines share the searches. All get the results on dev, and choose the same.

    Args:
        settings: settings of the experiment.
        output: folder of the stage.
        scorer: log-likelihoods of an utterance.
        scales: acoustic scales to try on dev.
        nbest: number of word sequences to rescore for each utterance; 0 for none.
        within: name of a folder in `output` for the words of a further network.
        labels: name of the labels with which its frames are compared
            (`Settings.directory`).
    """
    decoder = make_decoder(settings)
    # Made before processes fork, which then share it.
    decoder.search_graph  # noqa: B018
    task = Task(settings, output, within, scorer, decoder)
    accuracy = _frame_accuracy(task, settings.directory(labels))
    sweep = _widening_sweep(task, scales)
    chosen = min(sweep, key=lambda scale: sweep[scale].wer)
    report: dict[str, Any] = {
        "frame_accuracy": accuracy,
        "acoustic_scale": chosen,
        "dev_wer": {str(scale): errors.wer for scale, errors in sweep.items()},
    }
    _say(
        task,
        f"  dev: {accuracy:.1%} of frames right, "
        f"WER {sweep[chosen].wer:.1%} at acoustic scale {chosen}",
    )
    task = task._replace(decoder=ConfidentSearch(decoder))
    report["least_fit"] = _fit_threshold(task, chosen)
    if nbest:
        task, weights = _with_larger_model(task, decoder, chosen)
        report |= weights
    decoded = {
        split: _decode_split(task, split, chosen, nbest) for split in _tests(settings)
    }
    if settings.decode.export_lattices:
        _export_lattices(task, decoder, chosen)
    if not task.leads:
        return
    report["incomplete"] = {split: one.incomplete for split, one in decoded.items()}
    report["decoded"] = {split: one._asdict() for split, one in decoded.items()}
    if settings.decode.export_likelihoods:
        _export(task, chosen)
    write_json(task.folder / "decode.json", report)


def _tests(settings: Settings) -> list[str]:
    return [split for split in settings.splits() if split in TEST_SPLITS]


def _say(task: Task, line: str) -> None:
    if task.leads:
        print(line, flush=True)


def _export_lattices(task: Task, decoder: GraphDecoder, scale: float) -> None:
    """Leaves the lattices of the test sets in Kaldi's form."""

    def search(matrix: np.ndarray) -> LabelledLattice | None:
        return labelled_lattice(decoder, matrix, scale)

    for split in _tests(task.settings):
        spoken = spoken_inputs(task.settings, split)
        loads = [load for _, load in spoken]
        found = searched(task, f"lattices-{split}", loads, search)
        if not task.leads:
            deque(found, maxlen=0)  # leaves its share
            continue
        ordered = in_order((index, lattice) for index, lattice, _ in found)
        texts = (
            lattice_text(utterance.id, lattice)
            for (utterance, _), lattice in zip(spoken, ordered, strict=True)
            if lattice is not None
        )
        write_lattices(task.folder / f"{split}.lat.gz", texts)


def _fit_threshold(task: Task, scale: float) -> float | None:
    """The fit below which words are considered noise; None if no word is right.

    It is twice `least_fit` of dev, and so further from 0, as no fit is above 0. The
    factor allows for calls that fit worse than those of dev.
    """
    spoken = _dev(task.settings)
    found = _hypotheses(task, "fit", spoken, [scale], to_all=True)
    pairs = zip(spoken, (one.several[0] for one in found), strict=True)
    fits = [
        (one.fit, num_right(one.text, utterance.words))
        for (utterance, _), one in pairs
        if one.fit is not None
    ]
    of_dev = least_fit(fits)
    return None if of_dev is None else _MARGIN * of_dev


def num_right(said: Sequence[str], meant: Sequence[str]) -> int:
    """The number of common words in the alignment with the fewest changes.

    Case does not count as a difference: a Kaldi graph may have capitals.
    """
    sides = ([word.lower() for word in words] for words in (said, meant))
    blocks = Levenshtein.opcodes(*sides)
    return sum(one.src_end - one.src_start for one in blocks if one.tag == "equal")


def least_fit(fits: Sequence[tuple[float, int]]) -> float | None:
    """The highest threshold that would drop at most 1 % of the right words.

    Args:
        fits: Fit and number of correct words of each utterance.
    """
    total = sum(right for _, right in fits)
    lost = 0
    for fit, right in sorted(fits):
        lost += right
        if lost > _LOST_SHARE * total:
            return fit
    return None


def _export(task: Task, acoustic_scale: float) -> None:
    """Leaves the log-likelihoods of the test sets for Kaldi's decoders."""
    for split in task.settings.splits():
        if split in TEST_SPLITS:
            spoken = spoken_inputs(task.settings, split)
            matrices = ((one.id, task.scorer(load())) for one, load in spoken)
            kaldi.export(task, split, matrices, acoustic_scale)


def _dev(settings: Settings) -> list[tuple[Utterance, Load]]:
    """Held-out utterances, evenly taken, for the choice of the acoustic scale."""
    spoken = [pair for pair in spoken_inputs(settings, "dev") if pair[0].words]
    return evenly(spoken, settings.decode.max_dev_utterances)


class _Search(NamedTuple):
    """A hypothesis per scale of an utterance, and the seconds of their search."""

    several: list[Hypothesis]
    seconds: float


def _hypotheses(
    task: Task,
    name: str,
    spoken: Sequence[tuple[Utterance, Load]],
    scales: Sequence[float],
    to_all: bool = False,
) -> list[_Search]:
    """The hypotheses for each utterance, in the order of `spoken`.

    Empty in a process that does not lead, unless `to_all` is set.
    """
    loads = [load for _, load in spoken]

    def search(matrix: np.ndarray) -> list[Hypothesis]:
        return decode_at_scales(matrix, task.decoder, scales)

    found = searched(task, name, loads, search, to_all)
    bar = tqdm(found, desc=f"decode {name}", total=len(loads), unit="utt")
    ordered = sorted(bar, key=lambda one: one[0])
    return [_Search(several, seconds) for _, several, seconds in ordered]


def _widening_sweep(task: Task, scales: Sequence[float]) -> dict[float, Errors]:
    """The errors on dev by scale; goes on beyond the ends while an end is the best."""
    sweep = _sweep(task, scales)
    for _ in range(_MOST_WIDENINGS):
        beyond = beyond_the_best({scale: e.wer for scale, e in sweep.items()})
        if beyond is None:
            break
        sweep |= _sweep(task, [beyond])
    return dict(sorted(sweep.items()))


def beyond_the_best(rates: Mapping[float, float]) -> float | None:
    """The next scale to try if the best one is at the end of the range.

    None if its neighbour is as good, because a wider range is then no better.
    """
    scales = sorted(rates)
    best = min(scales, key=lambda scale: rates[scale])
    if len(scales) < 2 or best not in (scales[0], scales[-1]):
        return None
    neighbour = scales[1] if best == scales[0] else scales[-2]
    if rates[neighbour] == rates[best]:
        return None
    return float(f"{best * best / neighbour:.2g}")


def _sweep(task: Task, scales: Sequence[float]) -> dict[float, Errors]:
    spoken = _dev(task.settings)
    name = "-".join(("dev", *map(str, scales)))
    found = _hypotheses(task, name, spoken, scales, to_all=True)
    return {
        scale: _dev_errors(task, spoken, [one.several[position].text for one in found])
        for position, scale in enumerate(scales)
    }


def _dev_errors(
    task: Task,
    spoken: Sequence[tuple[Utterance, Load]],
    texts: Sequence[Sequence[str]],
) -> Errors:
    pairs = zip(spoken, texts, strict=True)
    found = {utterance.id: text for (utterance, _), text in pairs}
    references = {utterance.id: utterance.words for utterance, _ in spoken}
    sources = {utterance.id: utterance.source for utterance, _ in spoken}
    try:
        rules = read_rules(task.settings)
        return score_words(references, found, glm=rules, sources=sources)
    except ScoringError as error:
        raise StageError(f"dev cannot be scored: {error}") from error


def _with_larger_model(
    task: Task, decoder: Lister, scale: float
) -> tuple[Task, dict[str, Any]]:
    """The task with n-best lists and the weights that are best on dev, and a report.

    Raises:
        StageError: A language model cannot be read, or a width does not fit.
    """
    settings, lm = task.settings.decode, task.settings.directory("lm")
    paths = task.settings.kaldi.arpa or lm / "lm.arpa", lm / "large.arpa"
    try:
        options = NBestOptions(
            most=settings.nbest,
            beam=settings.beam,
            lattice_beam=settings.lattice_beam,
            # docs/decoding.md has its cost beside that of the best path.
            max_active=max(2, settings.max_active // 2),
        )
        small, large = map(read_arpa, paths)
    except (OSError, ValueError) as error:
        raise StageError(f"`decode.nbest`: {error}") from error
    rescoring = RescoringDecoder(decoder, options, small, large)
    spoken = _dev(task.settings)

    def weighed(matrix: np.ndarray) -> list[Weighed]:
        return rescoring.weighed(matrix, scale)

    loads = [load for _, load in spoken]
    found = searched(task, "n-best", loads, weighed, to_all=True)
    bar = tqdm(found, desc="n-best dev", total=len(loads), unit="utt")
    several = [one for _, one, _ in sorted(bar, key=lambda one: one[0])]
    errors = {
        weights: _dev_errors(task, spoken, [best(one, weights) for one in several])
        for weights in starmap(
            Weights, product(settings.lm_weights, settings.word_penalties)
        )
    }
    _say_unknown(task, several)
    chosen = min(errors, key=lambda weights: errors[weights].wer)
    rescoring.weights, wer = chosen, errors[chosen].wer
    _say(
        task,
        f"  dev: WER {wer:.1%} with {chosen.large:g} of the larger model and a "
        f"penalty of {chosen.word_penalty:g} a word",
    )
    report = {"rescored": {"dev_wer": wer, **chosen._asdict()}}
    return task._replace(decoder=rescoring), report


def _say_unknown(task: Task, several: Sequence[Sequence[Weighed]]) -> None:
    alternatives = [alternative for one in several for alternative in one]
    lacking = [one for one in alternatives if one.num_unknown]
    if lacking:
        _say(
            task,
            f"  WARNING: {len(lacking)} of {len(alternatives)} alternatives for dev "
            f"have words that a language model lacks: {' '.join(lacking[0].text)}",
        )


def _frame_accuracy(task: Task, states: Path) -> float:
    """Fraction of dev frames whose most likely state is the label in `states`."""
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

    alone = getattr(task.scorer, "needs_this_process", False)
    cores = 1 if alone else task.settings.cores

    def work(share: Iterator[int]) -> Iterator[tuple[int, int]]:
        yield from (pair for _, pair in fork_map(num_right, [*share], cores))

    name, crew = task.name_of("frames"), task.settings.crew
    pairs = [*shared(crew, task.output, name, positions, work, to_all=True)]
    return sum(right for right, _ in pairs) / sum(total for _, total in pairs)


def _decode_split(task: Task, split: str, scale: float, nbest: int) -> Decoded:
    """Writes words and times; returns a summary of them.

    A process that does not lead leaves its share and writes nothing.
    """
    spoken = spoken_inputs(task.settings, split)
    searches = _hypotheses(task, split, spoken, [scale])
    found = [one.several[0] for one in searches]
    speech_s = sum(utterance.duration_s for utterance, _ in spoken)
    factor = sum(one.seconds for one in searches) / speech_s
    decoded = told_of(found, nbest, factor)
    if task.leads:
        write_words(task.folder, split, [one for one, _ in spoken], found)
        say(split, decoded)
    return decoded
