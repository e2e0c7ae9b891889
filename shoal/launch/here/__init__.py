"""Processes of this host: started, supervised, shown, ended."""
