"""Collectives as MSCCL algorithm files (XML), which forks of NCCL and RCCL execute."""
