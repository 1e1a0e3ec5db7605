"""Rotations: tables, and what was really rotated by which angle."""
