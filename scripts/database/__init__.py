"""Measuring what states of documents hold: as they are, quantised, and merged."""
