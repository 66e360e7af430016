"""The command line: verify, bench, explain, draw, devices, train, generate, lab."""
