"""Workers and servers that are lost: what is reported, and what a run survives."""
