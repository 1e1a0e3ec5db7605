"""How weights and cache rows are stored, decoded and rounded."""
