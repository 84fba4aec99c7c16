"""What is installed: a wheel with both import packages, and nothing that shadows others."""

import re
import subprocess
import sys
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

import loco_fsdp

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
        if path.suffix in (".py", ".cpp", ".h") or path.name == "py.typed"
    }
    assert {name for name in files if ".dist-info/" not in name} == expected
    assert {"loco_fsdp/py.typed", "loco_fsdp/__init__.py", "loco_kernels/__init__.py"} < expected


def test_the_wheel_has_the_version_of_the_code(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith(".dist-info/METADATA"))
        lines = files.read(name).decode().splitlines()
    assert f"Version: {loco_fsdp.__version__}" in lines
    assert re.fullmatch(r"\d+\.\d+\.\d+", loco_fsdp.__version__)


def test_a_checkout_on_the_path_needs_no_installation(tmp_path: Path) -> None:
    """As on a cluster that shares a folder: no metadata of the package anywhere."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in Path(metadata.distribution("torch").locate_file("")).iterdir():
        if "loco_fsdp" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    code = f"""
from importlib import metadata
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from loco_fsdp import LoCoFSDP, __version__
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0,
                        world_size=1)
model = LoCoFSDP(torch.nn.Linear(8, 8), mesh=init_device_mesh("cpu", (1,)))
model.loco.load_state_dict(model.loco.state_dict())
dist.destroy_process_group()
try:
    metadata.version("loco-fsdp")
except metadata.PackageNotFoundError:
    print(__version__)
"""
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],  # -S: the folder of installed packages is not searched
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{packages}"},
    )
    assert result.stdout.split() == [loco_fsdp.__version__]


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
    assert names == [
        "LoCo", "LoCoConfig", "LoCoFSDP", "QuantizedTensor", "__version__", "attach", "quantize"
    ]  # fmt: skip


def test_it_needs_only_what_it_declares(tmp_path: Path) -> None:
    """A step of training where every distribution that is no dependency cannot be imported."""
    needed, left = set(), ["loco-fsdp"]
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in needed:
            continue
        needed.add(name)
        with suppress(metadata.PackageNotFoundError):
            for requirement in metadata.requires(name) or []:
                if "extra ==" not in requirement:
                    left.append(re.split(r"[\s\[<>=!~;(]", requirement)[0])
    others = [
        module
        for module, names in metadata.packages_distributions().items()
        if not any(re.sub(r"[-_.]+", "-", name).lower() in needed for name in names)
    ]
    assert "pytest" in others and "torch" not in others
    code = f"""
import sys
sys.modules.update(dict.fromkeys({others!r}))  # what import finds if they are not installed
import os, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from loco_fsdp import LoCoConfig, LoCoFSDP
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0,
                        world_size=1)
model = LoCoFSDP(torch.nn.Linear(8, 8), LoCoConfig(), mesh=init_device_mesh("cpu", (1,)))
model(torch.ones(1, 8)).sum().backward()
dist.all_gather_object([None], "what attach compares, where there are more ranks")
dist.destroy_process_group()
os._exit(0)  # of stock FSDP2 over gloo, too, one process in a hundred aborts after its last line
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_versions_of_torch_are_not_compared() -> None:
    """As strings "2.14.0a0+git" and "2.14.0rc1" come before 2.14: ask for the feature instead."""
    files = [
        path for part in ("loco_fsdp", "kernels", "scripts") for path in (ROOT / part).rglob("*.py")
    ]
    assert len(files) > 40
    for path in files:
        assert not re.search(
            r"__version__\s*(<|>|==|!=)|(<|>|=)\s*torch\.__version__", path.read_text()
        )
