"""Parameters sharded over replicas: gathered before use, released after."""
