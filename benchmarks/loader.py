"""The training data loader's frames per second and core, and the cost of opening it.

Corpora of 1, 10 and 100 million frames of 40 log-mel energies in float16, as the stage
`features` leaves them, with labels. The files are sparse: the system fills holes with
zeros as they are read, so the disk is not part of the measurement. Each corpus is
opened in a process of its own with one thread. Batches of 256 chunks of 21 frames come
from the loader that training uses, in the order of an epoch. Each chunk has the four
frames on both sides that differences need. Seconds are those of the processor.

What a GPU consumes is projected. A frame costs 6 operations for each of the 43 million
weights. One V100 took 192 hours for 16 epochs of 711 million frames, 27 % of its peak
of 15.7 Tflop/s (arXiv 1907.05701). An H200 with the same share of its 989 Tflop/s in
bfloat16 would take a million frames a second. The bound is 20 times that, per core.
"""

import multiprocessing
import tempfile
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch.utils.data import DataLoader

from benchmarks.results import Report, Row, Target
from benchmarks.timing import Spread, print_row, processor_seconds, spread
from lightning_adpsgd.asr.frames.data import Chunk, SpeechData
from lightning_adpsgd.asr.frames.writing import FrameWriter
from lightning_adpsgd.asr.sound.features import CONTEXT

MILLION = 1_000_000
MELS, CHUNK, BATCH, UTTERANCE = 40, 21, 256, 311
BATCHES = 100  # in a turn
FLOPS_PER_FRAME = 6 * 43_154_944
V100 = 16 * 711e6 / (192 * 3600)  # frames a second
V100_SHARE = V100 * FLOPS_PER_FRAME / 15.7e12
CONSUMED = V100_SHARE * 989e12 / FLOPS_PER_FRAME
TIMES = 20


class Seen(NamedTuple):
    """The measurements of a process that opened a corpus.

    Attributes:
        first_s: From nothing to the first batch, when the chunks had to be counted.
        open_s: The same, later.
        own_bytes: Growth of the process's own memory until the end.
        mapped_bytes: Growth of what it has mapped of files, which the system takes
            back when it needs memory.
        cold_s: Duration of a batch whose frames were never read before.
        batch_s: Durations of a batch whose frames are in memory, in turns.
        copy_s: Durations of a copy of as many bytes in memory, in turns.
    """

    first_s: float
    open_s: list[float]
    own_bytes: int
    mapped_bytes: int
    cold_s: float
    batch_s: list[float]
    copy_s: list[float]


def measure(quick: bool = False) -> Report:
    """Measures rate, start and memory by the size of the corpus."""
    report = Report(
        "Loading chunks of 21 frames for training (1 process, 1 thread, batches of "
        f"{BATCH}); corpora of 1 to 100 million frames in sparse files.",
        limit="a copy in memory of the same bytes",
        notes=[
            f"An H200 is projected to consume {CONSUMED / MILLION:.2f} million frames "
            f"a second: {V100_SHARE:.0%} of 989 Tflop/s, as one V100 of its peak.",
            f"A V100 of the papers consumed {V100 / MILLION:.4f} million.",
            "own: memory of the process itself, after a pass over batches; mapped: "
            "pages of files that it has looked at.",
        ],
    )
    seen = {size: in_a_process(size, quick) for size in (1, 10, 100)}
    for size, found in seen.items():
        report.rows += rows_of(size, found)
        rate = spread(found.batch_s).per(BATCH * CHUNK).median
        claim = f"{size} million frames: frames per second, of what a GPU consumes"
        report.targets.append(Target(claim, TIMES, rate / CONSUMED))
    report.targets += _flat(seen[1], seen[100])
    return report


def rows_of(size: int, found: Seen) -> Iterator[Row]:
    """Rate, start and memory with a corpus of so many million frames."""
    case: dict[str, str | float] = {"million frames": float(size)}
    rate = spread(found.batch_s).per(BATCH * CHUNK / MILLION)
    ratio = spread(found.copy_s).median / spread(found.batch_s).median
    details = {
        "times what a GPU consumes": rate.median * MILLION / CONSUMED,
        "M frames/s, read for the first time": BATCH * CHUNK / MILLION / found.cold_s,
    }
    yield Row(case, rate, "M frames/s", ratio, table="rate", details=details)
    opened = spread(1e3 * seconds for seconds in found.open_s)
    once = {"ms, at the very first": 1e3 * found.first_s}
    yield Row(case, opened, "ms", table="from nothing to a batch", details=once)
    own, mapped = found.own_bytes / 2**20, found.mapped_bytes / 2**20
    yield Row(
        case, Spread(own, own, own), "MiB", table="own", details={"mapped": mapped}
    )
    print_row(
        f"{size} million frames",
        f"{rate:.1f} M/s, {ratio:.2f} of a copy",
        f"{opened:.1f} ms",
        f"{own:.1f} MiB",
    )


def _flat(small: Seen, large: Seen) -> Iterator[Target]:
    later = 1e3 * (spread(large.open_s).median - spread(small.open_s).median)
    yield Target("ms until a batch more with 100 million frames", 10, later, False)
    more = (large.own_bytes - small.own_bytes) / 2**20
    yield Target("MiB of memory more with 100 million frames", 8, more, False)


def in_a_process(size: int, quick: bool) -> Seen:
    """Makes a corpus of so many million frames, and opens it in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(1) as pool:
        small, large = Path(folder, "small"), Path(folder, "large")
        make_corpus(small, MILLION // 100)
        make_corpus(large, size * MILLION)
        return pool.apply(observe, (small, large, 5 if quick else 15))


def make_corpus(folder: Path, num_frames: int) -> None:
    """Stores `train` and `dev` and labels, as the stages leave them; all zeros."""
    num_utterances = num_frames // UTTERANCE
    ids = [f"sw{number:09d}" for number in range(num_utterances)]
    for split, number in (("train", num_utterances), ("dev", 10)):
        writer = FrameWriter(folder / split, ids[:number], [UTTERANCE] * number, MELS)
        writer.create()
        writer.finish()
        labels = folder / "align" / split
        labels.mkdir(parents=True)
        open_memmap(labels / "labels.npy", "w+", np.int32, (number * UTTERANCE,))
        np.save(labels / "labels.present.npy", np.ones(number, bool))


def observe(small: Path, large: Path, turns: int) -> Seen:
    """Opens a corpus and takes batches, after a small corpus as a warm-up."""
    torch.set_num_threads(1)
    first_batch(small)  # so that Python's imports are done
    own, mapped = _memory("RssAnon"), _memory("RssFile")
    first_s = processor_seconds(lambda: first_batch(large))
    open_s = [processor_seconds(lambda: first_batch(large)) for _ in range(turns)]
    loader = loader_of(large)
    # The same batches once more, so that their frames are in memory.
    cold_s, *batch_s = [
        processor_seconds(lambda: deque(islice(loader, BATCHES), 0)) / BATCHES
        for _ in range(turns + 1)
    ]
    grown = _memory("RssAnon") - own, _memory("RssFile") - mapped
    num_bytes = BATCH * (CHUNK + 2 * CONTEXT) * MELS * 2
    return Seen(first_s, open_s, *grown, cold_s, batch_s, _copies(num_bytes, turns))


def first_batch(folder: Path) -> Chunk:
    """The first batch of a training."""
    return next(iter(loader_of(folder)))


def loader_of(folder: Path) -> DataLoader[Any]:
    """The loader that training uses."""
    data = SpeechData(folder, folder / "align", batch_size=BATCH)
    return data.train_dataloader()


def _copies(num_bytes: int, turns: int) -> list[float]:
    """Seconds for a copy of as many bytes, by copies too large for any cache."""
    source = torch.ones(256 * MILLION, dtype=torch.uint8)
    place = torch.ones_like(source)
    seconds = [processor_seconds(lambda: place.copy_(source)) for _ in range(turns)]
    return [taken * num_bytes / len(source) for taken in seconds]


def _memory(kind: str) -> int:
    """Bytes of resident memory of this process, of one kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(kind)) * 1024
