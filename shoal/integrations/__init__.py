"""Shoal under the training loops of other libraries; each needs its library."""
