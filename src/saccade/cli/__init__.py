"""The command line: verify, bench, explain, devices, train, generate."""
