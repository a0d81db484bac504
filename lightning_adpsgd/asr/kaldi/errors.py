"""The error of Kaldi's files that cannot be used."""


class KaldiError(ValueError):
    """A file of Kaldi cannot be used; the message has its path and the place in it."""
