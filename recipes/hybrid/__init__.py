"""A hybrid speech recogniser from sound to word error rate: what every recipe runs."""
