"""Chaos on the real cluster: what is killed, cut and changed comes from a seed; what must hold is checked throughout."""
