"""Gates, hash tables, expert loads and clamps."""
