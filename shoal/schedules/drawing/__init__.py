"""Collectives drawn: in the terminal and as animated SVG."""
