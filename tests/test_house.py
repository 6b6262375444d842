"""Rules of the house that no single module can see: import floors, package layout, a true README, imports without side effects.

Each rule is a function from plain data to a list of violations; it is tried on planted violations here, then on the repository itself.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "mitigate"

# A unit is a module of the package, or a folder with all that is under it. Imports go down, or stay within a unit.
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"", "files", "geometry", "config", "config_finetune", "config_search", "config_files"})  # "" is mitigate/__init__.py
    | {"rows", "cores", "stage", "stats", "spectrum", "kernels"},
    frozenset({"registry", "variants", "compressor", "outcomes", "attachable", "call", "checkpoint"}),
    frozenset({"attached_layer", "surgery", "converted", "cache", "readout", "bases", "tasks"}),
    frozenset({"train", "score", "cost", "perplexity"}),
    frozenset({"trial", "evaluate", "finetune", "generate", "paper"}),
    frozenset({"search", "pareto", "results", "report", "export", "before_after", "doctor", "requirements", "rescored"}),
    frozenset({"cli", "__main__"}),
)
# Sideways imports between units of one floor are listed, and the list has no cycle (tested below).
SIDEWAYS = frozenset(
    {
        ("geometry", "kernels"),
        ("config_finetune", "config"),
        ("config_search", "config"),
        ("config_files", "config"),
        ("config_files", "config_finetune"),
        ("config_files", "config_search"),
        ("stats", "rows"),
        ("spectrum", "geometry"),
        ("variants", "registry"),
        ("compressor", "registry"),
        ("compressor", "variants"),
        ("call", "attachable"),
        ("attached_layer", "cache"),
        ("surgery", "attached_layer"),
        ("converted", "surgery"),
        ("readout", "attached_layer"),
        ("readout", "surgery"),
        ("bases", "tasks"),
        ("bases", "readout"),
        ("bases", "surgery"),
        ("score", "train"),
        ("search", "pareto"),
        ("search", "results"),
        ("search", "requirements"),
        ("requirements", "results"),
        ("rescored", "pareto"),
        ("rescored", "results"),
        ("report", "rescored"),
        ("report", "pareto"),
        ("report", "results"),
        ("export", "pareto"),
        ("export", "results"),
        ("results", "pareto"),
        ("finetune", "evaluate"),
        ("before_after", "export"),
        ("before_after", "report"),
        ("before_after", "results"),
        ("__main__", "cli"),
    }
)
LATE = frozenset({("registry", "variants")})  # imported on the first look-up, never while the importer is being imported
CONFINED = {  # a library -> the units that may import it
    "ray": {"search"},
    "optuna": {"search"},
    "triton": {"kernels"},
    "matplotlib": {"report"},
    "transformers": {"bases", "attachable", "attached_layer", "surgery", "converted", "cache"},
    "datasets": {"tasks"},
}
TOP_LEVEL_NAMES = {"kernels", "search", "configs", "results", "tests"}  # folders here that must never be installed under these names
NO_INIT = ("kernels", "search", "results", "configs")


def tracked_files(root: Path) -> list[str]:
    """Files git tracks, and new ones it does not ignore, as posix paths; skips where there is no git checkout."""
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return sorted(path for path in listed.split("\0") if path and os.path.lexists(root / path))


def package_sources(root: Path) -> dict[str, str]:
    """Dotted name (without the leading package; "" is the package itself) -> source of every module, through the links."""
    sources = {}
    for folder, subfolders, files in os.walk(root / PACKAGE, followlinks=True):
        subfolders[:] = sorted(name for name in subfolders if name != "__pycache__")
        for name in sorted(files):
            if name.endswith(".py"):
                parts = (Path(folder) / name).relative_to(root / PACKAGE).with_suffix("").parts
                sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = (Path(folder) / name).read_text(encoding="utf-8")
    return sources


def run_python(code: str, *, cwd: Path = ROOT) -> str:
    """Run code in a new interpreter on this checkout; its standard output, or a failure with its traceback."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------------------------------------------- floors


def unit(module: str) -> str:
    return module.split(".")[0]


def floor(name: str) -> int | None:
    return next((number for number, units in enumerate(FLOORS) if name in units), None)


def imports(module: str, source: str, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, at any depth; `from package import name` gives the submodule where there is one."""
    is_package = any(other != module and (module == "" or other.startswith(module + ".")) for other in known)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = [PACKAGE, *filter(None, module.split("."))]
                up = node.level - 1 if is_package else node.level
                base = ".".join([*here[: len(here) - up], *filter(None, [base])])
            for alias in node.names:
                # Only the units of the package itself matter: `from mitigate import trial` means mitigate.trial, `__version__` the package.
                whole = f"{PACKAGE}.{alias.name}"
                submodule = base == PACKAGE and (floor(alias.name) is not None or alias.name in known)
                yield node.lineno, whole if submodule else base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield node.lineno, node.args[0].value


def floor_violations(sources: Mapping[str, str]) -> list[str]:
    found = []
    known = frozenset(sources)
    for module, source in sources.items():
        here, my_floor = unit(module), floor(unit(module))
        where = f"{PACKAGE}.{module}" if module else PACKAGE
        if my_floor is None:
            found.append(f"{where} stands on no floor: add {here!r} to FLOORS in tests/test_house.py")
            continue
        for line, name in imports(module, source, known):
            top = name.split(".")[0]
            if top in TOP_LEVEL_NAMES:
                found.append(f"{where}:{line} imports {name}; write {PACKAGE}.{name}")
            if top in CONFINED and here not in CONFINED[top]:
                found.append(f"{where}:{line} imports {top}, which belongs to {', '.join(sorted(CONFINED[top]))} alone")
            if top != PACKAGE:
                continue
            there = name.split(".")[1] if "." in name else ""
            its_floor = floor(there)
            if its_floor is None:
                found.append(f"{where}:{line} imports {name}, which stands on no floor")
            elif there == here or there == "" or its_floor < my_floor:
                continue
            elif its_floor > my_floor:
                found.append(f"{where}:{line} (floor {my_floor}) imports {name} (floor {its_floor}): imports only go down")
            elif (here, there) not in SIDEWAYS | LATE:
                found.append(f"{where}:{line} imports {name} on its own floor {my_floor}: not listed in SIDEWAYS in tests/test_house.py")
    return found


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({"geometry": "import mitigate.trial", "trial": ""}, "imports only go down"),
        ({"train": "from mitigate import trial", "trial": ""}, "imports only go down"),
        ({"score": "def f():\n    from mitigate.search.study import open_study"}, "imports only go down"),
        ({"kernels.pool": "from ..config import VariantConfig", "config": ""}, "not listed in SIDEWAYS"),
        ({"variants": "from ..cli import main", "variants.gates": ""}, "imports only go down"),
        ({"tasks": "from . import retrieval\nfrom .. import trial", "tasks.retrieval": ""}, "imports only go down"),
        ({"rows": "import importlib\nimportlib.import_module('mitigate.trial')"}, "imports only go down"),
        ({"config": "from mitigate import rows"}, "not listed in SIDEWAYS"),
        ({"trial": "import ray"}, "imports ray"),
        ({"pareto": "from optuna.trial import Trial"}, "imports optuna"),
        ({"cost": "import triton.language as tl"}, "imports triton"),
        ({"cli": "import matplotlib.pyplot as plt"}, "imports matplotlib"),
        ({"export.bundle": "import transformers"}, "imports transformers"),
        ({"search.loop": "import kernels.pool"}, "write mitigate.kernels.pool"),
        ({"mystery": ""}, "stands on no floor"),
        ({"trial": "from mitigate.mystery import x"}, "stands on no floor"),
    ],
)
def test_floor_rule_sees_a_planted_violation(sources: dict[str, str], complaint: str) -> None:
    found = floor_violations(sources)
    assert len(found) == 1, found
    assert complaint in found[0]


def test_floor_rule_allows_what_is_allowed() -> None:
    assert not floor_violations(
        {
            "": '__version__ = "0"',
            "geometry": "from mitigate.kernels import visibility",
            "kernels": "",
            "kernels.pool": "import triton\nfrom mitigate.kernels import visibility\nfrom . import visibility\nfrom .visibility import end",
            "kernels.visibility": "import torch",
            "trial": "from mitigate import __version__, config, score\nfrom .train import fit",
            "search.loop": "import optuna, ray\nfrom mitigate.search.study import x\nfrom .. import trial",
            "cli": "def search():\n    from mitigate.search import loop",
        }
    )


def test_every_unit_has_one_floor_and_sideways_has_no_cycle() -> None:
    names = [name for units in FLOORS for name in units]
    assert len(names) == len(set(names))
    left = set(SIDEWAYS)
    for importer, imported in left:
        assert floor(importer) == floor(imported) is not None, f"{importer} -> {imported} is not sideways"
    while left:
        leaves = {pair for pair in left if pair[1] not in {importer for importer, _ in left}}
        assert leaves, f"a cycle among {sorted(left)}"
        left -= leaves


def test_imports_only_go_down() -> None:
    sources = package_sources(ROOT)
    assert {"geometry", "kernels.visibility"} <= set(sources), "modules, linked folders included, must be found"
    assert floor_violations(sources) == []


# ---------------------------------------------------------------------------------------------------------------------- folders


def stray_inits(paths: list[str]) -> list[str]:
    return [path for path in paths if path.endswith("__init__.py") and path.split("/")[0] in NO_INIT]


def test_no_init_in_top_level_folders() -> None:
    planted = ["kernels/__init__.py", "search/x/__init__.py"]
    assert stray_inits([*planted, "mitigate/__init__.py", "kernels/pool.py"]) == planted
    found = [path.relative_to(ROOT).as_posix() for name in NO_INIT for path in (ROOT / name).rglob("__init__.py")]
    assert stray_inits(found) == [], "a package of this name would shadow, and when installed overwrite, other people's"


def test_links_point_at_the_top_level_folders() -> None:
    for name in ("kernels", "search", "configs"):
        link = ROOT / PACKAGE / name
        if not link.is_symlink() and not (ROOT / name).exists():
            pytest.skip("unpacked from a source distribution, where the links are folders")
        assert link.is_symlink(), f"{PACKAGE}/{name} must be a link"
        assert link.readlink() == Path("..") / name
        assert link.is_dir(), f"{PACKAGE}/{name} dangles"


def packages_wanted(paths: list[str]) -> set[str]:
    """Packages that hold these files: every folder under mitigate/ with a module or a TOML file, the linked ones under their link."""
    wanted = set()
    for path in paths:
        parts = path.split("/")
        parts = [PACKAGE, *parts] if parts[0] in {"kernels", "search", "configs"} else parts
        if parts[0] == PACKAGE and len(parts) > 1 and parts[-1].endswith((".py", ".toml")):
            wanted.add(".".join(parts[:-1]))
    return wanted


def test_declared_packages_are_those_that_exist() -> None:
    assert packages_wanted(["mitigate/trial.py", "kernels/pool.py", "configs/bases/a.toml", "tests/test_x.py", "mitigate/kernels", "results/README.md"]) == {
        "mitigate",
        "mitigate.kernels",
        "mitigate.configs.bases",
    }
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert len(declared) == len(set(declared))
    assert set(declared) == packages_wanted(tracked_files(ROOT)), "[tool.setuptools] packages in pyproject.toml must list every folder, and no empty one"


# ---------------------------------------------------------------------------------------------------------------------- README tree


def readme_tree(text: str) -> list[str]:
    """Paths of the first fenced block under the heading "Tree". Two spaces of indentation a level; folders end in "/"; after two spaces or more, prose.

    An entry is a path (`mitigate/`, `mitigate/trial.py`), a link (`kernels -> ../kernels`), or several of either on one line, each set off from
    the next by one space, as in `stats.py spectrum.py  intervals; peaks`.
    """
    section = re.search(r"^#+ Tree\s*\n(?:(?!^#)[^\n]*\n)*?```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if not section:
        raise ValueError('no fenced block under a heading "Tree"')
    found: list[str] = []
    parents: list[str] = []
    for line in section[1].splitlines():
        if not line.strip():
            continue
        depth, odd = divmod(len(line) - len(line.lstrip(" ")), 2)
        if odd or depth > len(parents):
            raise ValueError(f"odd indentation: {line!r}")
        del parents[depth:]
        entry = re.split(r" {2,}", line.strip())[0]
        names = re.sub(r" -> \S+", "", entry).split(" ")
        found.extend("".join(parents) + name for name in names)
        parents.append(names[-1] if names[-1].endswith("/") else f"{names[-1]} is no folder: ")
    return found


def tree_violations(listed: list[str], present: list[str]) -> list[str]:
    """What the tree lists and is not there, lists twice, or leaves out: top-level entries and the modules and folders in mitigate/."""
    files = set(present)
    folders = {"/".join(path.split("/")[:depth]) + "/" for path in present for depth in range(1, path.count("/") + 1)}
    found = [f"README tree lists {path}, which is not there" for path in listed if path not in files | folders]
    found += [f"README tree lists {path} twice" for path in sorted(set(listed)) if listed.count(path) > 1]
    must = {path.split("/")[0] + ("/" if "/" in path else "") for path in present}
    in_package = [path.split("/") for path in present if path.startswith(PACKAGE + "/")]
    must |= {"/".join(parts[:2]) + ("/" if len(parts) > 2 else "") for parts in in_package if len(parts) > 2 or parts[1].endswith(".py") or "." not in parts[1]}
    must -= {f"{PACKAGE}/__init__.py"}
    return found + [f"README tree leaves out {path}" for path in sorted(must - set(listed))]


TREE_SAMPLE = """# x

## Tree

What is where:

```text
Makefile README.md  how to run it
mitigate/           the package
  cost.py           bytes and FLOPs
  tasks/            prompts
    words.py
  kernels -> ../kernels
kernels/            shared
```

## Next

```text
nothing/
```
"""


def test_tree_rule() -> None:
    listed = readme_tree(TREE_SAMPLE)
    assert listed == ["Makefile", "README.md", "mitigate/", "mitigate/cost.py", "mitigate/tasks/", "mitigate/tasks/words.py", "mitigate/kernels", "kernels/"]
    in_package = ["mitigate/__init__.py", "mitigate/cost.py", "mitigate/tasks/words.py", "mitigate/kernels", "mitigate/py.typed"]
    present = ["Makefile", "README.md", *in_package, "kernels/pool.py"]
    assert tree_violations(listed, present) == []
    assert tree_violations(listed, [*present, "LICENSE"]) == ["README tree leaves out LICENSE"]
    assert tree_violations(listed, [*present, "mitigate/trial.py"]) == ["README tree leaves out mitigate/trial.py"]
    assert tree_violations(listed, [*present, "mitigate/report/page.html"]) == ["README tree leaves out mitigate/report/"]
    assert tree_violations([*listed, "ghost.py"], present) == ["README tree lists ghost.py, which is not there"]
    assert tree_violations([*listed, "Makefile"], present) == ["README tree lists Makefile twice"]
    with pytest.raises(ValueError, match="no fenced block"):
        readme_tree("# x\n\n## Trees\n\n```\na\n```\n")
    with pytest.raises(ValueError, match="odd indentation"):
        readme_tree("## Tree\n```\na/\n   b\n```\n")


def test_readme_tree_is_true() -> None:
    present = [path for path in tracked_files(ROOT) if path not in {".gitignore", ".gitattributes"}]
    assert tree_violations(readme_tree((ROOT / "README.md").read_text(encoding="utf-8")), present) == []


# ---------------------------------------------------------------------------------------------------------------------- imports change nothing

STATE = """
import json, logging, os, random, signal, sys, warnings
def state():
    now = {
        "warnings": [repr(f) for f in warnings.filters],
        "environ": dict(os.environ),
        "random": hash(random.getstate()),
        "sigint": repr(signal.getsignal(signal.SIGINT)),
        "root logger": [logging.getLogger().level, len(logging.getLogger().handlers)],
        "recursion limit": sys.getrecursionlimit(),
        "excepthook": repr(sys.excepthook),
        "cwd": os.getcwd(),
    }
    if "torch" in sys.modules:
        import torch
        now |= {
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
            "default dtype": str(torch.get_default_dtype()),
            "grad mode": torch.is_grad_enabled(),
            "seed": torch.initial_seed(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "matmul precision": torch.get_float32_matmul_precision(),
        }
    if "numpy" in sys.modules:
        import numpy
        now["numpy"] = [numpy.geterr(), hash(numpy.random.get_state()[1].tobytes())]
    return now
def changes(before, after):
    found = {key: [str(before[key]), str(after.get(key))] for key in before if before[key] != after.get(key)}
    if "environ" in found:  # names alone: values may be secrets
        old, new = before["environ"], after["environ"]
        found["environ"] = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return found
"""
HEAVY = ("torch", "transformers", "ray", "optuna", "matplotlib", "pandas", "triton", "pydantic")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("import os; os.environ['OMP_NUM_THREADS'] = '7'", "environ"),
        ("import warnings; warnings.simplefilter('ignore')", "warnings"),
        ("import torch; torch.set_num_threads(torch.get_num_threads() + 1)", "threads"),
        ("import torch; torch.set_default_dtype(torch.float64)", "default dtype"),
        ("import logging; logging.basicConfig(level=10)", "root logger"),
    ],
)
def test_import_rule_sees_a_planted_change(line: str, key: str) -> None:
    heavy = "import torch\n" if "torch" in line else ""
    out = run_python(f"{heavy}{STATE}\nbefore = state()\n{line}\nprint(json.dumps(sorted(changes(before, state()))))")
    assert json.loads(out) == [key]


def test_importing_the_package_is_light_and_changes_nothing() -> None:
    code = f"{STATE}\nbefore = state()\nimport {PACKAGE}\nprint(json.dumps([changes(before, state()), sorted(set({HEAVY!r}) & set(sys.modules))]))"
    changed, loaded = json.loads(run_python(code))
    assert changed == {}
    assert loaded == [], f"import {PACKAGE} must not load these"


def foreign_imports(sources: Mapping[str, str]) -> list[str]:
    """Every import statement at the top of a module that is not of the package itself."""
    found = set()
    for source in sources.values():
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0] if not node.level else PACKAGE}
            else:
                continue
            if not names & {PACKAGE, "__future__"}:
                found.add(ast.unparse(node))
    return sorted(found)


def test_foreign_imports() -> None:
    ours = "from __future__ import annotations\nfrom mitigate import rows\nimport mitigate.rows\nfrom . import x\n"
    assert foreign_imports({"a": f"{ours}import torch\nfrom torch import nn\ndef f(): import ray", "b": "import torch"}) == [
        "from torch import nn",
        "import torch",
    ]


def test_importing_every_module_changes_nothing() -> None:
    sources = package_sources(ROOT)
    modules = [f"{PACKAGE}.{name}" for name in sources if name and unit(name) != "__main__"]
    # Others' side effects are theirs: run their import statements first, then look at what our own modules do.
    others = "\n".join(foreign_imports(sources))
    code = f"""
import importlib
{others}
{STATE}
found = {{}}
for name in {modules!r}:
    before = state()
    importlib.import_module(name)
    if changed := changes(before, state()):
        found[name] = changed
print(json.dumps(found))
"""
    assert json.loads(run_python(code).splitlines()[-1]) == {}


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r} or name.startswith(tuple(n + "." for n in {names!r})):
            raise ModuleNotFoundError("blocked: " + name, name=name)
sys.meta_path.insert(0, Block())
"""
WITHOUT_SEARCH = BLOCK.format(names=("ray", "optuna", f"{PACKAGE}.search"))


def test_block_rule_blocks() -> None:
    code = f"""{WITHOUT_SEARCH}
for name in ("ray", "optuna.trial", "{PACKAGE}.search.study"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
"""
    assert run_python(code).count("blocked: ") == 3


@pytest.mark.parametrize("name", ["trial", "cli"])
def test_works_without_search(name: str) -> None:
    run_python(f"{WITHOUT_SEARCH}\nimport {PACKAGE}.{name}")


# ---------------------------------------------------------------------------------------------------------------------- wheel


def wheel_violations(names: list[str]) -> list[str]:
    """Files of a wheel outside the package and its metadata."""
    return [name for name in names if name.split("/")[0] != PACKAGE and not fnmatch.fnmatch(name, f"{PACKAGE}-*.dist-info/*")]


def test_wheel_holds_the_package_and_nothing_beside_it(tmp_path: Path) -> None:
    assert wheel_violations(["mitigate/a.py", "mitigate-0.1.0.dist-info/RECORD", "kernels/pool.py", "tests/x.py"]) == ["kernels/pool.py", "tests/x.py"]
    for path in tracked_files(ROOT):  # build from a copy: the build writes beside the sources
        target = tmp_path / "copy" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target, follow_symlinks=False)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tmp_path), str(tmp_path / "copy")], check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        top_level = [archive.read(name).decode().split() for name in names if name.endswith("/top_level.txt")]
    assert wheel_violations(names) == []
    assert top_level in ([], [[PACKAGE]])
    modules = {f"{PACKAGE}/{name.replace('.', '/')}.py" for name in package_sources(ROOT) if name}
    inits = {name for name in names if name.endswith("/__init__.py")}
    assert {name for name in names if name.endswith(".py")} - inits == {name for name in modules if (ROOT / name).exists()}
    presets = {f"{PACKAGE}/{path}" for path in tracked_files(ROOT) if path.startswith("configs/")}
    assert presets <= set(names), "configs are package data"
    assert f"{PACKAGE}/py.typed" in names


# ---------------------------------------------------------------------------------------------------------------------- nothing local

LOCAL = {
    "an absolute path of some machine": re.compile(r"(?<![\w.~/:-])/(?:home|root|Users|work|workspace|opt|srv|mnt|media|scratch)/[\w.-]+"),
    "a package index": re.compile(r"\bpypi\.org|\bpythonhosted\.org|\bdownload\.pytorch\.org|\bregistry\.npmjs|--(?:extra-)?index-url|--find[-]links"),
    "an address with a password": re.compile(r"\b[a-z]+://[^/\s:@]+:[^/\s@]+@"),
}


def local_violations(path: str, text: str) -> list[str]:
    return [
        f"{path}:{number} holds {what}: {match[0]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in LOCAL.items()
        if (match := pattern.search(line))
    ]


PLANTED = [("see ", "/home", "/ann/x"), ("'/ro", "ot/.cache'"), ("https://py", "pi.org/simple"), ("--extra-in", "dex-url x"), ("ftp://ann", ":key@host/x")]


@pytest.mark.parametrize("parts", PLANTED)
def test_local_rule_sees_a_planted_violation(parts: tuple[str, ...]) -> None:
    assert len(local_violations("x", "".join(parts))) == 1


def test_local_rule_allows_what_is_allowed() -> None:
    assert local_violations("x", "a/home/b  ../home/x  https://example.org/home/x  results/<study>/  W/S  #!/usr/bin/env bash  mitigate/opt/x") == []


def test_no_file_holds_anything_local() -> None:
    found = []
    for path in tracked_files(ROOT):
        if path == "LICENSE" or not (ROOT / path).is_file():
            continue
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # binary
        found += local_violations(path, text)
    assert found == []


def dead_links(text: str, root: Path) -> list[str]:
    """Relative links and images of a Markdown text that lead nowhere, and placeholders left in it."""
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    dead = [target for target in targets if "://" not in target and not (root / target).exists()]
    return dead + re.findall(r"@@\w+@@", text)


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("x")
    text = "[a](there.md) [b](there.md#part) [c](https://example.org/x) ![d](gone.png) @@TODO@@"
    assert dead_links(text, tmp_path) == ["gone.png", "@@TODO@@"]


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
)
def test_documents_have_no_dead_links(name: str) -> None:
    path = ROOT / name
    assert dead_links(path.read_text(encoding="utf-8"), path.parent) == []
