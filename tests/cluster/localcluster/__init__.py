"""A real single-node Kubernetes cluster on one machine, made from Go modules and Debian packages."""
