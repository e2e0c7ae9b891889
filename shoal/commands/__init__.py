"""The command line, a file a command. A file here checks input, calls the library and prints."""
