"""Several hosts: shared memory inside a host, Gloo between hosts."""
