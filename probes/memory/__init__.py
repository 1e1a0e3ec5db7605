"""Bytes of the caches: predicted, allocated, touched; and the peak of a process."""
