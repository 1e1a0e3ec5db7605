"""Who sees whom: changed tokens and the rows that move."""
