"""Schedules as data: collectives as rounds of transfers, pipelines as lists of actions."""
