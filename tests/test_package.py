"""What is installed: a wheel with both import packages, and nothing that shadows others."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", directory, ROOT],
        check=True,
        capture_output=True,
    )
    (path,) = directory.glob("*.whl")
    return path


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    files = zipfile.ZipFile(wheel).namelist()
    expected = {
        str(path.relative_to(ROOT if package == "loco_fsdp" else ROOT / "kernels"))
        for package in ("loco_fsdp", "kernels/loco_kernels")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".cpp") or path.name == "py.typed"
    }
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert {"loco_fsdp/py.typed", "loco_fsdp/__init__.py", "loco_kernels/__init__.py"} < expected


def test_an_installed_wheel_imports_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, tmp_path, wheel], check=True)
    code = (
        "import loco_fsdp, loco_kernels; from loco_fsdp import *; "
        "print(loco_fsdp.__file__, loco_kernels.__file__, *loco_fsdp.__all__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
        env={"PYTHONPATH": str(tmp_path)},
    )
    library, kernels, *names = result.stdout.split()
    assert Path(library) == tmp_path / "loco_fsdp" / "__init__.py"
    assert Path(kernels) == tmp_path / "loco_kernels" / "__init__.py"
    assert names == ["LoCo", "LoCoConfig", "LoCoFSDP", "QuantizedTensor", "attach", "quantize"]
