"""Tensors as fewer bytes."""
