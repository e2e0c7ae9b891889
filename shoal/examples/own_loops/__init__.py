"""Training loops that are more than one loss and one call, each a script of its own.

shoal verify shoal/examples/own_loops/wgan.py -n 2 -s ddp --steps 3
"""
