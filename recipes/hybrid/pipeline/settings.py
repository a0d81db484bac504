"""The settings of one experiment, and the folders of its stages' output."""

from dataclasses import dataclass, field
from pathlib import Path

from recipes.hybrid.pipeline.bounds import one_of, within
from recipes.hybrid.pipeline.crew import ALONE, Crew
from recipes.hybrid.pipeline.groups import (
    AdaptSettings,
    AlignSettings,
    DecodeSettings,
    ExportSettings,
    FeatureSettings,
    GraphSettings,
    KaldiSettings,
    LexiconSettings,
    LmSettings,
    PrepareSettings,
    RaceSettings,
    RealignSettings,
    TrainSettings,
    TriphoneSettings,
)
from recipes.hybrid.pipeline.groups.labels import NUM_CEPSTRA

MOST_SEED = 2**30  # stages count on from it, and kaldifst takes 31 bits
RUN_STAGES = ("train", "decode", "score", "export")
TRAINING_SPLITS = ("train", "dev")
TEST_SPLITS = (
    *("swb", "ch"),
    *("dev-clean", "dev-clean-2", "test-clean", "dev-other", "test-other"),
    "test",
)
STATES = ("monophone", "triphone")
SCORING = ("hub5", "plain")
VOCABULARIES = ("training", "dictionary")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One experiment.

    Attributes:
        corpus: folder that holds the LDC folders (`LDC97S62`, `LDC2002S09`, ...).
        discs: further folders that hold discs.
        sources: training sources, of "switchboard", "fisher" and "callhome"; `dev` is
            taken from the first.
        out: experiment folder; every stage writes below `out/exp`.
        run: name of the training run. `train`, `decode`, `score` and `export` exist
            once per run, so that several strategies share one alignment and one graph.
        seed: seed of everything drawn at random, from 0 to 2^30.
        cores: number of processes that a stage may use.
        states: kind of the HMM states, "monophone" or "triphone".
        scoring: how words are compared: by the rules of "hub5", where hesitations of
            English and broken-off words may be missing, or "plain", as they are.
            Noises count in neither.
        vocabulary: words that can be recognised of those that a lexicon of Kaldi's or
            one in CMUdict's form has: those of the "training", or all of the
            "dictionary", for language models that have more words.
        crew: place of this process among those that run the recipe.
    """

    corpus: Path
    out: Path
    discs: tuple[Path, ...] = ()
    sources: tuple[str, ...] = ("switchboard",)
    run: str = "hadpsgd"
    seed: int = 0
    cores: int = 2
    states: str = "monophone"
    scoring: str = "hub5"
    vocabulary: str = "training"
    crew: Crew = ALONE
    prepare: PrepareSettings = field(default_factory=PrepareSettings)
    lexicon: LexiconSettings = field(default_factory=LexiconSettings)
    lm: LmSettings = field(default_factory=LmSettings)
    features: FeatureSettings = field(default_factory=FeatureSettings)
    align: AlignSettings = field(default_factory=AlignSettings)
    triphone: TriphoneSettings = field(default_factory=TriphoneSettings)
    realign: RealignSettings = field(default_factory=RealignSettings)
    kaldi: KaldiSettings = field(default_factory=KaldiSettings)
    adapt: AdaptSettings = field(default_factory=AdaptSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    race: RaceSettings = field(default_factory=RaceSettings)
    graph: GraphSettings = field(default_factory=GraphSettings)
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    export: ExportSettings = field(default_factory=ExportSettings)

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ValueError(f"`cores` must be at least 1, got {self.cores}")
        within(self, 0, MOST_SEED, "seed")
        for name, run in (("run", self.run), ("realign.run", self.realign.run)):
            if run is not None and (not run or "/" in run or run.startswith(".")):
                raise ValueError(f"`{name}` must be a plain folder name, got {run!r}")
        if self.states not in STATES:
            raise ValueError(f"`states` must be one of {STATES}, got {self.states!r}")
        one_of(self, "scoring", SCORING)
        one_of(self, "vocabulary", VOCABULARIES)
        if self.realign.run == self.run:
            raise ValueError(
                f"`realign.run` must be another run than {self.run!r}, which learns "
                "from the labels"
            )
        if self.uses_kaldi:
            self._check_streams()
            if self.decode.nbest and self.kaldi.arpa is None:
                raise ValueError(
                    f"`decode.nbest={self.decode.nbest}` with `kaldi.experiment` needs "
                    "the language model of its graph: name it with `kaldi.arpa`, or "
                    "set `decode.nbest=0`"
                )
        elif self.features.num_mels < NUM_CEPSTRA:
            raise ValueError(
                f"`features.num_mels` must be at least {NUM_CEPSTRA}, the cepstra that "
                f"mixtures are trained on, got {self.features.num_mels}"
            )
        if self.decode.nbest and not self.lm.large_order:
            raise ValueError(
                f"`decode.nbest={self.decode.nbest}` needs a larger model: set "
                "`lm.large_order`"
            )
        self._check_race()
        if self.decode.export_likelihoods and not self.uses_kaldi:
            raise ValueError("`decode.export_likelihoods` needs `kaldi.experiment`")
        if self.decode.export_likelihoods and "," in str(self.out):
            raise ValueError(
                "`out` must have no comma with `decode.export_likelihoods`, because "
                f"Kaldi parts the names of files there, got {self.out}"
            )
        self._check_adapted_labels()
        if self.uses_kaldi and self.realign.run is not None:
            raise ValueError(
                "`realign.run` must be none with `kaldi.experiment`: Kaldi's labels "
                "stay as they are"
            )

    def _check_adapted_labels(self) -> None:
        """Refuse labels of adapted mixtures where there are none."""
        if self.realign.adapted and (self.kaldi.fmllr or not self.adapt.fmllr):
            raise ValueError(
                "`realign.adapted` needs `adapt.streams=fmllr` or `both`, without "
                f"`kaldi.fmllr`, got `adapt.streams={self.adapt.streams}` and "
                f"`kaldi.fmllr={','.join(self.kaldi.fmllr)}`"
            )

    def _check_race(self) -> None:
        """Refuse what needs epochs, or clocks of several machines, in a race."""
        needed = {"validate_every": 1, "checkpoint_minutes": 0, "num_nodes": 1}
        for name, only in needed.items():
            value = getattr(self.train, name)
            if self.race.seconds and value != only:
                raise ValueError(
                    f"`train.{name}` must be {only} with `race.seconds="
                    f"{self.race.seconds:g}`, got {value}: a training for a time is "
                    "validated once, at its end, and begins anew if it is interrupted"
                )

    def _check_streams(self) -> None:
        """Refuse fMLLR of our own, whose mixtures a Kaldi experiment lacks."""
        if self.adapt.fmllr and not self.kaldi.fmllr:
            raise ValueError(
                f"`adapt.streams={self.adapt.streams}` with `kaldi.experiment` takes "
                "fMLLR from Kaldi; name its archives with `kaldi.fmllr`"
            )

    @property
    def uses_kaldi(self) -> bool:
        """Whether labels and graph are Kaldi's."""
        return self.kaldi.experiment is not None

    @property
    def timed(self) -> RaceSettings | None:
        """The race that `train` depends on; None: training lasts a number of epochs."""
        return self.race if self.race.seconds else None

    @property
    def compared(self) -> str | None:
        """How words are compared where that is not by the rules of Hub5."""
        return None if self.scoring == "hub5" else self.scoring

    @property
    def wider(self) -> str | None:
        """Which words the lexicon has where these are not those of the training."""
        return None if self.vocabulary == "training" else self.vocabulary

    @property
    def finds_streams_itself(self) -> bool:
        """Whether the exported recogniser can compute the streams of a new call."""
        taken = bool(self.kaldi.fmllr or self.kaldi.ivectors or self.uses_kaldi)
        return self.streams is None or not taken

    @property
    def roots(self) -> tuple[Path, ...]:
        """All folders that hold discs."""
        return self.corpus, *self.discs

    def directory(self, name: str) -> Path:
        """The folder of a stage's finished output.

        Args:
            name: name of a stage, or of an output that one of several stages makes:
                "mixtures" (numbered states and their Gaussian mixtures), "states"
                (numbered states and labels), or "aligner" (the training run that
                realigns). Also "streams" (the speaker features of the network) and
                "search" (the graph for word error rates during training); without
                these, the features.
        """
        stage = self.stage_of(name)
        folder = self.out / "exp" / stage
        if name == "aligner" or stage == "realign":
            return folder / str(self.realign.run)
        return folder / self.run if stage in RUN_STAGES else folder

    def stage_of(self, name: str) -> str:
        """The stage that makes the output which `directory` calls `name`."""
        mixtures = "align" if self.states == "monophone" else "triphone"
        mixtures = "kaldi" if self.uses_kaldi else mixtures
        states = "adapted_align" if self.realign.adapted else mixtures
        states = "realign" if self.realign.run else states
        streams = "features" if self.adapt.streams == "none" else "adapt"
        search = "graph" if self.train.wer_utterances else "features"
        others = {
            "mixtures": mixtures,
            "states": states,
            "streams": streams,
            "search": search,
            "aligner": "train",
        }
        return others.get(name, name)

    @property
    def streams(self) -> Path | None:
        """The folder with the streams of each split; None without streams."""
        return None if self.adapt.streams == "none" else self.directory("streams")

    def splits(self) -> tuple[str, ...]:
        """The splits that `prepare` found: `train`, `dev`, and parts of the test."""
        prepared = self.directory("prepare")
        splits = TRAINING_SPLITS + TEST_SPLITS
        return tuple(s for s in splits if (prepared / f"{s}.jsonl").exists())
