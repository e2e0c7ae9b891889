"""A replica that is split: who has what, and whether it computes what the whole model does."""
