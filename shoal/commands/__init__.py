"""The commands behind the command line, a file each. None loads torch when it is imported."""
