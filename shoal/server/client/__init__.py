"""What a worker asks of servers."""
