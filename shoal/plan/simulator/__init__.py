"""Events of a step: compute on devices, flows that share links."""
