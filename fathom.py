"""The package `fathom` of a checkout: its folders lie beside this file. Installed, they lie below a folder `fathom`."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent)]
