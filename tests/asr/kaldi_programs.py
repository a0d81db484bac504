"""A small experiment that Kaldi's own programs make, where they are on the PATH.

Three words, `yes`, `no` and `oh`, of one or two phones with silence around; frames are
four numbers, drawn around a mean of their phone. The steps are those of Kaldi's scripts
`train_mono.sh`, `train_deltas.sh` and `mkgraph.sh`, in their order, with their options.
"""

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import kaldifst
import numpy as np

_NAMES = """
acc-tree-stats add-self-loops ali-to-pdf ali-to-phones align-equal-compiled arpa2fst
build-tree compile-questions compile-train-graphs convert-ali copy-feats copy-int-vector
copy-transition-model fstarcsort fstcomposecontext fstconvert fstdeterminizestar
fstminimizeencoded fstpushspecial fstrmepslocal fstrmsymbols fsttablecompose
gmm-acc-stats-ali gmm-align-compiled gmm-compute-likes gmm-copy gmm-est gmm-init-model
gmm-init-mono latgen-faster-mapped lattice-1best lattice-align-words lattice-best-path
make-h-transducer nbest-to-ctm show-transitions
"""
PROGRAMS = tuple(_NAMES.split())

SILENCE = 1
SPOKEN = {"yes": (2, 3), "no": (4, 5), "oh": (6,)}
WORDS = {"<eps>": 0, "yes": 1, "no": 2, "oh": 3, "#0": 4, "<s>": 5, "</s>": 6}
PHONES = {"<eps>": 0, "sil": SILENCE, "y": 2, "s": 3, "n": 4, "o": 5, "u": 6, "#0": 7}
BOUNDARIES = "1 nonword\n2 begin\n3 end\n4 begin\n5 end\n6 singleton\n"
QUESTIONS = "1\n2 4\n3 5\n2\n6\n"
ROOTS = "not-shared not-split 1\n" + "".join(f"shared split {p}\n" for p in range(2, 7))
BIGRAMS = """\\data\\
ngram 1=5
ngram 2=3

\\1-grams:
-99\t<s>\t-0.3
-0.7\t</s>
-0.6\tyes\t-0.2
-0.6\tno\t-0.3
-0.5\toh

\\2-grams:
-0.3\t<s> yes
-0.4\tyes no
-0.5\tno </s>

\\end\\
"""

# By the model: silence of five states may skip inside it, the others go straight on.
_STRAIGHT = """<State> 0 <PdfClass> 0 <Transition> 0 0.75 <Transition> 1 0.25 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.75 <Transition> 2 0.25 </State>
<State> 2 <PdfClass> 2 <Transition> 2 0.75 <Transition> 3 0.25 </State>
<State> 3 </State>"""
_SKIPPING = """<State> 0 <PdfClass> 0 <Transition> 0 0.4 <Transition> 1 0.3
<Transition> 2 0.3 </State>
<State> 1 <PdfClass> 1 <Transition> 1 0.4 <Transition> 2 0.3 <Transition> 3 0.3 </State>
<State> 2 <PdfClass> 2 <Transition> 1 0.3 <Transition> 2 0.4 <Transition> 3 0.3 </State>
<State> 3 <PdfClass> 3 <Transition> 3 0.75 <Transition> 4 0.25 </State>
<State> 4 </State>"""
_CHAIN = """<State> 0 <ForwardPdfClass> 0 <SelfLoopPdfClass> 1 <Transition> 0 0.5
<Transition> 1 0.5 </State>
<State> 1 </State>"""


class Kind(NamedTuple):
    """What states a model has: phones around that count, and the topology.

    Attributes:
        width: Phones of a context: 1 for monophones, 3 for triphones.
        central: Place of the phone itself among them, from 0.
        silence: States of the silence, as a topology has them.
        others: States of the other phones.
    """

    width: int
    central: int
    silence: str
    others: str

    @property
    def context(self) -> str:
        """The options by which programs are told."""
        return f"--context-width={self.width} --central-position={self.central}"


KINDS = {
    "monophones": Kind(1, 0, _SKIPPING, _STRAIGHT),
    "triphones": Kind(3, 1, _SKIPPING, _STRAIGHT),
    "chain": Kind(2, 1, _CHAIN, _CHAIN),
}


def are_installed() -> bool:
    """Whether all programs are on the PATH."""
    return all(map(shutil.which, PROGRAMS))


def run(folder: Path, command: str) -> str:
    """What a line of the shell prints; it must succeed."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def said(folder: Path, command: str) -> str:
    """What the programs of a line report as they run."""
    return run(folder, f"{{ {command} ; }} 2>&1 >/dev/null")


def text_matrices(matrices: dict[str, np.ndarray]) -> str:
    """An archive in text."""
    return "".join(
        f"{name}  [\n" + "\n".join(" ".join(map(str, row)) for row in rows) + " ]\n"
        for name, rows in matrices.items()
    )


def utterances(
    num: int, seed: int, noise: float
) -> tuple[dict[str, list[str]], dict[str, np.ndarray]]:
    """Words and frames, by the names of utterances."""
    means = 3 * np.random.default_rng(0).normal(size=(len(PHONES), 4))
    random = np.random.default_rng(seed)
    words, frames = {}, {}
    for number in range(num):
        name = f"u{seed}{number:02}"
        words[name] = [
            str(w) for w in random.choice(list(SPOKEN), random.integers(1, 5))
        ]
        phones = [SILENCE, *(p for w in words[name] for p in SPOKEN[w]), SILENCE]
        lasting = np.repeat(phones, random.integers(6, 10, len(phones)))
        drawn = means[lasting] + noise * random.normal(size=(len(lasting), 4))
        frames[name] = drawn.astype(np.float32)
    return words, frames


def make_experiment(folder: Path, kind: Kind) -> None:
    """Leaves `final.mdl`, `ali.1.gz`, `ali.2.gz` and `graph`, as Kaldi's scripts do."""
    folder.mkdir(parents=True)
    _write_language(folder, kind)
    words, frames = utterances(40, seed=1, noise=1.0)
    labels = {n: " ".join(str(WORDS[w]) for w in own) for n, own in words.items()}
    (folder / "text").write_text("".join(f"{n} {own}\n" for n, own in labels.items()))
    (folder / "feats").write_text(text_matrices(frames))
    _train_monophones(folder)
    if kind.width > 1:
        _grow_tree(folder, kind)
    _finish(folder)
    _make_graph(folder, kind)


def _write_language(folder: Path, kind: Kind) -> None:
    others = " ".join(str(PHONES[phone]) for phone in "ysnou")
    entries = ((str(SILENCE), kind.silence), (others, kind.others))
    topology = "".join(
        f"<TopologyEntry>\n<ForPhones>\n{phones}\n</ForPhones>\n{states}\n"
        "</TopologyEntry>\n"
        for phones, states in entries
    )
    (folder / "topo").write_text(f"<Topology>\n{topology}</Topology>\n")
    for name, symbols in (("words.txt", WORDS), ("phones.txt", PHONES)):
        lines = "".join(f"{symbol} {number}\n" for symbol, number in symbols.items())
        (folder / name).write_text(lines)
    (folder / "disambig.int").write_text(f"{PHONES['#0']}\n")
    (folder / "questions.int").write_text(QUESTIONS)
    (folder / "roots.int").write_text(ROOTS)
    (folder / "lm.arpa").write_text(BIGRAMS)
    _write_lexicon(folder / "L.fst", "")
    _write_lexicon(folder / "L_disambig.fst", f"1 1 {PHONES['#0']} {WORDS['#0']}\n")


def _write_lexicon(path: Path, more: str) -> None:
    """State 0 begins, 1 stands between words, 2 before a silence that must come."""
    lines, free = ["0 1 0 0 0.7", "0 1 1 0 0.7", f"2 1 {SILENCE} 0"], 3
    for word, phones in SPOKEN.items():
        at, output = 1, WORDS[word]
        for phone in phones[:-1]:
            lines.append(f"{at} {free} {phone} {output}")
            at, free, output = free, free + 1, 0
        lines += [f"{at} {to} {phones[-1]} {output} 0.7" for to in (1, 2)]
    lexicon = kaldifst.compile("\n".join(lines) + f"\n{more}1 0\n")
    kaldifst.arcsort(lexicon, "olabel")
    assert lexicon.write(str(path))


_GRAPHS = (
    "compile-train-graphs --read-disambig-syms=disambig.int tree {model} L.fst "
    "ark:text ark:graphs"
)
_ALIGN = (
    "gmm-align-compiled --transition-scale=1.0 --acoustic-scale=1.0 "
    "--self-loop-scale=0.1 --beam=10 --retry-beam=40 {model} ark:graphs ark:feats {to}"
)
_ESTIMATE = (
    "gmm-acc-stats-ali {model} ark:feats ark:ali acc && "
    "gmm-est --min-gaussian-occupancy=3 --mix-up=30 {model} acc final.mdl"
)


def _train_monophones(folder: Path) -> None:
    steps = [
        "gmm-init-mono --train-feats=ark:feats topo 4 0.mdl tree",
        _GRAPHS.format(model="0.mdl"),
        "align-equal-compiled ark:graphs ark:feats ark:ali",
        _ESTIMATE.format(model="0.mdl"),
        *_round() * 3,
    ]
    run(folder, " && ".join(steps))


def _round() -> list[str]:
    """Aligns with the mixtures so far and estimates them anew."""
    align = _ALIGN.format(model="final.mdl", to="ark:ali")
    return [align, _ESTIMATE.format(model="final.mdl")]


def _grow_tree(folder: Path, kind: Kind) -> None:
    steps = [
        f"acc-tree-stats {kind.context} --ci-phones={SILENCE} final.mdl ark:feats "
        "ark:ali stats",
        f"compile-questions {kind.context} topo questions.int questions.qst",
        f"build-tree {kind.context} --max-leaves=30 --thresh=20 --cluster-thresh=-1 "
        "stats roots.int questions.qst topo tree",
        "gmm-init-model tree stats topo first.mdl",
        "convert-ali final.mdl first.mdl tree ark:ali ark:converted",
        "mv converted ali",
        _ESTIMATE.format(model="first.mdl"),
        _GRAPHS.format(model="final.mdl"),
        *_round(),
    ]
    run(folder, " && ".join(steps))


def _finish(folder: Path) -> None:
    """Alignments by the last model, the first half in text; the model in text, too."""
    align = _ALIGN.format(model="final.mdl", to="ark,t:ali.txt")
    steps = [
        align,
        "head -n 20 ali.txt | gzip -c > ali.1.gz",
        "tail -n +21 ali.txt | copy-int-vector ark:- ark:- | gzip -c > ali.2.gz",
        "gmm-copy --binary=false final.mdl text.mdl",
        "echo 2 > num_jobs",
    ]
    run(folder, " && ".join(steps))


def _make_graph(folder: Path, kind: Kind) -> None:
    (folder / "graph" / "phones").mkdir(parents=True)
    (folder / "graph" / "phones" / "word_boundary.int").write_text(BOUNDARIES)
    shutil.copy(folder / "words.txt", folder / "graph")
    steps = [
        "arpa2fst --disambig-symbol=#0 --read-symbol-table=words.txt lm.arpa G.fst",
        "fsttablecompose L_disambig.fst G.fst | fstdeterminizestar --use-log=true | "
        "fstminimizeencoded | fstpushspecial > LG.fst",
        f"fstcomposecontext --context-size={kind.width} "
        f"--central-position={kind.central} --read-disambig-syms=disambig.int "
        "--write-disambig-syms=disambig_ilabels.int ilabels LG.fst | "
        "fstarcsort --sort_type=ilabel > CLG.fst",
        "make-h-transducer --disambig-syms-out=disambig_tid.int ilabels tree "
        "final.mdl > Ha.fst",
        "fsttablecompose Ha.fst CLG.fst | fstdeterminizestar --use-log=true | "
        "fstrmsymbols disambig_tid.int | fstrmepslocal | fstminimizeencoded "
        "> HCLGa.fst",
        "add-self-loops --self-loop-scale=0.1 --reorder=true final.mdl HCLGa.fst | "
        "fstconvert --fst_type=const > graph/HCLG.fst",
    ]
    run(folder, " && ".join(steps))
