"""What ranks of one machine write into each other's memory."""
