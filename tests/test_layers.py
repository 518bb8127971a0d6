"""Imports point down only, and importing oscarkv stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import oscarkv

ROOT = Path(oscarkv.__file__).parent

#: What each part may import, besides itself.
BELOW = {
    "errors": set(),
    "recipe": {"errors"},
    "linalg": {"errors", "recipe"},
    "codec": {"errors", "recipe"},
    "artifact": {"errors", "recipe", "linalg", "codec"},
    "methods": {"errors", "recipe", "linalg", "codec", "artifact", "calibration"},
    "calibration": {"errors", "recipe", "linalg", "codec", "artifact", "methods"},
    "kernels": {"errors", "recipe", "linalg", "codec"},
    "cache": {"errors", "recipe", "codec", "kernels"},
}
LIBRARY = set(BELOW)
BELOW["integrations"] = LIBRARY
BELOW["benchmark"] = LIBRARY | {"integrations"}
BELOW["evaluation"] = LIBRARY | {"integrations"}
BELOW["demo"] = LIBRARY | {"integrations", "evaluation"}
BELOW["cli"] = LIBRARY | {"integrations", "evaluation", "demo", "benchmark"}
BELOW["__main__"] = {"cli"}

#: The one look upwards: `Recipe.named` finds presets when it is called, not when it is imported.
EXCEPTIONS = {("recipe.py", "methods")}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "oscarkv":
                found |= {f"oscarkv.{alias.name}" for alias in node.names}
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    relative = path.relative_to(ROOT)
    part = relative.parts[0].removesuffix(".py")
    assert part in BELOW, f"{part} has no place in the order of parts yet"
    for module in imports(path):
        if module.split(".")[0] != "oscarkv":
            continue
        target = part_of(module)
        if not target or target == part or target.startswith("__"):
            continue
        allowed = target in BELOW[part] or (str(relative), target) in EXCEPTIONS
        assert allowed, f"{relative} imports {module}: {part} may not know {target}"


@pytest.mark.parametrize("part", sorted(LIBRARY))
def test_nothing_below_integrations_knows_an_engine(part: str) -> None:
    engines = {"transformers", "tokenizers", "gguf", "vllm", "sglang", "accelerate"}
    for path in FILES:
        if path.relative_to(ROOT).parts[0].removesuffix(".py") == part:
            assert not {module.split(".")[0] for module in imports(path)} & engines, path


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(m for m in sys.modules if '.' not in m))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(result.stdout.split())


def test_importing_oscarkv_does_not_import_torch() -> None:
    loaded = loaded_by("import oscarkv; from oscarkv import Recipe; oscarkv.Recipe()")
    assert "oscarkv" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "safetensors"}


def test_the_library_does_not_import_transformers() -> None:
    statement = "import oscarkv.cache, oscarkv.calibration.fit; oscarkv.Recipe.named('paper')"
    loaded = loaded_by(statement)
    assert "torch" in loaded
    assert "transformers" not in loaded


def test_every_public_name_can_be_imported() -> None:
    for name in ("Artifact", "Recipe", "load_artifact", "save_artifact"):
        assert getattr(oscarkv, name).__name__ == name
    assert set(oscarkv.__all__) == set(oscarkv._HOMES)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = oscarkv.nothing
