"""The processes of a run: their group, and the watchdog that ends it when one is gone."""
