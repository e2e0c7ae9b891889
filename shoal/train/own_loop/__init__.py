"""`job.setup` and `job.backward`: loops of the user's own."""
