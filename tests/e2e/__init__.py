"""End to end: the installed product on a real cluster, as its users see it."""
