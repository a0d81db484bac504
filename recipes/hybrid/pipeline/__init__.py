"""How stages are set up, run and continued."""
