"""Benchmarks: ``python -m benchmarks.NAME --json``; comparisons run side by side in one run."""
