"""Tensor parallelism: layers split over workers."""
