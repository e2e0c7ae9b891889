"""The store of the rendezvous, which asks for a key."""
