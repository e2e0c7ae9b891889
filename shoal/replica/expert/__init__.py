"""Expert parallelism: the experts of a mixture live on different workers, and tokens travel."""
