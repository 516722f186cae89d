"""Rules that hold for the package as a whole: metadata, what may be imported by whom, and the size of modules."""

import ast
import importlib.metadata
import importlib.resources
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark_jax

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(path for package in ("dspark_jax", "pallas_kernels") for path in (ROOT / package).rglob("*.py"))
MAX_LINES = 500

# The order of STYLE.md: a module imports from its own level and those before it.
LEVELS = (
    {"errors", "config", "config_values", "machine"},
    {"params", "sharding", "sampling"},
    {"layers", "attention", "cache"},
    {"state"},
    {"target", "draft", "heads"},
    {"verify", "cost"},
    {"schedule"},
    {"decode"},
    {"pair"},
    {"profile"},
    {"requests"},
    {"generate", "serve"},
    {"cli", "__main__"},
)
# Leaves know the core; the core knows nothing of them.
LEAVES = {
    "answer",
    "baselines",
    "bench",
    "calibrate",
    "checkpoint",
    "demo",
    "doctor",
    "evaluate",
    "rows",
    "text",
    "train",
    "turns",
}
CORE = set().union(*LEVELS[:-5])
FOREIGN = {"torch", "transformers", "tensorflow", "llama_cpp", "llm"}


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, functions included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _own_modules(path: Path) -> set[str]:
    """Top-level modules of dspark_jax that a file imports."""
    return {name.split(".")[1] for name in _imports(path) if name.startswith("dspark_jax.")}


def test_sources_are_found() -> None:
    assert {"dspark_jax/config.py", "dspark_jax/errors.py"} <= {_ids(path) for path in SOURCES}


def test_types_ship() -> None:
    assert importlib.resources.files(dspark_jax).joinpath("py.typed").is_file()


def test_metadata_matches_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = importlib.metadata.metadata(project["name"])
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert getattr(dspark_jax, "__version__", project["version"]) == project["version"]
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="dspark")
    assert script.value == "dspark_jax.cli:main"


def test_import_brings_no_other_framework() -> None:
    code = (
        "import sys, dspark_jax, dspark_jax.config, dspark_jax.params, dspark_jax.text;"
        f"sys.exit(', '.join(sorted(set(sys.modules) & {FOREIGN!r})) or None)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES, ids=_ids)
def test_no_private_or_foreign_modules(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for private in ("jax._src", "jax.interpreters"):
        assert private not in text
    for name in _imports(path):
        assert name.split(".")[0] not in FOREIGN, name
        if path.is_relative_to(ROOT / "pallas_kernels"):
            assert name.split(".")[0] != "dspark_jax", name


@pytest.mark.parametrize("path", SOURCES, ids=_ids)
def test_module_size_and_header(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_LINES
    assert not text.strip() or ast.get_docstring(ast.parse(text)), "a module opens with a sentence on what it is"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent.name == "dspark_jax"], ids=_ids)
def test_imports_point_one_way(path: Path) -> None:
    imported = _own_modules(path)
    if path.stem in CORE:
        assert not imported & LEAVES, f"{path.stem} is core and imports a leaf"
    for level, names in enumerate(LEVELS):
        if path.stem in names:
            later = set().union(*LEVELS[level + 1 :])
            assert not imported & later, f"{path.stem} imports what comes after it"
