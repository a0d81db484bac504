"""Spoken digits with Gaussian emissions: a small world for the HMM tests."""

from pathlib import Path

import numpy as np

from lightning_adpsgd.asr.hmm.states import Topology
from lightning_adpsgd.asr.language.lexicon import Lexicon

SPELLED = {
    "zero": "z iy r ow",
    "one": "w ah n",
    "two": "t uw",
    "three": "th r iy",
    "four": "f ao r",
    "five": "f ay v",
    "six": "s ih k s",
    "seven": "s eh v ah n",
    "eight": "ey t",
    "nine": "n ay n",
}


def lexicon(spelled: dict[str, str] = SPELLED) -> Lexicon:
    entries = {word: (tuple(text.split()),) for word, text in spelled.items()}
    phones = sorted({phone for text in spelled.values() for phone in text.split()})
    return Lexicon(entries, ("sil",), tuple(phones))


def loop_arpa(path: Path, words: list[str]) -> Path:
    """Writes an n-gram in which every word is equally likely everywhere."""
    cost = -np.log10(len(words) + 1)
    lines = ["\\data\\", f"ngram 1={len(words) + 2}", "", "\\1-grams:"]
    lines += [f"{cost:.5f}\t</s>", "-99\t<s>"]
    lines += [f"{cost:.5f}\t{word}" for word in words]
    path.write_text("\n".join([*lines, "", "\\end\\", ""]))
    return path


class Speaker:
    """Says words in log-mel frames; every HMM state has a Gaussian of its own."""

    def __init__(
        self,
        lexicon: Lexicon,
        noise: float = 0.5,
        seed: int = 0,
        topology: Topology | None = None,
    ):
        self.lexicon = lexicon
        self.topology = topology or Topology.of(lexicon)
        self.random = np.random.default_rng(seed)
        self.noise = noise
        self.means = self.random.normal(size=(self.topology.num_states, 40))

    def states(self, words: list[str]) -> np.ndarray:
        phones = ["sil"]
        for word in words:
            phones += self.lexicon.pronunciations[word][0]
            if self.random.random() < 0.3:
                phones.append("sil")
        labels = [0, *(1 + self.topology.phones.index(phone) for phone in phones), 0]
        wide = np.lib.stride_tricks.sliding_window_view(np.array(labels), 3)
        windows = wide if self.topology.context_width == 3 else wide[:, 1:2]
        chain = self.topology.chains(windows).ravel()
        return np.repeat(chain, self.random.integers(1, 5, len(chain)))

    def frames(self, states: np.ndarray) -> np.ndarray:
        noise = self.random.normal(size=(len(states), 40))
        return (self.means[states] + self.noise * noise).astype(np.float32)

    def log_likelihoods(self, frames: np.ndarray) -> np.ndarray:
        gaps = frames[:, None] - self.means
        squares = (gaps**2).sum(axis=2) / self.noise**2
        return (-0.5 * squares).astype(np.float32)

    def sentence(self, length: int) -> list[str]:
        return self.random.choice(sorted(self.lexicon.pronunciations), length).tolist()
