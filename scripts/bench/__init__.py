"""`python -m scripts.bench NAME ...`: how fast, how large, beside what; one module for each NAME.

Every bench prints a table. With --json it also writes what it found: the machine, versions, the commit, all settings,
and every repetition. Times of two sides are only ever compared within one run, whose sides took turns; see `record`.
"""
