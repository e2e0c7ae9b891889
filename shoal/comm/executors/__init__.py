"""How collectives are carried out: one module or package for each executor."""
