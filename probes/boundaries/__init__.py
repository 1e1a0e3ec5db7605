"""Cutting a prompt into calls: chunks, lengths, prefill and decode, bit by bit."""
