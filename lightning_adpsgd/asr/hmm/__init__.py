"""HMM states of phones in context, and the Gaussian mixtures over them."""
