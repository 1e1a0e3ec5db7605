"""What must never happen, measured on the device: for calls that a CUDA graph holds."""
