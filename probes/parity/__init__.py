"""Two settings, or another implementation, compared site by site."""
