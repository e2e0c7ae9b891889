"""Parameters and gradients as views of one buffer."""
