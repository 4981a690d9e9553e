"""Who may import whom, by reading the source, and what importing a package loads, by doing it."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import specdepth
from specdepth.scheduler.features import NUM_FEATURES
from specdepth.scheduler.learned import PolicyCard, PolicyWeights, save_policy

ROOT = Path(__file__).parents[1]

LAYERS = ("scheduler", "decoder", "envs", "agents")
"""Lowest first; each may import those before it, and `checkpoints`."""
LEAVES = ("checkpoints", "_version")
THIRD_PARTY_OF_SCHEDULER = {"numpy", "safetensors"}
NOT_BELOW_AGENTS = {"wandb", "tyro", "rich", "matplotlib", "jinja2"}
NOT_BELOW_ENVS = NOT_BELOW_AGENTS | {"stable_baselines3", "gymnasium"}


def imported_names(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted name of each import in `source`, wherever it stands in the file."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def relative_crossings(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Relative imports that leave `specdepth.<layer>`."""
    depth = len(module.split(".")) - (not is_package)  # names in the package path
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and depth - node.level + 1 < 2 <= depth:
            yield f"{module}: a relative import of {node.level} dots leaves its package"


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `specdepth.<layer>...`, as sentences."""
    layer = module.split(".")[1]
    below = LAYERS[: LAYERS.index(layer)] if layer in LAYERS else ()
    found = list(relative_crossings(source, module, is_package))
    for name in imported_names(source, module, is_package):
        top, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if top in (*LAYERS, "checkpoints"):
            found.append(f"{module} imports {name} past specdepth: each class would exist twice")
        elif top == "specdepth":
            allowed = {layer, *below, *LEAVES, "__version__"} if layer in LAYERS else {layer}
            if part not in allowed:
                found.append(f"{module} imports {name}, which is not below it")
        elif layer == "scheduler" and "integrations" not in module.split("."):
            if top not in sys.stdlib_module_names | THIRD_PARTY_OF_SCHEDULER:
                found.append(f"{module} imports {name}: schedulers run with numpy alone")
        elif (layer == "decoder" and top in NOT_BELOW_ENVS) or (
            layer == "envs" and top in NOT_BELOW_AGENTS
        ):
            found.append(f"{module} imports {name}, which belongs further up")
    return found


def modules_of(layer: str) -> Iterator[tuple[Path, str, bool]]:
    for path in sorted((ROOT / layer).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(("specdepth", *(parts[:-1] if is_package else parts))), is_package


@pytest.mark.parametrize("layer", [*LAYERS, "checkpoints"])
def test_packages_import_only_what_lies_below_them(layer: str) -> None:
    modules = list(modules_of(layer))
    assert modules
    found = [
        sentence
        for path, module, is_package in modules
        for sentence in violations(path.read_text(encoding="utf-8"), module, is_package)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdepth.scheduler.depth", "from specdepth.decoder.engine import Engine"),
        ("specdepth.decoder.engine", "import specdepth.envs"),
        ("specdepth.decoder.engine", "from specdepth import agents"),
        ("specdepth.decoder.engine", "def f():\n    import specdepth.agents.train"),
        ("specdepth.decoder.engine", "from ..scheduler.state import RoundState"),
        ("specdepth.scheduler.baselines.off", "from ...decoder import config"),
        ("specdepth.scheduler.depth", "from .. import decoder"),
        ("specdepth.scheduler.depth", "import torch"),
        ("specdepth.scheduler.depth", "from transformers import AutoConfig"),
        ("specdepth.decoder.engine", "import gymnasium as gym"),
        ("specdepth.envs.env", "import wandb"),
        ("specdepth.decoder.engine", "from scheduler.state import RoundState"),
        ("specdepth.decoder.engine", "from specdepth import SamplingParams"),
        ("specdepth.checkpoints", "from specdepth.scheduler import learned"),
        (
            "specdepth.scheduler.depth",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import specdepth.decoder",
        ),
    ],
)
def test_a_planted_import_is_found(module: str, source: str) -> None:
    assert violations(source, module, is_package=module.count(".") == 1)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("specdepth.scheduler.depth", "import json\nimport numpy as np\nfrom .state import Ints"),
        ("specdepth.scheduler.baselines.off", "from ..state import Ints\nfrom .lawful import X"),
        ("specdepth.decoder.engine", "import torch\nfrom specdepth.scheduler.state import Ints"),
        ("specdepth.agents.train", "from specdepth.envs import env\nimport wandb"),
        ("specdepth.agents.train", "from specdepth import __version__, checkpoints"),
    ],
)
def test_a_lawful_import_passes(module: str, source: str) -> None:
    assert violations(source, module) == []


def loaded_by(code: str, before: str = "") -> set[str]:
    """Top-level modules, standard library left out, that `code` loads in a new interpreter."""
    script = (
        f"import sys, json\n{before}\nold = set(sys.modules)\n{code}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - old}\n"
        "print(json.dumps(sorted(new - set(sys.stdlib_module_names))))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return {name for name in json.loads(run.stdout) if not name.startswith("_")}


def test_importing_specdepth_loads_only_the_standard_library() -> None:
    assert loaded_by("import specdepth") == {"specdepth"}


def test_importing_the_scheduler_and_its_baselines_loads_numpy_at_most() -> None:
    code = "import specdepth.scheduler, specdepth.scheduler.baselines, specdepth.scheduler.features"
    assert loaded_by(code) <= {"specdepth", "numpy"}


def test_scheduler_names_of_the_front_package_load_numpy_at_most() -> None:
    loaded = loaded_by(
        "from specdepth import FixedDepth, Off, TableDepth, make_scheduler, CostModel"
    )
    assert loaded <= {"specdepth", "numpy"}


@pytest.mark.parametrize("package", ["decoder", "agents", "checkpoints"])
def test_importing_a_package_loads_no_framework(package: str) -> None:
    loaded = loaded_by(f"import specdepth.{package}")
    assert not loaded & {"torch", "transformers", "stable_baselines3", "gymnasium", "wandb"}


def test_importing_the_environments_loads_gymnasium_but_no_framework() -> None:
    loaded = loaded_by("import specdepth.envs")
    assert not loaded & {"torch", "transformers", "stable_baselines3", "wandb"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small exported policy with random weights."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return rng.normal(size=shape).astype(np.float32)

    weights = PolicyWeights(
        weights=(normal(16, NUM_FEATURES), normal(9, 16)),
        biases=(normal(16), normal(9)),
        mean=np.zeros(NUM_FEATURES, np.float32),
        inv_std=np.ones(NUM_FEATURES, np.float32),
        depths=tuple(range(9)),
    )
    card = PolicyCard(model_pair="a+b", drafter="prompt-lookup", max_num_speculative_tokens=8)
    return save_policy(tmp_path_factory.mktemp("policy"), weights, card)


RUN_POLICY = """
from specdepth import load_policy
scheduler = load_policy({policy!r})
depths = scheduler.choose(state)
assert depths.shape == (4,) and depths.min() >= 0 and depths.max() <= 8, depths
"""
MAKE_STATE = """
import runpy
state = runpy.run_path({path!r})["build_state"]()
""".format(path=str(ROOT / "tests" / "scheduler" / "conftest.py"))


def test_running_an_exported_policy_loads_numpy_and_safetensors_alone(policy: Path) -> None:
    loaded = loaded_by(RUN_POLICY.format(policy=str(policy)), before=MAKE_STATE)
    assert loaded <= {"specdepth", "numpy", "safetensors"}


def test_a_policy_in_the_decoder_needs_neither_stable_baselines3_nor_gymnasium(
    policy: Path,
) -> None:
    code = "from specdepth import SpeculativeDecoder\nimport specdepth.decoder.engine\n"
    loaded = loaded_by(code + RUN_POLICY.format(policy=str(policy)), before=MAKE_STATE)
    assert "torch" in loaded
    assert not loaded & {"stable_baselines3", "gymnasium", "wandb", "tyro", "matplotlib"}


@pytest.mark.parametrize("name", specdepth.__all__)
def test_each_public_name_is_the_object_of_its_home_module(name: str) -> None:
    value = getattr(specdepth, name)
    assert name in dir(specdepth)
    if name in specdepth._HOMES:
        home = sys.modules[specdepth._HOMES[name]]
        assert value is getattr(home, name)


def test_type_checkers_see_the_names_that_are_loaded_lazily() -> None:
    tree = ast.parse((ROOT / "src/specdepth/__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == specdepth._HOMES
    assert {*seen, "__version__", "load_policy"} == set(specdepth.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    name = "Missing"  # a literal would not pass the type checker, which is as it should be
    with pytest.raises(AttributeError, match="no attribute 'Missing'"):
        getattr(specdepth, name)


def test_load_policy_takes_a_folder(policy: Path) -> None:
    assert specdepth.load_policy(policy).card.model_pair == "a+b"


def test_load_policy_takes_the_name_of_a_policy_that_comes_with_specdepth(
    policy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "policies").mkdir()
    shutil.copytree(policy, tmp_path / "policies" / policy.name)
    monkeypatch.setattr("specdepth.checkpoints.files", lambda package: tmp_path)
    monkeypatch.chdir(tmp_path)
    assert specdepth.load_policy(policy.name).card.model_pair == "a+b"
    with pytest.raises(ValueError, match=rf"one of these names: .*{policy.name}"):
        specdepth.load_policy("another")


def test_load_policy_says_what_it_takes_when_there_is_no_such_policy() -> None:
    with pytest.raises(ValueError, match=r"no policy 'missing': expected a folder with policy\."):
        specdepth.load_policy("missing")


def test_load_policy_names_do_not_leave_the_checkpoints_folder() -> None:
    with pytest.raises(ValueError, match="no policy"):
        specdepth.load_policy("../no/such/policy")
