"""One long prefill of the demo language, stopped at marks and measured there: parts of `scripts.long_context`."""
