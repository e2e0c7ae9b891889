"""How long a replica's step takes: kernels, layers, collectives, stages, stragglers."""
