"""A cluster without machines: a real etcd and API server, and one process that plays everything below them."""
