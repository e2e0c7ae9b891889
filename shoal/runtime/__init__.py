"""The ground of every process: configuration, files of the run, cores, injected faults."""
