"""One stage of a pipeline: how a model is split into stages, and how a stage runs."""
