"""The store of a rendezvous that only ranks with the key of their run reach."""
