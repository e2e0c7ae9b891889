"""Jobs for cluster managers: Slurm and Kubernetes bring the machines."""
