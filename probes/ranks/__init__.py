"""Probe `ranks`: the model on several ranks is the model on one."""
