"""Shoal as a torch.distributed backend."""
