"""The repository's shape: folders, links, import directions and the public names."""

from __future__ import annotations

import ast
import configparser
import importlib
import os
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import grimp
import pytest
import torch

import lowdiff
from lowdiff.compressors import TopK
from tests.mutations.__main__ import TIERS

ROOT = Path(__file__).parents[1]

GROUND = ("lowdiff.core", "lowdiff.errors", "lowdiff.protocols", "lowdiff.types")
#: Folders of one module a kind; every other folder is a room of at most twelve.
LONG_LISTS = {"lowdiff.compressors", "lowdiff.tuner", "lowdiff.examples"}
MAY_IMPORT = {
    "lowdiff.compressors": GROUND,
    "lowdiff.persistence": GROUND,
    "lowdiff.recovery": (*GROUND, "lowdiff.compressors", "lowdiff.persistence"),
    "lowdiff.tuner": GROUND,
    **dict.fromkeys(GROUND, GROUND),
}


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def packages() -> list[str]:
    return setup_cfg()["options"]["packages"].split()


def package_dir() -> dict[str, str]:
    lines = setup_cfg()["options"]["package_dir"].strip().splitlines()
    pairs = (line.split("=") for line in lines)
    return {name.strip(): folder.strip() for name, folder in pairs}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_link_leads_to_the_folder_that_is_installed_under_its_name() -> None:
    links = {f"lowdiff.{p.name}": p for p in (ROOT / "lowdiff").iterdir() if p.is_symlink()}
    folders = {name: f for name, f in package_dir().items() if name != "lowdiff"}
    assert links.keys() == folders.keys()
    for name, folder in folders.items():
        assert links[name].resolve() == (ROOT / folder).resolve(), name
        assert not links[name].readlink().is_absolute(), f"{name} breaks in another clone"


def test_every_package_on_disk_is_listed_and_every_listed_one_exists() -> None:
    on_disk = {
        ".".join(Path(folder).relative_to(ROOT).parts)
        for folder, _, files in os.walk(ROOT / "lowdiff", followlinks=True)
        if any(file.endswith(".py") for file in files)
    }
    assert on_disk == set(packages())
    for name in on_disk:
        assert ROOT.joinpath(*name.split("."), "__init__.py").exists(), name


def test_every_folder_with_python_files_is_type_checked_once() -> None:
    checked = [name.strip() for name in setup_cfg()["mypy"]["files"].split(",")]
    others = ("benches", "docs", "tests")
    present = [name for name in others if any(ROOT.joinpath(name).rglob("*.py"))]
    assert sorted(checked) == sorted(["lowdiff", *present])


@pytest.mark.slow
def test_a_wheel_holds_the_packages_and_nothing_beside_them(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build leaves traces in its folder
    source.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for folder in package_dir().values():
        # Other tests write compiled files meanwhile.
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {"lowdiff/py.typed"} | {
        f"{package.replace('.', '/')}/{path.name}"
        for package in packages()
        for path in ROOT.joinpath(*package.split(".")).glob("*.py")
    }
    assert names == expected


def test_no_folder_is_imported_by_its_bare_name() -> None:
    for name in packages():
        importlib.import_module(name)
    bare = {Path(folder).name for folder in package_dir().values()} - {"lowdiff"}
    assert bare == {"compressors", "examples", "persistence", "recovery", "tuner"}
    assert not bare & sys.modules.keys()


def test_imports_go_down_only() -> None:
    command = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_folder_imports_only_what_the_design_allows() -> None:
    graph = grimp.build_graph("lowdiff", cache_dir=None)
    wrong = [
        f"{module} imports {imported}"
        for owner, allowed in MAY_IMPORT.items()
        for module in graph.modules
        if within(module, owner)
        for imported in graph.find_modules_directly_imported_by(module)
        if not any(within(imported, package) for package in (owner, *allowed))
    ]
    assert not wrong


def test_no_room_has_more_than_twelve_modules() -> None:
    sizes = {
        package: len(
            [p for p in ROOT.joinpath(*package.split(".")).glob("*.py") if p.name[0] != "_"]
        )
        for package in packages()
        if package not in LONG_LISTS
    }
    assert max(sizes.values()) <= 12, sizes


#: A class with more fields or methods says in its docstring why it is large.
MOST_FIELDS, MOST_METHODS = 12, 15


def fields_of(node: ast.ClassDef) -> set[str]:
    """Names that a class declares, or assigns to ``self``."""
    found = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for part in ast.walk(node):
        if (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            found.add(part.attr)
    return found


def test_a_large_class_says_why() -> None:
    """Frozen dataclasses are tables of facts, and may have as many as there are."""
    wrong = []
    for package in packages():
        for path in ROOT.joinpath(*package.split(".")).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ClassDef):
                    continue
                if any("frozen=True" in ast.unparse(d) for d in node.decorator_list):
                    continue
                methods = sum(isinstance(part, ast.FunctionDef) for part in node.body)
                is_large = len(fields_of(node)) > MOST_FIELDS or methods > MOST_METHODS
                if is_large and "Large because" not in (ast.get_docstring(node) or ""):
                    wrong.append(f"{package}.{path.stem}.{node.name}")
    assert not wrong


def layer_of(module: str) -> int:
    """Number of the layer that a module of lowdiff belongs to, counted from the top."""
    text = setup_cfg()["importlinter:contract:layers"]["layers"]
    for number, line in enumerate(text.split("\n")):
        if any(within(module, name.strip()) for name in re.split("[:|]", line) if name.strip()):
            return number
    return -1


def test_strategies_are_named_where_they_are_chosen_told_or_compared_for_users() -> None:
    """All else asks `lowdiff.protect.strategy_of`, or the fence. (Not "log", which is an ordinary word.)"""
    tops = ("lowdiff", "compressors", "persistence", "recovery", "tuner")
    naming = {
        str(path.relative_to(ROOT))
        for top in tops
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in ("gradients", "replica", "survivors")
    }
    elsewhere = {path for path in naming if not path.startswith("lowdiff/protect/")}
    assert naming - elsewhere
    assert elsewhere <= {
        "lowdiff/types.py",  # their list
        "persistence/run/fences.py",  # runs that named the compressor instead
        "persistence/files/detached_process.py",  # what the process is called
        "persistence/files/paths.py",  # and its page
        "recovery/sources/strategies.py",  # what each holds
        "tuner/side_by_side.py",  # a report of all strategies
    }


def test_no_lower_room_holds_a_callable_of_a_higher_one(tmp_path: Path) -> None:
    """Data crosses rooms as values, behaviour as protocols: no callbacks upward."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = lowdiff.Checkpointer(
        tmp_path / "run", staging=tmp_path / "staging", compressor=TopK(0.1)
    )
    checkpointer.attach(model, optimizer)
    wrong, seen = set(), set[int]()
    waiting: list[object] = [checkpointer]
    while waiting:
        holder = waiting.pop()
        room = type(holder).__module__
        if id(holder) in seen or not within(room, "lowdiff"):
            continue
        seen.add(id(holder))
        slots = [name for kind in type(holder).__mro__ for name in getattr(kind, "__slots__", ())]
        held = {name: getattr(holder, name, None) for name in (*vars_of(holder), *slots)}
        for name, value in held.items():
            function = getattr(value, "func", value)
            owner = str(getattr(function, "__module__", ""))
            is_callable = isinstance(function, types.FunctionType | types.MethodType)
            if is_callable and within(owner, "lowdiff") and layer_of(owner) < layer_of(room):
                wrong.add(f"{room}.{type(holder).__name__}.{name} holds {owner}'s {function}")
            parts = value.values() if isinstance(value, dict) else value
            waiting += [value, *(parts if isinstance(parts, list | tuple) else ())]
    checkpointer.close()
    assert len(seen) > 30
    assert not wrong


def vars_of(holder: object) -> list[str]:
    return list(getattr(holder, "__dict__", ()))


def private_names() -> set[str]:
    """Names with one leading underscore that the product gives to functions, classes, values and attributes."""
    names = set()
    for package in packages():
        for path in ROOT.joinpath(*package.split(".")).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(node.name)
                    names |= fields_of(node) if isinstance(node, ast.ClassDef) else set()
                elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    names.add(node.id)
    return {name for name in names if re.match("_[^_]", name)}


def name_of(node: ast.AST) -> str:
    """Name of a variable or attribute; empty for anything else."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def names_reached(node: ast.AST) -> list[str]:
    """Names that a node asks of something else: an attribute, an import, a string for ``setattr`` and its like."""
    if isinstance(node, ast.ImportFrom) and within(node.module or "", "lowdiff"):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute) and name_of(node.value) not in ("self", "cls", "os"):
        return [node.attr]
    if isinstance(node, ast.Call) and name_of(node.func).endswith(
        ("setattr", "delattr", "getattr")
    ):
        words = [str(part.value) for part in node.args[:2] if isinstance(part, ast.Constant)]
        return [w.rpartition(".")[2] for w in words if "." not in w or w.startswith("lowdiff.")]
    return []


@pytest.mark.slow
def test_tests_reach_into_few_private_names() -> None:
    """A file or attribute of the product that moves is not to break tests one by one.

    Counted are private names of the product in tests: attributes of anything but ``self`` and ``cls``, imports, and
    strings in ``setattr`` and its like. `lowdiff.testing` opens what tests need: `limits`, `parts_of`, `adjust`.
    """
    private = private_names()
    reaches = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in names_reached(node)
        if name in private
    ]
    assert len(reaches) <= 20, "\n".join(reaches)


def test_folders_that_retention_empties_meanwhile_are_listed_in_one_place() -> None:
    """A listing by ``Path.glob`` or ``iterdir`` raises where the folder goes between two calls."""
    guarded = {
        "durable.py",
        "trust.py",
        "fetch.py",
        "fences.py",
        "frozen_parameters.py",
        "paths.py",
    }
    lists = re.compile(r"\.r?glob\(|\.iterdir\(|scandir\(|listdir\(")
    wrong = [
        str(path)
        for folder in ("persistence", "recovery")
        for path in ROOT.joinpath(folder).rglob("*.py")
        if path.name not in guarded and lists.search(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "use RunFolder.manifests or entries_of"


def test_public_names_are_sorted_and_real() -> None:
    assert lowdiff.__all__ == sorted(lowdiff.__all__)
    for name in lowdiff.__all__:
        assert getattr(lowdiff, name).__name__ == name
    assert set(lowdiff.__all__) <= set(dir(lowdiff))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lowdiff' has no attribute 'Chekpointer'"):
        _ = lowdiff.Chekpointer  # type: ignore[attr-defined]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-c", "import lowdiff"], "lowdiff"),
        (["-m", "lowdiff", "--help"], "lowdiff.cli.app"),
        (["-m", "lowdiff", "recover", "--help"], "lowdiff.cli.recover"),
    ],
    ids=["import", "help", "recover-help"],
)
def test_torch_and_numpy_are_not_loaded_before_they_are_needed(
    arguments: list[str], expected: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert expected in imported
    assert not {"torch", "numpy"} & imported


def test_every_wait_for_other_ranks_is_marked() -> None:
    """A hang is seen where `wait_for_ranks` waits. What is over, and a thread of lowdiff's own, waits without."""
    unmarked = [
        f"{room}/{file.name}: {ast.unparse(call)} in {function.name}"
        for room in ("lowdiff/attach", "lowdiff/commit", "lowdiff/model", "lowdiff/step")
        for file in (ROOT / room).iterdir()
        if file.suffix == ".py"
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "wait"
    ]
    # What has come is waited for by nobody.
    assert unmarked == ["lowdiff/commit/agreement.py: work.wait() in peek"]


def test_where_a_tensor_lives_is_asked_in_one_place() -> None:
    """What counts a step without an accelerator stands in for that module alone."""
    asks = re.compile(
        r"\.is_cpu\b|\.is_cuda\b|device\.type [!=]= \"|torch\.cuda\b|torch\.accelerator\b|pin_memory"
    )
    rooms = ("lowdiff", "compressors", "persistence", "recovery", "tuner")
    found = {
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if asks.search(path.read_text(encoding="utf-8"))
    }
    # The latter keeps the generators of a process, wherever its model is.
    assert found == {"lowdiff/core/devices.py", "lowdiff/integrations/batch_order.py"}


#: What marks a storage, or makes one that is marked: it can never be resized again, or others share it.
MARKING = re.compile(
    r"(\.(numpy|__array__|share_memory_|pin_memory|set_)|\.?(from|to)_dlpack|torch\.(from_numpy|frombuffer)"
    r"|np\.(array|asarray))$"
)
#: Where it is right, and why: no tensor of the user's is there.
MARKS_ITS_OWN = {
    # What comes from other ranks or goes to them, in memory of its own.
    "lowdiff/model/ranks.py": {"torch.frombuffer"},
    "lowdiff/protect/copies/line.py": {"torch.frombuffer", "torch.from_numpy"},
    "lowdiff/protect/copies/residuals.py": {"torch.from_numpy"},
    "lowdiff/protect/copies/wards.py": {"torch.frombuffer"},
    # A state dict of lowdiff's own objects.
    "lowdiff/integrations/trainer_state.py": {".numpy", "torch.frombuffer"},
    "lowdiff/loop/plain_loader.py": {"torch.from_numpy", "np.asarray"},
    # The residual in its file, payloads as they are decoded, positions.
    "lowdiff/step/residual.py": {"torch.from_numpy"},
    "compressors/randomk.py": {"torch.from_numpy", "np.array"},
    "compressors/sections.py": {"torch.from_numpy", "np.array"},
    "compressors/sparse.py": {"torch.from_numpy"},
    # Images, and what is handed out of a run: tensors that nobody had before.
    "recovery/images.py": {"torch.frombuffer"},
    "recovery/inspect/export.py": {"torch.from_numpy"},
    "recovery/replica/file.py": {"torch.from_numpy"},
    "persistence/versions/weights.py": {"torch.from_numpy"},
    # Numbers, no tensors.
    "lowdiff/core/digest.py": {"np.array"},
    "persistence/format/differentials.py": {"np.array"},
    "persistence/format/segment_file.py": {"np.array"},
    "tuner/costs.py": {"np.asarray"},
    "tuner/lost_tail.py": {"np.array"},
    "tuner/simulate.py": {"np.asarray"},
}


def calls(name: re.Pattern[str]) -> dict[str, set[str]]:
    """File of the product -> calls in it of functions whose names end so; examples, which users copy, are left out."""
    found: dict[str, set[str]] = {}
    word = re.compile(name.pattern.replace("$", r"\("))  # most files need not be parsed
    for room in ("lowdiff", "compressors", "persistence", "recovery", "tuner"):
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not word.search(text):
                continue
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and (match := name.search(ast.unparse(node.func))):
                    found.setdefault(str(path.relative_to(ROOT)), set()).add(match[0])
    return found


def test_the_memory_of_tensors_is_looked_at_in_one_place() -> None:
    """By `lowdiff.core.memory`, which leaves no mark: `Tensor.numpy` makes a storage unresizable for good."""
    assert calls(MARKING) == MARKS_ITS_OWN


def test_every_hook_asks_whether_it_may_act() -> None:
    """Nothing of lowdiff runs inside a transform, a trace, a fake mode or a capture; `inside` alone knows these."""
    registering = calls(re.compile(r"\b(register_\w*hook|set_all_reduce_hook)$")).keys()
    assert registering - calls(re.compile(r"\binside$")).keys() == {
        "lowdiff/step/fsdp_hook.py",  # its hook exchanges through `HookState`, which asks
        "lowdiff/integrations/accelerate.py",  # counts optimizer steps, which are refused inside
    }
    knows = re.compile(r"is_compiling|is_tracing|_functorch|is_fx_|_get_dispatch_mode")
    knowing = {
        str(path.relative_to(ROOT))
        for room in ("lowdiff", "compressors", "persistence", "recovery", "tuner")
        for path in (ROOT / room).rglob("*.py")
        if knows.search(path.read_text(encoding="utf-8"))
    }
    # The latter refuses also what torch.compile compiles once it has given up a trace.
    assert knowing == {"lowdiff/core/transforms.py", "lowdiff/commit/session.py"}


def test_mutations_are_tried_on_the_tiers_of_the_makefile() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    elsewhere = re.search(r"^ELSEWHERE := (.*)$", text, re.MULTILINE)
    assert elsewhere is not None
    for target, words in TIERS.items():
        recipe = text.partition(f"\n{target}:")[2].partition("\n\n")[0]
        assert f'"{words[-1]}"' in recipe.replace("$(ELSEWHERE)", elsewhere[1])
