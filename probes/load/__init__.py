"""What the model holds and reads, against the bytes of the files."""
