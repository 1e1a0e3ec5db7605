"""What each layer attends to: shares of the softmax, rows read, and what the window alone would give."""
