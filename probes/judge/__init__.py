"""The judge: recordings, the oracle that they are held against, and what a difference is; it runs no model of ours."""
