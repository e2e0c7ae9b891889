"""Training scripts to run and to copy from: `shoal train digits`, `shoal train gpt`."""
