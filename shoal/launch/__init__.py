"""Processes and roles: who this process is, and how to run many of them on one host.

`environment` reads what a launcher says of this process (ours, torchrun, mpirun, srun), and
`rendezvous` keeps the file that ranks under mpirun meet at. `local` is our own launcher for
one host; `crew`, `output`, `watch`, `failures` and `losses` are its parts, `run_dir` is where it
and its workers leave word for each other, and `account` sums up a run. `worker` is what a worker
process does for its launcher, `server` what a server does. Nothing here imports torch: a
launcher must start at once.
"""
