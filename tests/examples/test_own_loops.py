"""The examples of own loops and the recipes equal one device; each is one verification."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import json_of, shoal

FOLDER = Path(__file__).parents[2] / "examples" / "own_loops"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "zero(2)", "ps", "tp(2)"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_equals_one_device(tmp_path: Path, script: str, strategy: str) -> None:
    words = ("-n", "2", "-s", strategy, "--steps", "3", "--json")
    done = shoal("verify", *words, str(FOLDER / f"{script}.py"), cwd=tmp_path)
    assert json_of(done)["ok"], done.stdout


RECIPES = FOLDER.parent / "recipes"


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["ddp", "ps", "pp(2)"])
@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("[a-z]*.py")))
def test_a_recipe_equals_one_device(tmp_path: Path, recipe: str, strategy: str) -> None:
    words = ("-n", "2", "-s", strategy, "--steps", "3", "--json")
    done = shoal("verify", *words, str(RECIPES / f"{recipe}.py"), cwd=tmp_path)
    assert json_of(done)["ok"], done.stdout
