"""The search through the graph of an experiment."""

from lightning_adpsgd.asr.hmm.states import read_topology
from lightning_adpsgd.asr.kaldi.decoding import KaldiDecoder
from lightning_adpsgd.asr.language.lexicon import read_lexicon
from lightning_adpsgd.asr.search.decoding import Decoder, SearchOptions
from lightning_adpsgd.asr.search.graph_files import read_graph
from recipes.hybrid.pipeline.settings import Settings
from recipes.hybrid.recognition import kaldi


def make_decoder(settings: Settings) -> Decoder | KaldiDecoder:
    """The search through the experiment's graph, own or Kaldi's."""
    if settings.uses_kaldi:
        return kaldi.decoder(settings, search_options(settings))
    return own_decoder(settings)


def own_decoder(settings: Settings) -> Decoder:
    """The search through a graph of our own."""
    return Decoder(
        read_graph(settings.directory("graph") / "HCLG.fst"),
        read_lexicon(settings.directory("lexicon")),
        read_topology(settings.directory("mixtures") / "tree.json"),
        search_options(settings),
    )


def search_options(settings: Settings) -> SearchOptions:
    """The bounds of the search."""
    chosen = settings.decode
    return SearchOptions(beam=chosen.beam, max_active=chosen.max_active)
