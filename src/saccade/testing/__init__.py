"""Test cases, inputs and the tolerance rule, shared by tests, benchmarks, `saccade verify` and autotuning."""
