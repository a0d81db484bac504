"""What goes wrong with Kaldi's files."""


class KaldiError(ValueError):
    """A file of Kaldi cannot be used; the message has its path and the place in it."""
