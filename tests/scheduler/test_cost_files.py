from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdepth.scheduler.cost import CostModel
from specdepth.scheduler.cost_files import load_cost, shipped_costs


def test_every_shipped_cost_model_loads() -> None:
    names = shipped_costs()
    assert {"cpu-smollm2-bf16", "cpu-smollm2-float32", "h100-llama-8b-modelled"} <= set(names)
    for name in names:
        cost = load_cost(name)
        assert cost.pass_s(1) > 0
        assert cost.measured == name.startswith("cpu-")
        assert cost.weight_bytes is not None
        assert cost.kv_bytes_per_token is not None
        assert cost.flops_per_token is not None


def test_the_card_names_every_shipped_cost_model() -> None:
    card = (Path(__file__).parents[2] / "checkpoints" / "costs" / "README.md").read_text()
    for name in shipped_costs():
        assert f"`{name}`" in card


def test_a_path_is_loaded_as_a_file(tmp_path: Path) -> None:
    cost = CostModel.linear()
    cost.save(tmp_path / "cost.json")
    assert load_cost(tmp_path / "cost.json") == cost
    assert load_cost(str(tmp_path / "cost.json")) == cost


def test_step_times_are_fitted(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    path.write_text("tokens,ms\n1,10\n8,20\n")
    assert load_cost(path).pass_s(8) == 0.02


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown cost model 'h1000'.*cpu-smollm2-bf16, .*h100-"):
        load_cost("h1000")


@pytest.mark.parametrize("path", ["none.json", "folder/none", "none.csv"])
def test_a_missing_file_is_called_missing(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*No such file"):
        load_cost(tmp_path / path)


def test_shipped_names_need_no_torch() -> None:
    code = "import sys; from specdepth.scheduler.cost_files import load_cost, shipped_costs; "
    code += "load_cost(shipped_costs()[0]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
