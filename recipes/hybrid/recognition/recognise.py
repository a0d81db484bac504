"""Recognition of dev and the test sets, with what is chosen on dev.

It leaves for each test set the words (`swb.txt`), the same with times and confidences
(`swb.ctm`, `swb.words.jsonl`), and `decode.json`. The acoustic scale is chosen on
`dev`, never on the test sets: `dev` has speakers of the training discs that training
does not see.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rapidfuzz.distance import Levenshtein
from tqdm import tqdm

from lightning_adpsgd.asr.corpora.corpus import Utterance
from lightning_adpsgd.asr.kaldi.lattices import (
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
    Hypothesis,
    Lister,
    Search,
    hear,
)
from lightning_adpsgd.asr.search.nbest import NBestOptions
from lightning_adpsgd.asr.search.rescoring import (
    RescoringDecoder,
    Weighed,
    Weights,
    best,
)
from lightning_adpsgd.files import write_json
from recipes.hybrid.data.inputs import Load, StoredInputs, spoken_inputs
from recipes.hybrid.pipeline.runner import StageError
from recipes.hybrid.pipeline.settings import TEST_SPLITS, Settings
from recipes.hybrid.recognition import kaldi
from recipes.hybrid.recognition.decoder import make_decoder
from recipes.hybrid.recognition.scorers import Scorer
from recipes.hybrid.recognition.scoring import read_rules
from recipes.hybrid.recognition.written import Decoded, say, told_of, write_words

_MOST_WIDENINGS = 4
_LOST_SHARE = 0.01
_MARGIN = 2.0
_MATRICES_PER_CORE = 4

Result = TypeVar("Result")


class _Task(NamedTuple):
    settings: Settings
    output: Path
    scorer: Scorer
    decoder: Search


def recognise(
    settings: Settings,
    output: Path,
    scorer: Scorer,
    scales: Sequence[float],
    nbest: int = 0,
) -> None:
    """Recognises dev and the test sets, with the scale that is best on dev.

    Args:
        settings: settings of the experiment.
        output: folder of the words.
        scorer: log-likelihoods of an utterance.
        scales: acoustic scales to try on dev.
        nbest: number of word sequences to rescore for each utterance; 0 for none.
    """
    decoder = make_decoder(settings)
    # Made before processes fork, which then share it.
    decoder.search_graph  # noqa: B018
    task = _Task(settings, output, scorer, decoder)
    report: dict[str, Any] = {"frame_accuracy": _frame_accuracy(task)}
    sweep = _widening_sweep(task, scales)
    chosen = min(sweep, key=lambda scale: sweep[scale].wer)
    report |= {
        "acoustic_scale": chosen,
        "dev_wer": {str(scale): errors.wer for scale, errors in sweep.items()},
    }
    print(
        f"  dev: {report['frame_accuracy']:.1%} of frames right, "
        f"WER {sweep[chosen].wer:.1%} at acoustic scale {chosen}",
        flush=True,
    )
    task = task._replace(decoder=ConfidentSearch(decoder))
    report["least_fit"] = _least_fit(task, chosen)
    if nbest:
        task, weights = _with_larger_model(task, decoder, chosen)
        report |= weights
    decoded = {
        split: _decode_split(task, split, chosen)
        for split in settings.splits()
        if split in TEST_SPLITS
    }
    report["incomplete"] = {split: one.incomplete for split, one in decoded.items()}
    report["decoded"] = {split: one._asdict() for split, one in decoded.items()}
    if settings.decode.export_likelihoods:
        _export(task, chosen)
    if settings.decode.export_lattices:
        _export_lattices(task, decoder, chosen)
    write_json(output / "decode.json", report)


def _export_lattices(task: _Task, decoder: GraphDecoder, scale: float) -> None:
    """Leaves the lattices of the test sets in Kaldi's form."""
    for split in task.settings.splits():
        if split not in TEST_SPLITS:
            continue
        spoken = spoken_inputs(task.settings, split)
        found = _searched(
            task,
            [load for _, load in spoken],
            lambda matrix: labelled_lattice(decoder, matrix, scale),
        )
        texts = (
            lattice_text(utterance.id, lattice)
            for (utterance, _), lattice in zip(spoken, in_order(found), strict=True)
            if lattice is not None
        )
        write_lattices(task.output / f"{split}.lat.gz", texts)


def _least_fit(task: _Task, scale: float) -> float | None:
    """The fit below which words are taken for noise.

    It lies twice as far from 0 as the fit below which utterances of dev have at most
    1 % of the words that are right there: other calls fit worse than those of dev. None
    if no word is right.
    """
    spoken = _dev(task.settings)
    found = [several[0] for several in _hypotheses(task, "dev", spoken, [scale])]
    pairs = zip(spoken, found, strict=True)
    fits = [
        (one.fit, num_right(one.text, utterance.words))
        for (utterance, _), one in pairs
        if one.fit is not None
    ]
    of_dev = least_fit(fits)
    return None if of_dev is None else _MARGIN * of_dev


def num_right(said: Sequence[str], meant: Sequence[str]) -> int:
    """Words that stand in both, by the alignment with the fewest changes."""
    blocks = Levenshtein.opcodes(said, meant)
    return sum(one.src_end - one.src_start for one in blocks if one.tag == "equal")


def least_fit(fits: Sequence[tuple[float, int]]) -> float | None:
    """The largest fit below which lies at most 1 % of the right words.

    Args:
        fits: Fit of each utterance, and its number of right words.
    """
    total = sum(right for _, right in fits)
    lost = 0
    for fit, right in sorted(fits):
        lost += right
        if lost > _LOST_SHARE * total:
            return fit
    return None


def _export(task: _Task, acoustic_scale: float) -> None:
    """Leaves the log-likelihoods of the test sets for Kaldi's decoders."""
    for split in task.settings.splits():
        if split in TEST_SPLITS:
            spoken = spoken_inputs(task.settings, split)
            matrices = ((one.id, task.scorer(load())) for one, load in spoken)
            kaldi.export(task.settings, task.output, split, matrices, acoustic_scale)


def _dev(settings: Settings) -> list[tuple[Utterance, Load]]:
    """Held-out utterances, evenly taken, for the choice of the acoustic scale."""
    spoken = [pair for pair in spoken_inputs(settings, "dev") if pair[0].words]
    return evenly(spoken, settings.decode.max_dev_utterances)


def _hypotheses(
    task: _Task,
    name: str,
    spoken: Sequence[tuple[Utterance, Load]],
    scales: Sequence[float],
) -> list[list[Hypothesis]]:
    """A hypothesis per scale of each utterance, in the order of `spoken`."""
    loads = [load for _, load in spoken]
    found = _searched(task, loads, lambda matrix: hear(matrix, task.decoder, scales))
    bar = tqdm(found, desc=f"decode {name}", total=len(loads), unit="utt")
    return [hypotheses for _, hypotheses in sorted(bar, key=lambda pair: pair[0])]


def _searched(
    task: _Task, loads: Sequence[Load], search: Callable[[np.ndarray], Result]
) -> Iterator[tuple[int, Result]]:
    """What a search finds in the log-likelihoods of each utterance, with its index.

    Processes share the searches. A network on a GPU is of this process alone, which
    computes for some utterances before they are searched.
    """
    scorer, cores = task.scorer, task.settings.cores
    if not getattr(scorer, "needs_this_process", False):
        yield from fork_map(lambda load: search(scorer(load())), loads, cores)
        return
    block = cores * _MATRICES_PER_CORE
    for first in range(0, len(loads), block):
        matrices = [scorer(load()) for load in loads[first : first + block]]
        for index, found in fork_map(search, matrices, cores):
            yield first + index, found


def _widening_sweep(task: _Task, scales: Sequence[float]) -> dict[float, Errors]:
    """The errors on dev by scale; goes on beyond the ends while an end is the best."""
    sweep = _sweep(task, scales)
    for _ in range(_MOST_WIDENINGS):
        beyond = beyond_the_best({scale: e.wer for scale, e in sweep.items()})
        if beyond is None:
            break
        sweep |= _sweep(task, [beyond])
    return dict(sorted(sweep.items()))


def beyond_the_best(rates: Mapping[float, float]) -> float | None:
    """The next scale to try if the best one has nothing on one of its sides.

    None where its neighbour is as good: then more of the same is no better.
    """
    scales = sorted(rates)
    best = min(scales, key=lambda scale: rates[scale])
    if len(scales) < 2 or best not in (scales[0], scales[-1]):
        return None
    neighbour = scales[1] if best == scales[0] else scales[-2]
    if rates[neighbour] == rates[best]:
        return None
    return float(f"{best * best / neighbour:.2g}")


def _sweep(task: _Task, scales: Sequence[float]) -> dict[float, Errors]:
    spoken = _dev(task.settings)
    hypotheses = _hypotheses(task, "dev", spoken, scales)
    return {
        scale: _dev_errors(
            task, spoken, [several[position].text for several in hypotheses]
        )
        for position, scale in enumerate(scales)
    }


def _dev_errors(
    task: _Task,
    spoken: Sequence[tuple[Utterance, Load]],
    texts: Sequence[Sequence[str]],
) -> Errors:
    pairs = zip(spoken, texts, strict=True)
    found = {utterance.id: text for (utterance, _), text in pairs}
    references = {utterance.id: utterance.words for utterance, _ in spoken}
    try:
        return score_words(references, found, glm=read_rules(task.settings))
    except ScoringError as error:
        raise StageError(f"dev cannot be scored: {error}") from error


def _with_larger_model(
    task: _Task, decoder: Lister, scale: float
) -> tuple[_Task, dict[str, Any]]:
    """The task with n-best lists and the weights that are best on dev, and a report.

    Raises:
        StageError: A language model cannot be read.
    """
    settings, lm = task.settings.decode, task.settings.directory("lm")
    options = NBestOptions(
        most=settings.nbest,
        beam=settings.beam,
        lattice_beam=settings.lattice_beam,
        max_active=max(
            2, settings.max_active // 2
        ),  # at most twice the one-best's cost
    )
    paths = task.settings.kaldi.arpa or lm / "lm.arpa", lm / "large.arpa"
    try:
        small, large = map(read_arpa, paths)
    except (OSError, ValueError) as error:
        raise StageError(f"`decode.nbest`: {error}") from error
    rescoring = RescoringDecoder(decoder, options, small, large)
    spoken = _dev(task.settings)

    def weighed(matrix: np.ndarray) -> list[Weighed]:
        return rescoring.weighed(matrix, scale)

    loads = [load for _, load in spoken]
    found = _searched(task, loads, weighed)
    bar = tqdm(found, desc="n-best dev", total=len(loads), unit="utt")
    several = [one for _, one in sorted(bar, key=lambda pair: pair[0])]
    errors = {
        weights: _dev_errors(task, spoken, [best(one, weights) for one in several])
        for weights in starmap(
            Weights, product(settings.lm_weights, settings.word_penalties)
        )
    }
    rescoring.weights = min(errors, key=lambda weights: errors[weights].wer)
    wer = errors[rescoring.weights].wer
    print(f"  dev: WER {wer:.1%} with {rescoring.weights}", flush=True)
    report = {"rescored": {"dev_wer": wer, **rescoring.weights._asdict()}}
    return task._replace(decoder=rescoring), report


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

    alone = getattr(task.scorer, "needs_this_process", False)
    cores = 1 if alone else task.settings.cores
    pairs = [pair for _, pair in fork_map(num_right, positions, cores)]
    return sum(right for right, _ in pairs) / sum(total for _, total in pairs)


def _decode_split(task: _Task, split: str, scale: float) -> Decoded:
    """Writes words and times; returns what is told of them."""
    spoken = spoken_inputs(task.settings, split)
    begin = time.perf_counter()
    found = [several[0] for several in _hypotheses(task, split, spoken, [scale])]
    seconds = (time.perf_counter() - begin) * min(task.settings.cores, len(spoken))
    write_words(task.output, split, [one for one, _ in spoken], found)
    speech_s = sum(utterance.duration_s for utterance, _ in spoken)
    decoded = told_of(found, task.settings.decode.nbest, seconds / speech_s)
    say(split, decoded)
    return decoded
