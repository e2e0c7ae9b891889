"""What a training function sees: the job, the step, checkpoints."""
