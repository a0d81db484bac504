"""From audio to word error rate on one small machine, by two ways of training."""
