"""Processes of a run: how they start, what a launcher decides, what a process knows about itself.

here/      the launcher of one host: processes, their output, the supervisor
hosts/     hosts that an engine lends, and the agent on each of them
managers/  nodes of a Ray cluster as such hosts
losses/    which losses a run survives, and what is said of them
rank/      shoal.run, and a worker: its place, its group, its life

Only rank/ imports torch: a launcher must start at once.
"""
