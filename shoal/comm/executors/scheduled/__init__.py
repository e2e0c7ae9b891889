"""Collectives as schedules, interpreted over any transport."""
