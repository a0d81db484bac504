"""States of phones in context, and the Gaussian mixtures that find them."""
