"""Questions whose answers lie far back, with the run's selection, a random one and none."""
