"""Cluster managers: jobs for Slurm and Kubernetes, machines of Ray."""
