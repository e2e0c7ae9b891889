"""Chakra execution traces (MLCommons), which ASTRA-sim and other simulators read."""
