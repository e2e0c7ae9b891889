"""Stages of a model that cannot be traced: its forward runs, and calls outside are replayed."""
