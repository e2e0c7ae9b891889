"""What a step computes: layers, from a transformer's sizes or from a module that was traced."""
