"""Processes of a run: how they start, and what a process knows about itself.

run.py            shoal.run: become a worker, or launch
worker.py         the life of a worker: device, group, job, report
device.py         the device and backend of a rank
environment.py    rank and size, as written by shoal, torchrun, mpirun (Open MPI) or srun (slurm.py)
rendezvous.py     the file at which ranks of one host find each other

local.py          the launcher for one host: starts workers and servers, and waits
processes.py      start, signal, reap
process_config.py the configuration of each process that is started
output.py         forwards the output of workers
supervisor.py     decides what follows from each event
lost_workers.py   which failures a run survives
failures.py       which worker failed first
report.py         the run as one document
fork.py           workers of an interactive session

Only run, worker and device import torch: a launcher must start at once.
"""
