"""What a strategy holds and sends in a step, as data: `catalog.step_of` gives it for every term."""
