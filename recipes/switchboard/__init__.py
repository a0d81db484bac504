"""From a corpus of Switchboard's shape to a word error rate, stage by stage."""
