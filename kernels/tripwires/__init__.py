"""What must never happen and what ranks must agree on, measured on the device."""
