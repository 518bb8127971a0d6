"""Artifact files: what is written comes back, and nothing else is read."""

import dataclasses
import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscarkv.artifact import (
    Artifact,
    LayerTransforms,
    ModelIdentity,
    files,
    load_artifact,
    reader_of,
    save_artifact,
)
from oscarkv.errors import ArtifactError, ModelMismatchError, OscarError
from oscarkv.linalg import hadamard
from oscarkv.recipe import Recipe

HEADS, DIM = 2, 16
WEIGHTS = "803f0040c0bf"  # 1, 2, -1.5 in bfloat16
MODEL = ModelIdentity("tiny", "LlamaForCausalLM", 4, 4, HEADS, DIM, 1024, "{}", WEIGHTS)


def layer(
    seed: int,
    metric: bool = False,
    refined: bool = True,
    size: float = 1.0,
    split: bool = False,
    bits: int = 2,
) -> LayerTransforms:
    recipe = Recipe.named("precise" if split else "compact", key_bits=bits)
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(HEADS, DIM, DIM, generator=generator, dtype=torch.float64)
    key = size * (key + 8 * torch.eye(DIM))
    value = hadamard(DIM).expand(HEADS, DIM, DIM)
    return LayerTransforms(
        key=key.float(),
        query=reader_of(key, recipe if refined else recipe.unrefined).float().contiguous(),
        key_mean=torch.randn(HEADS, DIM, generator=generator),
        value=value.float().contiguous(),
        value_inverse=value.mT.float().contiguous(),
        value_mean=torch.randn(HEADS, DIM, generator=generator),
        exponents=torch.tensor([[-9, -8], [-10, -11]], dtype=torch.int32),
        spectrum=torch.rand(HEADS, DIM, generator=generator),
        errors=torch.full((2, HEADS), torch.nan),
        fallback=torch.tensor([0, 1], dtype=torch.int32),
        metric=torch.eye(DIM).repeat(HEADS, 1, 1) if metric else None,
    )


def artifact(metric: bool = False, refined: bool = True) -> Artifact:
    recipe = Recipe(sink=4, recent=8, metric_rounding=metric, refine_keys=refined)
    layers = {index: layer(index, metric, refined) for index in (0, 3)}
    return Artifact(MODEL, recipe, layers, {"tokens": 99, "seed": 1}, "0.1.0")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_artifact(artifact(), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Change tensors and header of a file."""
    tensors = load_file(path)
    with files.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["oscarkv"])
    change(tensors, header)
    save_file(tensors, path, metadata={"oscarkv": json.dumps(header)})


@pytest.mark.parametrize(("metric", "refined"), [(False, True), (False, False), (True, False)])
def test_round_trip(tmp_path: Path, metric: bool, refined: bool) -> None:
    before = artifact(metric, refined)
    save_artifact(before, tmp_path / "a")
    after = load_artifact(str(tmp_path / "a"))
    assert (after.model, after.recipe) == (before.model, before.recipe)
    assert after.calibration == before.calibration
    assert sorted(after.layers) == [0, 3]
    for index, mine in before.layers.items():
        theirs = after.layers[index].tensors()
        assert theirs.keys() == mine.tensors().keys()
        for name, tensor in mine.tensors().items():
            assert torch.equal(theirs[name].nan_to_num(7.0), tensor.nan_to_num(7.0))
            assert theirs[name].dtype == tensor.dtype
    save_artifact(after, tmp_path / "b")
    first, second = (files.safe_open(tmp_path / x, framework="pt") for x in "ab")
    assert sorted(first.keys()) == sorted(second.keys())


# -- formats -------------------------------------------------------------------------------------


def format_version(path: Path) -> int:
    with files.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["oscarkv"])["format_version"]


def split_artifact() -> Artifact:
    recipe = Recipe.named("precise", sink=4, recent=8)
    return Artifact(MODEL, recipe, {0: layer(0, split=True)}, {"tokens": 99, "seed": 1}, "0.1.0")


def wide_artifact() -> Artifact:
    recipe = Recipe(sink=4, recent=8, key_bits=3)
    return Artifact(MODEL, recipe, {0: layer(0, bits=3)}, {"tokens": 99, "seed": 1}, "0.1.0")


@pytest.mark.parametrize("mixed", [False, True])
def test_keys_of_3_bits_from_before_they_were_refined_are_refused(
    tmp_path: Path, mixed: bool
) -> None:
    def age(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        header["format_version"] = 3
        if mixed:
            header["recipe"]["key_bits"] = 2
            header["layer_bits"] = {"0": [3, 2]}

    save_artifact(wide_artifact(), tmp_path / "a")
    rewrite(tmp_path / "a", age)
    with pytest.raises(ArtifactError, match=r"format 3 has keys of 3 bits .* calibrate or tune"):
        load_artifact(tmp_path / "a")


def test_keys_that_are_read_as_if_they_had_one_scale_are_refused() -> None:
    with pytest.raises(ArtifactError, match="key"):
        dataclasses.replace(split_artifact(), layers={0: layer(0)})


def test_refined_keys_are_format_3_which_older_readers_refuse(tmp_path: Path) -> None:
    even, refined = artifact(refined=False), artifact()
    mixed = {"layer_bits": {3: (4, 2)}}
    some = refined.layers | {3: layer(3, refined=False)}
    wider = refined.layers | {3: layer(3, bits=3)}
    for expected, one in (
        (1, even),
        (2, dataclasses.replace(even, **mixed)),
        (3, refined),
        (3, dataclasses.replace(refined, layers=some, **mixed)),
        (4, split_artifact()),
        (5, wide_artifact()),
        (5, dataclasses.replace(refined, layers=wider, layer_bits={3: (3, 2)})),
    ):
        save_artifact(one, tmp_path / "a")
        assert format_version(tmp_path / "a") == expected
        assert load_artifact(tmp_path / "a").recipe == one.recipe


@pytest.mark.parametrize("version", [1, 2])
def test_files_from_before_refined_keys_are_read_without_them(tmp_path: Path, version: int) -> None:
    def age(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        del header["recipe"]["refine_keys"]
        header["format_version"] = version

    path = tmp_path / "a.safetensors"
    save_artifact(artifact(refined=False), path)
    rewrite(path, age)
    loaded = load_artifact(path)
    assert not loaded.recipe.refine_keys
    assert loaded.recipe == artifact(refined=False).recipe
    assert torch.equal(loaded.layers[3].query, layer(3, refined=False).query)


def test_layers_with_4_bits_are_not_refined(tmp_path: Path) -> None:
    for bits in ((4, 2), (4, 4)):
        layers = {0: layer(0), 3: layer(3, refined=False)}
        mixed = Artifact(MODEL, Recipe(), layers, layer_bits={3: bits})
        assert [mixed.layer_recipe(index).refined for index in (0, 3)] == [True, False]
        save_artifact(mixed, tmp_path / "a")
        assert load_artifact(tmp_path / "a").layer_bits == {3: bits}
        with pytest.raises(ArtifactError, match="layer 3: key transform and its inverse differ"):
            Artifact(MODEL, Recipe(), {0: layer(0), 3: layer(3)}, layer_bits={3: bits})
    with pytest.raises(ArtifactError, match="layer 3: key transform and its inverse differ"):
        Artifact(MODEL, Recipe(), layers, layer_bits={3: (2, 4)})  # keys of 2 bits are
    with pytest.raises(ArtifactError, match="layer 3: key transform and its inverse differ"):
        Artifact(MODEL, Recipe(), {0: layer(0), 3: layer(3)}, layer_bits={3: (3, 2)})


def test_files_can_be_read_by_others(saved: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert saved.stat().st_mode & 0o777 == 0o666 & ~umask


# -- damage --------------------------------------------------------------------------------------


def set_entry(name: str, value: float) -> Callable[..., None]:
    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        tensors[f"layers.3.{name}"].view(-1)[5 % tensors[f"layers.3.{name}"].numel()] = value

    return change


def set_tensor(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        tensors[f"layers.3.{name}"] = function(tensors[f"layers.3.{name}"]).contiguous()

    return change


def columns(name: str, which: slice, factor: float) -> Callable[..., None]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x[..., which] *= factor
        return x

    return set_tensor(name, change)


def set_header(**values: Any) -> Callable[..., None]:
    def change(tensors: dict[str, Any], header: dict[str, Any]) -> None:
        header.update(values)

    return change


def drop_layer(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("layers.3.")]:
        del tensors[name]


def drop_all(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    tensors.clear()
    header["quantised_layers"] = []


def add_tensor(tensors: dict[str, Any], header: dict[str, Any]) -> None:
    tensors["layers.3.extra"] = torch.zeros(2)


DAMAGE = {
    "nan": (set_entry("key", float("nan")), "layer 3: key has NaN"),
    "infinite": (set_entry("value_mean", float("inf")), "layer 3: value_mean has NaN or infinite"),
    "key inverse": (set_entry("query", 0.5), "layer 3: key transform and its inverse differ"),
    "first digit": (columns("query", slice(0, 4), 0.75), "layer 3: key transform and its inverse"),
    "second digit": (columns("query", slice(12, 16), 4), "layer 3: key transform and its inverse"),
    "unrefined": (
        set_tensor("query", lambda _: layer(3, refined=False).query),
        "layer 3: key transform and its inverse differ",
    ),
    "value inverse": (set_entry("value", 0.9), "layer 3: value transform and its inverse differ"),
    "shape": (set_tensor("key_mean", lambda x: x[:, :8]), r"layer 3: key_mean has shape \[2, 8\]"),
    "heads": (set_tensor("query", lambda x: x[:1]), r"layer 3: query has shape \[1, 16, 16\]"),
    "dtype": (set_tensor("key", lambda x: x.half()), "layer 3: key is torch.float16"),
    "int dtype": (set_tensor("exponents", lambda x: x.float()), "layer 3: exponents is torch.flo"),
    "exponents": (set_entry("exponents", 1000), "layer 3: exponents .* out of range"),
    "missing layer": (drop_layer, "layer 3: missing errors, exponents, fallback, key"),
    "no layers": (drop_all, "no layer has transforms"),
    "extra tensor": (add_tensor, "unexpected tensor 'layers.3.extra'"),
    "unlisted": (set_header(quantised_layers=[0]), "of a layer the header does not list"),
    "beyond": (
        set_header(model=dataclasses.asdict(MODEL) | {"layers": 2}),
        "layer 3 of a model with 2 layers",
    ),
    "older format": (set_header(format_version=0), "artifact format 0, this oscarkv"),
    "newer format": (
        set_header(format_version=9, library_version="9.9"),
        "artifact format 9, this .* reads formats 1 to 5; install the version that wrote it .9.9.",
    ),
    "no model": (set_header(model=None), "damaged header"),
    "strange model": (set_header(model={"name": "x"}), "damaged header"),
    "strange layers": (set_header(quantised_layers=[[0], [3]]), "damaged header"),
    "wrong type": (set_header(model=dataclasses.asdict(MODEL) | {"layers": "4"}), "damaged header"),
    "unknown knob": (set_header(recipe={"colour": 3}), "unknown recipe knob colour"),
    "bad knob": (set_header(recipe={"key_bits": 7}), "key_bits"),
    "no metric": (
        set_header(recipe={"metric_rounding": True, "refine_keys": False}),
        "layer 0: the recipe rounds by a metric",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(saved: Path, what: str) -> None:
    change, message = DAMAGE[what]
    rewrite(saved, change)
    with pytest.raises(ArtifactError, match=f"a.safetensors: .*{message}"):
        load_artifact(saved)


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_a_wrong_second_digit_is_seen_whatever_the_size_of_keys(size: float) -> None:
    good = layer(0, size=size)
    Artifact(MODEL, Recipe(), {0: good})
    good.query[..., -1] *= 1.01
    with pytest.raises(ArtifactError, match="layer 0: key transform and its inverse differ"):
        Artifact(MODEL, Recipe(), {0: good})


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_files(saved: Path, share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ArtifactError, match=r"a\.safetensors is not a readable safetensors file"):
        load_artifact(saved)


def test_things_that_are_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="none does not exist"):
        load_artifact(tmp_path / "none")
    with pytest.raises(ArtifactError, match="is a directory"):
        load_artifact(tmp_path)
    save_file({"x": torch.zeros(2)}, tmp_path / "weights.safetensors")
    with pytest.raises(ArtifactError, match=r"weights.*not an oscarkv artifact"):
        load_artifact(tmp_path / "weights.safetensors")
    save_file({"x": torch.zeros(2)}, tmp_path / "list.safetensors", metadata={"oscarkv": "[1]"})
    with pytest.raises(ArtifactError, match="damaged header"):
        load_artifact(tmp_path / "list.safetensors")
    save_file({"x": torch.zeros(2)}, tmp_path / "text.safetensors", metadata={"oscarkv": "{"})
    with pytest.raises(ArtifactError, match="damaged header"):
        load_artifact(tmp_path / "text.safetensors")
    (tmp_path / "noise").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{not json at all")
    with pytest.raises(ArtifactError, match="not a readable safetensors file"):
        load_artifact(tmp_path / "noise")


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("kind", ["torch", "plain"])
def test_pickles_are_never_loaded(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pt"
    if kind == "torch":
        torch.save({"x": Bomb()}, path)
    else:
        path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ArtifactError, match=r"a\.pt is a pickled PyTorch file"):
        load_artifact(path)


def test_unreadable_files(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArtifactError, match=r"a\.safetensors .*Permission denied"):
        load_artifact(saved)


@pytest.mark.parametrize(
    "field", ["architecture", "layers", "query_heads", "kv_heads", "head_dim", "rope"]
)
def test_other_geometry(field: str) -> None:
    value: Any = getattr(MODEL, field)
    other = dataclasses.replace(MODEL, **{field: value + (1 if isinstance(value, int) else "x")})
    with pytest.raises(ModelMismatchError, match=f"{field}.*oscarkv calibrate"):
        MODEL.require_match(other)


def test_other_weights() -> None:
    MODEL.require_match(dataclasses.replace(MODEL, name="elsewhere", context=2048))
    MODEL.require_match(dataclasses.replace(MODEL, fingerprint=""))
    rounded = "813f0040c0bf"  # the first one a unit in the last place off: another precision
    MODEL.require_match(dataclasses.replace(MODEL, fingerprint=rounded))
    for other in ("843f0040c0bf", "803f0040c03f", "803f0040", "not hex!!!!!"):
        with pytest.raises(ModelMismatchError, match="has others"):
            MODEL.require_match(dataclasses.replace(MODEL, fingerprint=other))


def test_header_lengths_that_look_like_a_pickle(tmp_path: Path) -> None:
    """The first bytes of a safetensors file are a length, and may be any."""
    for text in ("x" * n for n in range(256)):
        path = tmp_path / "a.safetensors"
        save_artifact(Artifact(MODEL, Recipe(), {0: layer(0)}, {"text": text}), path)
        if path.read_bytes()[:1] == b"\x80":
            break
    else:
        pytest.fail("no header length ended in 0x80")
    assert load_artifact(path).calibration == {"text": text}


# -- writing -------------------------------------------------------------------------------------


def fails(error: BaseException) -> Callable[[Path, bytes], None]:
    def write(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise error

    return write


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
@pytest.mark.parametrize("existing", [False, True])
def test_writing_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, existing: bool
) -> None:
    path = tmp_path / "a.safetensors"
    if existing:
        path.write_bytes(b"what was there")
    monkeypatch.setattr(files, "_write_bytes", fails(error))
    expected = OscarError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        save_artifact(artifact(), path)
    if isinstance(error, OSError):
        assert "a.safetensors: No space left" in str(caught.value)
    assert [x.name for x in tmp_path.iterdir()] == (["a.safetensors"] if existing else [])
    if existing:
        assert path.read_bytes() == b"what was there"


def test_writing_where_one_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OscarError, match=r"cannot write .*none/a: No such file or directory"):
        save_artifact(artifact(), tmp_path / "none" / "a")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OscarError, match=r"cannot write .*folder: "):
        save_artifact(artifact(), tmp_path / "folder")
    (tmp_path / "file").write_text("x")
    with pytest.raises(OscarError, match="cannot write"):
        save_artifact(artifact(), tmp_path / "file" / "a")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "folder"]

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "_write_bytes", refuse)  # tests may run as root
    with pytest.raises(
        OscarError, match=r"cannot write .*: Permission denied; nothing was changed"
    ):
        save_artifact(artifact(), tmp_path / "a")
