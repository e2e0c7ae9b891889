"""Embedding tables whose rows live in a row store."""
