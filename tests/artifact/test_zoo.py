"""RotationZoo files: what goes out comes back, and nothing in a file is ever run."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oscarkv.artifact import Artifact, ModelIdentity
from oscarkv.artifact.zoo import KEY_FILE, VALUE_FILE, export_zoo, import_zoo
from oscarkv.calibration.fit import assemble
from oscarkv.calibration.statistics import LayerStatistics
from oscarkv.errors import ArtifactError, OscarError, RecipeError
from oscarkv.recipe import Recipe

LAYERS, HEADS, DIM = 3, 2, 32
MODEL = ModelIdentity("tiny", "LlamaForCausalLM", LAYERS, 4, HEADS, DIM, 1024, "{}", "")


def rotation(seed: int, *heads: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(*heads, DIM, DIM, generator=generator, dtype=torch.float64))
    return q.float()


def content(version: int = 1, objective: str = "qqt_r_h_pbr", seed: int = 0) -> dict[str, Any]:
    heads = () if version == 1 else (HEADS,)
    layers = {}
    for i in range(LAYERS):
        matrix = rotation(100 * seed + i, *heads)
        layers[i] = {"layer_id": i, "rotation": matrix, "eigenvalues": torch.ones(DIM)}
    return {
        "format_version": version,
        "objective": objective if version == 1 else "cov_eig_hadamard_perhead",
        "source_grouping": "layer",
        "layers": layers,
    }


def save(path: Path, data: Any) -> Path:
    torch.save(data, path)
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return (
        save(tmp_path / "k.pt", content()),
        save(tmp_path / "v.pt", content(objective="sst_r_h_pbr", seed=1)),
    )


def artifact_of(recipe: str, keys: Tensor, mean: float = 0.0) -> Artifact:
    layers = {}
    for i in range(LAYERS):
        blank = LayerStatistics.blank(i, HEADS, DIM, torch.device("cpu"))
        zeros = torch.zeros(HEADS, DIM, dtype=torch.float64)
        layers[i] = assemble(
            blank, Recipe.named(recipe), keys.double(), zeros + mean, keys.double(), zeros
        )
    return Artifact(MODEL, Recipe.named(recipe), layers)


def test_import_v1(pair: tuple[Path, Path]) -> None:
    artifact = import_zoo(*pair, MODEL)
    assert artifact.recipe == Recipe.named("paper")
    for i in range(LAYERS):
        layer = artifact.layers[i]
        for head in range(HEADS):
            torch.testing.assert_close(layer.key[head], rotation(i), rtol=0, atol=0)
            torch.testing.assert_close(layer.value[head], rotation(100 + i), rtol=0, atol=0)
        torch.testing.assert_close(layer.query, layer.key, rtol=0, atol=1e-5)
        assert not layer.key_mean.any()


def test_import_v2(tmp_path: Path) -> None:
    keys = save(tmp_path / "k.pt", content(2))
    values = save(tmp_path / "v.pt", content(2, seed=1))
    artifact = import_zoo(keys, values, MODEL)
    assert artifact.recipe == Recipe.named("paper-per-head")
    torch.testing.assert_close(artifact.layers[1].key, rotation(1, HEADS), rtol=0, atol=0)


@pytest.mark.parametrize("version", [1, 2])
def test_round_trip(version: int, tmp_path: Path) -> None:
    first = import_zoo(
        save(tmp_path / "k.pt", content(version)),
        save(tmp_path / "v.pt", content(version, "sst_r_h_pbr", seed=1)),
        MODEL,
    )
    paths = export_zoo(first, tmp_path / "new" / "out")
    assert [path.name for path in paths] == [KEY_FILE, VALUE_FILE]
    written = torch.load(paths[0], weights_only=True)
    assert written["format_version"] == version
    assert written["layers"][0]["rotation"].dtype == torch.float32
    assert written["layers"][0]["eigenvalues"].shape == written["layers"][0]["rotation"].shape[:-1]
    second = import_zoo(*paths, MODEL)
    for i in range(LAYERS):
        for name in ("key", "value", "query", "value_inverse"):
            expected = getattr(first.layers[i], name)
            torch.testing.assert_close(getattr(second.layers[i], name), expected, rtol=0, atol=0)


def test_bf16_rotations_are_made_orthogonal_again(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    rounded = content()
    for entry in rounded["layers"].values():
        entry["rotation"] = entry["rotation"].bfloat16()
    layer = import_zoo(save(tmp_path / "r.pt", rounded), pair[1], MODEL).layers[0]
    torch.testing.assert_close(layer.key @ layer.key.mT, torch.eye(DIM).expand(HEADS, DIM, DIM))
    torch.testing.assert_close(layer.key[0], rotation(0), rtol=0, atol=5e-3)


class _Malicious:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.target),))


@pytest.mark.parametrize("protocol", ["torch", "pickle"])
def test_code_in_a_file_is_never_run(
    protocol: str, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    target = tmp_path / "owned"
    data = {**content(), "extra": _Malicious(target)}
    path = tmp_path / "evil.pt"
    if protocol == "torch":
        save(path, data)
    else:
        path.write_bytes(pickle.dumps(data))
    with pytest.raises(ArtifactError, match="would run code"):
        import_zoo(path, pair[1], MODEL)
    assert not target.exists()
    # The file does what it is meant to do: it is only harmless because it was refused.
    torch.load(path, weights_only=False) if protocol == "torch" else pickle.loads(path.read_bytes())
    assert target.exists()


def _with_rotation(matrix: Any) -> dict[str, Any]:
    data = content()
    data["layers"][1]["rotation"] = matrix
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**content(), "format_version": 3}, "format 3"),
        ({**content(), "layers": [1]}, "not a table"),
        ({**content(), "layers": {"a": 1}}, "not a table"),
        ([1, 2], "holds a list"),
        ({**content(), "objective": "sst_r_h_pbr"}, "swapped"),
        ({**content(), "layers": {0: content()["layers"][0]}}, "layer 1, 2 of tiny"),
        ({**content(), "layers": {**content()["layers"], 3: {}}}, "has layer 3"),
        (_with_rotation(None), "layer 1 has no rotation"),
        (_with_rotation(torch.eye(DIM).to_sparse()), "has no rotation"),
        (_with_rotation(torch.eye(DIM * 2)), r"shape \[64, 64\]"),
        (_with_rotation(torch.eye(DIM).expand(5, DIM, DIM)), r"shape \[5, 32, 32\]"),
        (_with_rotation(torch.eye(DIM, dtype=torch.int32)), "not floating point"),
        (_with_rotation(1.1 * torch.eye(DIM)), "not a rotation"),
        (_with_rotation(torch.full((DIM, DIM), torch.nan)), "not a rotation"),
    ],
)
def test_refused_files(data: Any, message: str, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with pytest.raises(ArtifactError, match=message):
        import_zoo(save(tmp_path / "bad.pt", data), pair[1], MODEL)


def test_unreadable_files(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    with pytest.raises(ArtifactError, match="cannot read"):
        import_zoo(tmp_path / "none.pt", pair[1], MODEL)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(pair[0].read_bytes()[:-200])
    with pytest.raises(ArtifactError, match="not a readable"):
        import_zoo(cut, pair[1], MODEL)


def test_layers_that_stay_exact_need_no_rotation(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    data = content()
    del data["layers"][1]
    path = save(tmp_path / "some.pt", data)
    assert sorted(import_zoo(path, pair[1], MODEL, layers=[0, 2]).layers) == [0, 2]


def test_recipes_that_need_more_than_rotations(pair: tuple[Path, Path]) -> None:
    with pytest.raises(RecipeError, match="needs statistics"):
        import_zoo(*pair, MODEL, recipe=Recipe.named("balanced"))


def test_export_refuses_what_the_format_cannot_hold(tmp_path: Path) -> None:
    keys = rotation(0, HEADS)
    with pytest.raises(ArtifactError, match="subtracts means"):
        export_zoo(artifact_of("balanced", keys, mean=0.5), tmp_path / "out")
    with pytest.raises(ArtifactError, match="layer 0 its value transform is not a rotation"):
        export_zoo(artifact_of("balanced", 1.5 * keys), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OscarError, match="cannot create"):
        export_zoo(artifact_of("paper", keys), tmp_path / "file")
