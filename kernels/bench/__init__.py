"""Benchmarks of the kernels, on real shapes and beside their peers; run from the repository, not installed."""
