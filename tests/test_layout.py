"""What import-linter cannot say of imports (`make lint` runs it), and other rules of the whole tree."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "model", "runtime", "probes", "scripts")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_reference_kernels_borrow_from_nobody():
    """Of this project they import each other, and in which forms numbers are stored."""
    found = sorted((ROOT / "kernels").glob("*/*reference.py"))
    ours = {
        "fathom.kernels.formats.groups",
        "fathom.kernels.formats.stored",
        *(".".join(("fathom", *path.relative_to(ROOT).with_suffix("").parts)) for path in found),
    }
    allowed = {"torch", "torch.nn", "math", "functools", "dataclasses", "typing", "collections.abc", *ours}
    assert len(found) >= 14
    for path in found:
        taken = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                taken |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                taken |= whole if whole <= ours else {node.module or ""}
        assert taken <= allowed, f"{names(path)} imports {sorted(taken - allowed)}"


def test_one_console_and_one_writer_of_tensors():
    """Rich's console takes paths for markup; errors of save_file name no file, and its files have their own mode."""
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] == "scripts" and path != ROOT / "scripts" / "console.py":
            assert "rich.console" not in imports(path), names(path)
        if path not in (ROOT / "runtime" / "tensorfile.py", *(ROOT / "scripts" / "exporters").glob("*")):  # stand alone
            assert "save_file" not in path.read_text(encoding="utf-8"), names(path)


@pytest.mark.parametrize("exporter", sorted((ROOT / "scripts" / "exporters").glob("*.py")), ids=lambda path: path.stem)
def test_an_exporter_stands_alone(exporter):
    assert not {name for name in imports(exporter) if name.split(".")[0] in {"fathom", *PACKAGES}}


# It gives a child its environment, and its parent whatever error the child had: none is read, none ends there.
CHILD = ROOT / "probes" / "child.py"


def test_no_environment_variable_below_scripts():
    for path in SOURCES:
        if path != CHILD and path.relative_to(ROOT).parts[0] != "scripts":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"\benviron\b", text), names(path)
            assert "getenv" not in text, names(path)


def test_nothing_swallows_everything():
    """A handler of every exception may only translate it: the libraries below have no narrower class.

    One makes a finding of it: a probe that breaks down is a row that fails, and the others go on. One hands it to the
    process that asked, which raises it.
    """
    for path in set(SOURCES) - {ROOT / "probes" / "probe.py", CHILD}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{names(path)}:{node.lineno} catches everything"
                caught = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)}
                broad = caught & {"Exception", "BaseException"}
                assert not broad or isinstance(node.body[-1], ast.Raise), (
                    f"{names(path)}:{node.lineno} swallows {broad}"
                )


def test_tests_are_no_package_and_have_unique_names():
    files = list((ROOT / "tests").rglob("*.py"))
    assert not [path for path in files if path.name == "__init__.py"]
    named = [path.name for path in files if path.name != "conftest.py"]  # the name that pytest gives
    assert len(set(named)) == len(named)


def test_equations_of_the_readme_are_where_it_says():
    def named(file, kinds=(ast.FunctionDef, ast.ClassDef)):
        return {one.name: one for one in ast.parse((ROOT / file).read_text("utf-8")).body if isinstance(one, kinds)}

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| (`kernels/[^|]+`) \| (`model/[^|]+`) \|$", readme, re.MULTILINE)
    oracle = named("probes/judge/oracle.py")
    methods = {one.name for of in ("Part", "Layer") for one in oracle[of].body if isinstance(one, ast.FunctionDef)}
    assert len(lines) >= 9
    for of_oracle, of_ops, of_model in lines:
        assert set(re.findall(r"`(\w+)`", of_oracle)) <= methods
        assert all((ROOT / file).is_file() for file in re.findall(r"`([\w/.]+)`", of_model))
        for file, ops in re.findall(r"`(kernels/[\w/.]+)`: ((?:`\w+`(?:, )?)+)", of_ops):
            assert set(re.findall(r"`(\w+)`", ops)) <= named(file).keys()
