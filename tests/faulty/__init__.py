"""An API server as it is on a bad day: what stands between it and its client goes wrong on purpose."""
