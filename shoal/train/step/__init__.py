"""`job.step`: a model, a strategy and options become a step."""
