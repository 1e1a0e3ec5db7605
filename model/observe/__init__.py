"""Watching a model: its sites, what must never happen there, and what ranks and listeners are shown."""
