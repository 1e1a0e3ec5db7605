"""What each command does once its command line is known to be good: from here on torch is imported."""
