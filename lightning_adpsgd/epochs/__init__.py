"""Epochs as pools of work units: claims, ledger, leases, samplers."""
