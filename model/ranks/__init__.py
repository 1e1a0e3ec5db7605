"""Who holds what of each axis, the few exchanges, and how tokens come to experts."""
