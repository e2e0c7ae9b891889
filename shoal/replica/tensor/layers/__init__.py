"""Layers of which every rank of a tp group has a part."""
