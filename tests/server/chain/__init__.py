"""The chain protocol, in worlds without clocks."""
