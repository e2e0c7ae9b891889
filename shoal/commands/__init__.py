"""The commands of the command line, one file each. None imports torch at its top."""
