"""An open corpus through the same stages: LibriSpeech at the rate of a telephone."""
