"""Several hosts: shared memory inside a host, TCP between hosts."""
