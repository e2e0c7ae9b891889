"""Chain replication as a pure state machine: no clock, threads, sockets or torch."""
