"""The shape catalogue, the input maker and the tolerance rule: shared by tests, benchmarks, verify and autotuning."""
