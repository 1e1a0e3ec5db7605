"""`Tripwire`: what must never happen in a run, and therefore ends it, with exit status 1."""


class Tripwire(RuntimeError):
    """A value that no correct run produces; not an assertion, because `python -O` removes those.

    Parameters
    ----------
    site
        Where in the model, for example "logits".
    position
        Position in the sequence.
    measured, expected
        What was found there and what should have been.

    """

    def __init__(self, site: str, position: int, measured: str, expected: str) -> None:
        super().__init__(f"{site} at position {position}: {measured}, expected {expected}")
        self.site, self.position, self.measured, self.expected = site, position, measured, expected
