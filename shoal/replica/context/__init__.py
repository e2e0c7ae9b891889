"""Context parallelism: every worker of a replica has some positions of each sequence."""
