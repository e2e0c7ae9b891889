"""Several hosts: shared memory inside a host, TCP or Gloo between hosts."""
