"""Strategies as values: terms, the notation, and what options may be."""

from shoal.strategy.strategy import Strategy as Strategy  # also lets terms be joined with +
from shoal.strategy.strategy import parse as parse
