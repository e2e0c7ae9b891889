"""What torch.distributed can do, as functions of a rank; `torch_features` runs them."""
