"""Thousands of small runs in virtual time, each with faults that its seed draws.

python -m tests.rehearse.faults --seeds 0:10000        all of them, and a table
python -m tests.rehearse.faults --seed 1234            one of them, with what it drew

scenario     what a seed draws: strategy, model, faults
disturbance  faults in virtual time: messages, connections, processes, disks
training     what every worker trains, and what is written down on the way
outcome      runs a scenario, and judges how it ended
planted      mistakes that the harness has to find
"""
