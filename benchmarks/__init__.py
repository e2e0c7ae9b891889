"""Shoal against other libraries: `python -m benchmarks`, in the folder of the repository."""
