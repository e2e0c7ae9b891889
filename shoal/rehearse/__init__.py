"""Training on a cluster that is not there: real gradients and messages, virtual time."""
