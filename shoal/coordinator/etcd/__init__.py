"""An etcd cluster as coordinator, through the JSON gateway of its version 3 API."""
