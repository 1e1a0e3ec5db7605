"""The same run again, and after other runs."""
