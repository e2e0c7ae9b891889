"""Authenticated connections that carry frames: of servers, of the coordinator."""
