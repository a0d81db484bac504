"""What learners agree on besides weights: store, failures, groups, start-up."""
