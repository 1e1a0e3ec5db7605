"""The memory plan: what a rank needs before anything is allocated, and what it holds afterwards."""
