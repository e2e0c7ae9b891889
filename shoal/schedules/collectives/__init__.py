"""Collectives as data: rounds of transfers; built, proven and priced."""
