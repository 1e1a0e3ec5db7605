"""Which packages are installed: the five folders, below one name. All else is in pyproject.toml."""

from setuptools import find_packages, setup

FOLDERS = ("kernels", "model", "runtime", "probes", "scripts")
found = find_packages(include=[name for folder in FOLDERS for name in (folder, f"{folder}.*")])
setup(package_dir={"fathom": "."}, packages=[f"fathom.{name}" for name in found])
