"""Chaos on the real cluster: a seed says what is killed, cut and changed; what must hold is checked throughout."""
