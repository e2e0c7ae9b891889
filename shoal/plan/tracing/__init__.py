"""A workload from any `nn.Module`, traced on fake tensors; only here the planner needs torch."""
