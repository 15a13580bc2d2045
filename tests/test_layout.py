"""The package's list in pyproject.toml, the links and the light base agree with what lies in the tree."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Folders of the root that are installed as sub-packages of radix_jax.
MOVED = ("models", "pallas_kernels")
HOST_ROOMS = ("cache", "replay", "scheduler", "viz", "plan", "request", "config", "attention_backends")
HEAVY = ("torch", "tensorflow", "transformers", "fastapi", "starlette", "uvicorn", "aiohttp", "flask", "vllm")


def packages_under(folder: Path, name: str) -> set[str]:
    """Dotted names of the packages in `folder`, which is imported as `name`; links are not followed."""
    found = {name}
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink() and (child / "__init__.py").exists():
            found |= packages_under(child, f"{name}.{child.name}")
    return found


def requirement_name(requirement: str) -> str:
    """`jax[cuda13]>=0.10` -> `jax`."""
    return requirement.split(";")[0].split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip().lower()


def test_package_list_equals_the_tree() -> None:
    in_tree = packages_under(ROOT / "radix_jax", "radix_jax")
    for name in MOVED:
        in_tree |= packages_under(ROOT / name, f"radix_jax.{name}")
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(in_tree)


def test_every_folder_with_code_is_a_package() -> None:
    for top in ("radix_jax", *MOVED):
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has code and no __init__.py"


def test_every_data_file_is_installed() -> None:
    listed = PROJECT["tool"]["setuptools"]["package-data"]
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        folder = ROOT / package.replace(".", "/")
        for file in folder.iterdir():
            if file.is_file() and file.suffix not in (".py", ".pyc"):
                assert any(file.match(pattern) for pattern in listed.get(package, ())), f"{file} is not in package-data"


@pytest.mark.parametrize("name", MOVED)
def test_links_are_relative(name: str) -> None:
    link = ROOT / "radix_jax" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert link.resolve() == ROOT / name


@pytest.mark.parametrize("name", MOVED)
def test_sub_packages_come_from_this_tree(name: str) -> None:
    module = __import__(f"radix_jax.{name}", fromlist=["__file__"])
    assert Path(module.__file__).resolve() == ROOT / name / "__init__.py"
    assert name not in sys.modules, f"a bare `{name}` is the user's own package"


def test_base_is_light() -> None:
    names = {requirement_name(requirement) for requirement in PROJECT["project"]["dependencies"]}
    assert {"jax", "jaxlib", "numpy"} <= names
    assert not names & set(HEAVY)


def test_base_neither_pins_nor_caps() -> None:
    for requirement in PROJECT["project"]["dependencies"]:
        assert "==" not in requirement, requirement
        assert "<" not in requirement, requirement


def test_accelerators_are_opt_in() -> None:
    for requirement in PROJECT["project"]["dependencies"]:
        assert "[" not in requirement, requirement
    assert {"gpu", "tpu", "test", "dev"} <= set(PROJECT["project"]["optional-dependencies"])


def test_version_is_the_same_everywhere() -> None:
    import radix_jax

    version = PROJECT["project"]["version"]
    assert radix_jax.__version__ == version
    assert metadata.version("radix_jax") == version
    newest = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## ["))
    assert newest.startswith(f"## [{version}]")


def imported_by(statement: str) -> set[str]:
    """Top-level names of the modules in a fresh interpreter after `statement`."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("room", HOST_ROOMS)
def test_host_rooms_import_without_jax(room: str) -> None:
    assert not imported_by(f"import radix_jax.{room}") & {"jax", "jaxlib", "flax", "chex"}


def test_host_classes_work_without_jax() -> None:
    statement = (
        "from radix_jax.cache import RadixTree\n"
        "tree = RadixTree(page_size=1)\n"
        "tree.insert_prefix([1, 2, 3], [4, 5, 6])\n"
        "assert tree.match_prefix([1, 2, 9]).cached_len == 2"
    )
    assert not imported_by(statement) & {"jax", "jaxlib", "flax", "chex"}
