"""Ours and the peers in turn, in one run: cases, providers, measurement, report."""
