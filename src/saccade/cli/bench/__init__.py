"""Benchmarks of Saccade and its peers in turn, in one run: cases, providers, measurement, report."""
